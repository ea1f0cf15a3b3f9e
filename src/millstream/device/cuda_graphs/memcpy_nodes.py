"""Memcpy nodes of CUDA graphs: copies within a graph that each launch makes from or to somewhere else, or not at all.

PyTorch captures graphs and shows their handles; only the driver shows their nodes. Its calls are made through ctypes
and compiled code (``_native/copies.cpp``), with the layout of ``cuda.h``.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from millstream import _native


@functools.cache
def memcpy_library() -> MemcpyLibrary | None:
    """Return what makes memcpy nodes; ``None`` where compiled code, or a call of CUDA's driver, cannot be had."""
    core = _native.load("core")
    try:
        return None if core is None else MemcpyLibrary(core, ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


class _End(ctypes.Structure):
    """Half of ``CUDA_MEMCPY3D`` of cuda.h (CUDA 12 and 13)."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("x", "y", "z", "level")),
        ("kind", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("array", "reserved")),
        *((name, ctypes.c_size_t) for name in ("pitch", "height")),
    )


class GraphCopy(ctypes.Structure):
    """``CUDA_MEMCPY3D`` of cuda.h (CUDA 12 and 13): a copy in a CUDA graph."""

    _fields_ = (("start", _End), ("end", _End), *((name, ctypes.c_size_t) for name in ("width", "height", "depth")))


class MemcpyLibrary:
    """Makes memcpy nodes: copies within a CUDA graph, one end of which is set for each launch.

    Args:
        core: The compiled code.
        driver: CUDA's driver.

    Attributes:
        has_refused: Whether the driver has refused anything that makes such a node; it is not to be asked again.

    Raises:
        AttributeError: It lacks a function.
    """

    def __init__(self, core: Any, driver: Any) -> None:
        self._copy, self._find = driver.cuMemcpyDtoDAsync_v2, driver.cuStreamGetCaptureInfo_v2
        self._look, self._context = driver.cuGraphMemcpyNodeGetParams, driver.cuCtxGetCurrent
        functions = driver.cuGraphExecMemcpyNodeSetParams, driver.cuGraphNodeSetEnabled
        self._kept = functions
        self.has_refused = False
        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in functions]
        self._make = functools.partial(core.make_nodes, *addresses)

    def capture_copy(self, to: int, source: int, num_bytes: int, stream: int) -> tuple[int, GraphCopy] | None:
        """Copy while a stream is captured, between addresses of one device.

        Returns:
            The copy's node and what it is told; ``None`` where the driver refuses.
        """
        handle = ctypes.c_void_p(stream)
        if self._copy(ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes), handle) != 0:
            return None
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        nodes, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()  # what the next launch comes after
        found = (status, number, graph, nodes, count)
        if self._find(handle, *map(ctypes.byref, found)) != 0 or count.value != 1 or nodes[0] is None:
            return None
        copy = GraphCopy()
        if self._look(ctypes.c_void_p(nodes[0]), ctypes.byref(copy)) != 0:
            return None
        return nodes[0], copy

    def make_nodes(self, graph: int, copies: Sequence[tuple[int, GraphCopy, bool]]) -> MemcpyNodes | None:
        """The memcpy nodes of an instantiated graph of the current device.

        Args:
            graph: Its handle.
            copies: Of each its node, what it is told, and whether it leads into the graph.
        """
        context = ctypes.c_void_p()
        if self._context(ctypes.byref(context)) != 0:
            return None
        told = [(node, ctypes.addressof(copy), leads_in) for node, copy, leads_in in copies]
        opens, closes = self._make(graph, context.value or 0, told)
        return MemcpyNodes(opens, closes, self)


class MemcpyNodes:
    """Copies within one CUDA graph. They happen where they are open, as they are at first."""

    def __init__(self, opens: Callable[[int], int], closes: Callable[[], int], library: MemcpyLibrary) -> None:
        self._open, self._close, self._library = opens, closes, library  # which keeps the driver's functions

    def open(self, addresses: array[int]) -> bool:
        """Let the launches to come copy from and to these addresses, one for each node; false where the driver refuses.

        Launches that are under way are not concerned.
        """
        return self._open(addresses.buffer_info()[0]) == 0

    def close(self) -> bool:
        """Let the launches to come not copy; false where the driver refuses."""
        return self._close() == 0
