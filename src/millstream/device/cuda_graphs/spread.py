"""Kernels that run beside each other on a GPU, spread over its multiprocessors.

They would often all find free multiprocessors, and yet their blocks are put on the same ones, where they slow each
other down. How many fit there is a question of what each asks for; so each asks for more shared memory than it needs,
and does not use it. Two blocks that ask for more than half of a multiprocessor's never share it. Figures are in
``docs/decisions/side-by-side.md``.

That is safe for code that does not ask the device how much it was given. A library's may: one of cuDNN's fails on the
device. So only code that is known is changed.

The driver's calls are made through ctypes, as in ``occupancy``.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch

from millstream.device.cuda_graphs.occupancy import KernelNodeParams, fitting_blocks, load_driver, read_kernels
from millstream.graph import Spread

SMALL = 0.5  # of the multiprocessors: a kernel of more blocks finds neighbours whatever it asks for
BESIDE = 2  # so many blocks shall find room on a multiprocessor beside those of one kernel
_SYSTEM_BYTES, _UNIT_BYTES = 1024, 128  # of shared memory: what the system takes for each block, and in what units

_STATIC_SHARED_BYTES, _MOST_DYNAMIC_SHARED_BYTES = 1, 8  # CU_FUNC_ATTRIBUTE_* of cuda.h


def spread_kernels(
    graph: torch.cuda.CUDAGraph, device: torch.device, spread: Spread, is_known: Callable[[str], bool]
) -> int:
    """Let blocks of kernels in a captured graph ask for so much shared memory that they are spread as they shall be.

    ``APART``: the blocks of small kernels never share a multiprocessor. ``EVEN``: on each fit as many blocks of a
    kernel as it has, divided among all, and ``BESIDE`` more. What the kernels compute stays the same.

    Args:
        graph: Captured with ``keep_graph=True``, and not instantiated yet.
        device: On which.
        spread: In which way.
        is_known: Tells by the name of a kernel's code whether it does not depend on how much shared memory it gets.

    Returns:
        How many kernels ask for more than they did. None do where the driver does not tell names (before CUDA 12.3).
    """
    driver = load_driver()
    if driver is None or not hasattr(driver, "cuFuncGetName"):
        return 0
    properties = torch.cuda.get_device_properties(device)
    count, memory = properties.multi_processor_count, properties.shared_memory_per_multiprocessor

    def wanted_bytes(num_blocks: int) -> int:
        if spread is Spread.EVEN:
            share = memory // (math.ceil(num_blocks / count) + BESIDE) - _SYSTEM_BYTES
            return share // _UNIT_BYTES * _UNIT_BYTES
        return memory // 2 if spread is Spread.APART and num_blocks <= int(SMALL * count) else 0

    return sum(
        _widen(driver, node, params, function, wanted)
        for node, params, function in read_kernels(driver, graph)
        if (wanted := wanted_bytes(math.prod(params.grid))) > 0 and is_known(code_name(driver, function))
    )


def code_name(driver: Any, function: ctypes.c_void_p) -> str:
    """Return what the code of a kernel is called on the device; empty where the driver does not tell."""
    name = ctypes.c_char_p()
    status = driver.cuFuncGetName(ctypes.byref(name), function)
    return name.value.decode() if status == 0 and name.value else ""


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
