"""Copies from one GPU to another, each a step of one stream.

PyTorch's own copy makes the current streams of both devices wait for each other. Here plans say who waits, and a graph
that is captured over several devices must not wait for anything outside of it. CUDA's driver is called through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from millstream.errors import DeviceError


def copy_across(to: torch.Tensor, source: torch.Tensor, *, stream: int) -> None:
    """Copy a contiguous tensor to one of its size on another device.

    Devices that cannot reach each other's memory copy through the host's, which the driver sees to; no graph that is
    captured takes that.

    Args:
        to: Where to.
        source: Where from.
        stream: Handle of a stream of either device, which must be current.

    Raises:
        DeviceError: The driver refuses.
    """
    if not (num_bytes := source.nbytes):
        return
    if reach(*sorted((to.device.index, source.device.index))):
        status = _driver().cuMemcpyAsync(to.data_ptr(), source.data_ptr(), num_bytes, stream)
    else:
        ends = to.data_ptr(), _context(to.device.index), source.data_ptr(), _context(source.device.index)
        status = _driver().cuMemcpyPeerAsync(*ends, num_bytes, stream)
    _check(status, "copy")


@functools.cache
def reach(first: int, second: int) -> bool:
    """Let two devices reach each other's memory, as PyTorch does when it first copies; return whether they can.

    Args:
        first: Number of the first.
        second: Of the other, which is larger.
    """
    for source, to in ((first, second), (second, first)):
        torch.zeros(1, device=torch.device("cuda", source)).to(torch.device("cuda", to))
    return torch.cuda.can_device_access_peer(first, second) and torch.cuda.can_device_access_peer(second, first)


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuMemcpyAsync.argtypes = (*[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_void_p)
        driver.cuMemcpyPeerAsync.argtypes = (*[ctypes.c_void_p] * 4, ctypes.c_size_t, ctypes.c_void_p)
    except (OSError, AttributeError) as error:
        raise DeviceError(f"CUDA's driver copies nothing from device to device: {error}") from error
    return driver


@functools.cache
def _context(index: int) -> int:
    """The driver's context of a device that PyTorch, too, works in: it is there as long as the process."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)), "find a device")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "find a device's context")
    return context.value or 0


def _check(status: int, what: str) -> None:
    if status != 0:
        raise DeviceError(f"CUDA's driver refused to {what}: error {status}")
