"""Ask the CUDA driver how much of a GPU the kernels of a captured graph fill.

PyTorch shows the graph that it captured (``CUDAGraph.raw_cuda_graph``) but not what is in it; the driver's own calls
do. They are made through ctypes, with the layout of ``cuda.h`` (CUDA 12 and 13). Where a call is not to be had, or
refuses, nothing is known.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL of cuda.h
_NEEDED = ("cuGraphKernelNodeGetParams_v2", "cuGraphKernelNodeSetParams_v2", "cuKernelGetFunction")  # since CUDA 12


class KernelNodeParams(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2`` of cuda.h."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def filled_share(graph: torch.cuda.CUDAGraph, device: torch.device) -> float | None:
    """Return the share of the device that the kernels of a captured graph fill on average, from 0 to 1.

    A kernel's share is the number of its blocks over the number that the device can hold at one time, which depends on
    the kernel's registers, shared memory and block size. A library's call may launch several kernels, small ones that
    pad or sum up beside a large one; how long each of them takes is not known. ``None`` where the driver does not tell.

    Args:
        graph: Captured with ``keep_graph=True``.
        device: On which.
    """
    driver = load_driver()
    if driver is None:
        return None
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    shares = [
        min(1.0, math.prod(params.grid) / (fitting * multiprocessors))
        for _, params, function in read_kernels(driver, graph)
        if (fitting := fitting_blocks(driver, params, function))
    ]
    return sum(shares) / len(shares) if shares else None


def read_kernels(driver: Any, graph: torch.cuda.CUDAGraph) -> Iterator[tuple[int, KernelNodeParams, ctypes.c_void_p]]:
    """Go through the kernels in a captured graph: node, how it is launched, and the kernel's function."""
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(0)
    if driver.cuGraphGetNodes(raw, None, ctypes.byref(count)) != 0 or count.value == 0:
        return
    nodes = (ctypes.c_void_p * count.value)()
    if driver.cuGraphGetNodes(raw, nodes, ctypes.byref(count)) != 0:
        return
    for node in nodes:
        handle, kind, params = ctypes.c_void_p(node), ctypes.c_int(-1), KernelNodeParams()
        if driver.cuGraphNodeGetType(handle, ctypes.byref(kind)) != 0 or kind.value != _KERNEL_NODE:
            continue
        if driver.cuGraphKernelNodeGetParams_v2(handle, ctypes.byref(params)) != 0:
            continue
        function = ctypes.c_void_p(params.func)
        if params.func or driver.cuKernelGetFunction(ctypes.byref(function), ctypes.c_void_p(params.kernel)) == 0:
            yield node, params, function


def fitting_blocks(driver: Any, params: KernelNodeParams, function: ctypes.c_void_p) -> int:
    """Return how many blocks of a kernel a multiprocessor holds at one time; 0 where the driver does not tell."""
    fitting = ctypes.c_int(0)
    status = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(fitting), function, ctypes.c_int(math.prod(params.block)), ctypes.c_size_t(params.shared_bytes)
    )
    return fitting.value if status == 0 else 0


@cache
def load_driver() -> Any:
    """CUDA's driver; ``None`` where it, or a function that is needed here, cannot be had."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name in _NEEDED:
            getattr(driver, name)
    except (OSError, AttributeError):
        return None
    return driver
