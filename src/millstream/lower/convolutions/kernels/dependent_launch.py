"""Kernels of our own that start before the one in front of them on a stream has ended.

CUDA calls it a programmatic dependent launch. Blocks are placed and addresses computed while the kernel in front ends;
then each block waits (``gdc_wait``) until all that it comes after has ended, and only then reads or writes. When its
products are summed, the kernel lets the one after it start likewise (``gdc_launch_dependents``).

So every kernel launched in this way must wait before its first access, whatever it reads: what it comes after is
decided by the plan. Inductor's own way of it leaves waits out where program order needs none, and stays off
(``lower/compile.py``).

Tried on torch 2.11, Triton 3.6.
"""

from __future__ import annotations

import functools

import torch

_FIRST_CAPABILITY = (9, 0)


@functools.cache
def dependent_launch_options(device: torch.device) -> dict[str, bool]:
    """How to launch a kernel that has an argument ``STARTS_EARLY``, on a GPU that can do it and on others."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return {"STARTS_EARLY": False}
    return {"STARTS_EARLY": True, "launch_pdl": True}
