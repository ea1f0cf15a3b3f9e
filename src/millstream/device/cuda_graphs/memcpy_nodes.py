"""Memcpy nodes of CUDA graphs: copies within a graph that each launch makes from or to somewhere else, or not at all.

PyTorch captures graphs and shows their handles; only the driver shows their nodes. Its calls are made through ctypes
and compiled code (``native.cpp``), with the layout of ``cuda.h``.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millstream.device.native import build_native


@functools.cache
def memcpy_library() -> MemcpyLibrary | None:
    """What makes memcpy nodes; ``None`` where compiled code, or a call of CUDA's driver, cannot be had."""
    path = build_native()
    try:
        return None if path is None else MemcpyLibrary(path, ctypes.CDLL("libcuda.so.1"))
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
        path: Of the compiled code.
        driver: CUDA's driver.

    Attributes:
        has_refused: Whether the driver has refused anything that makes such a node; it is not to be asked again.

    Raises:
        AttributeError: It lacks a function.
    """

    def __init__(self, path: Path, driver: Any) -> None:
        self._copy, self._find = driver.cuMemcpyDtoDAsync_v2, driver.cuStreamGetCaptureInfo_v2
        self._look, self._context = driver.cuGraphMemcpyNodeGetParams, driver.cuCtxGetCurrent
        functions = driver.cuGraphExecMemcpyNodeSetParams, driver.cuGraphNodeSetEnabled
        self._kept = functions
        self.has_refused = False
        self._functions = [ctypes.cast(each, ctypes.c_void_p) for each in functions]
        library, pointer = ctypes.PyDLL(str(path)), ctypes.c_void_p
        self.make, self.drop, self.add = (
            library.millstream_make_nodes,
            library.millstream_drop_nodes,
            library.millstream_add_node,
        )
        self.make.argtypes, self.make.restype = [pointer] * 4, pointer
        self.drop.argtypes, self.drop.restype = [pointer], None
        self.add.argtypes, self.add.restype = [pointer, pointer, pointer, ctypes.c_int], None
        self.open, self.close = library.millstream_open_nodes, library.millstream_close_nodes
        self.open.argtypes, self.close.argtypes = [pointer, pointer], [pointer]

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
        handle = ctypes.c_void_p(self.make(*self._functions, graph, context))
        for node, copy, leads_in in copies:
            self.add(handle, node, ctypes.byref(copy), leads_in)
        return MemcpyNodes(self, handle)


class MemcpyNodes:
    """Copies within one CUDA graph. They happen where they are open, as they are at first."""

    def __init__(self, library: MemcpyLibrary, handle: ctypes.c_void_p) -> None:
        self._drop, self._handle = library.drop, handle
        self._open = functools.partial(library.open, handle)
        self._close = functools.partial(library.close, handle)

    def open(self, addresses: array[int]) -> bool:
        """Let the launches to come copy from and to these addresses, one for each node; false where the driver refuses.

        Launches that are under way are not concerned.
        """
        return self._open(addresses.buffer_info()[0]) == 0

    def close(self) -> bool:
        """Let the launches to come not copy; false where the driver refuses."""
        return self._close() == 0

    def __del__(self) -> None:
        self._drop(self._handle)
