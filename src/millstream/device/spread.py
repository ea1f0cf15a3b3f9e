"""Small kernels apart from each other on a GPU: a multiprocessor for each of their blocks.

Kernels of few blocks that run beside each other would all find free multiprocessors, and yet their blocks are often put
on the same ones, where they slow each other down. Two blocks that ask for more than half of a multiprocessor's shared
memory never share it; so each block of a small kernel asks for as much, and does not use it. ``docs/decisions/0017``
has the figures.

The driver's calls are made through ctypes, as in ``occupancy``.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from millstream.device.occupancy import KernelNodeParams, fitting_blocks, load_driver, read_kernels

SMALL = 0.5  # of the multiprocessors: a kernel of more blocks finds neighbours whatever it asks for

_STATIC_SHARED_BYTES, _MOST_DYNAMIC_SHARED_BYTES = 1, 8  # CU_FUNC_ATTRIBUTE_* of cuda.h


def spread_kernels(graph: torch.cuda.CUDAGraph, device: torch.device) -> int:
    """Let the blocks of small kernels in a captured graph be alone, as far as other small kernels are concerned.

    What the kernels compute stays the same.

    Args:
        graph: Captured with ``keep_graph=True``, and not instantiated yet.
        device: On which.

    Returns:
        How many kernels ask for more than they did.
    """
    driver = load_driver()
    if driver is None:
        return 0
    properties = torch.cuda.get_device_properties(device)
    most_blocks = int(SMALL * properties.multi_processor_count)
    shared_bytes = properties.shared_memory_per_multiprocessor // 2  # of which the system takes a part for each block
    return sum(
        _widen(driver, node, params, function, shared_bytes)
        for node, params, function in read_kernels(driver, graph)
        if math.prod(params.grid) <= most_blocks
    )


def _widen(driver: Any, node: int, params: KernelNodeParams, function: ctypes.c_void_p, shared_bytes: int) -> bool:
    """Let a kernel ask for so much shared memory in all, if it asks for less; false where that cannot be."""
    wanted = shared_bytes - _attribute(driver, function, _STATIC_SHARED_BYTES)
    if params.shared_bytes >= wanted:
        return False
    # The limit is the function's, and other launches of it rely on it: never lower.
    if _attribute(driver, function, _MOST_DYNAMIC_SHARED_BYTES) < wanted:
        limit = ctypes.c_int(_MOST_DYNAMIC_SHARED_BYTES)
        if driver.cuFuncSetAttribute(function, limit, ctypes.c_int(wanted)) != 0:
            return False
    params.shared_bytes = wanted
    if not fitting_blocks(driver, params, function):
        return False
    return bool(driver.cuGraphKernelNodeSetParams_v2(ctypes.c_void_p(node), ctypes.byref(params)) == 0)


def _attribute(driver: Any, function: ctypes.c_void_p, number: int) -> int:
    value = ctypes.c_int(0)
    driver.cuFuncGetAttribute(ctypes.byref(value), ctypes.c_int(number), function)
    return value.value
