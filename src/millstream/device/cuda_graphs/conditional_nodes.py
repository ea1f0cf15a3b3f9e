"""Conditional nodes of CUDA graphs: parts that run, or run again, as a value on the device says.

A node of CUDA's holds the graphs of its bodies, and looks at a number (its *handle*), which a kernel before it sets.
That kernel is ours, and CUDA's driver compiles it from the text below. PyTorch has no such nodes before 2.12. The
driver's calls are made through ctypes, with the layout of ``cuda.h`` (CUDA 12.8 and 13).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

OLDEST_DRIVER = 12080
"""The first version whose branches have two bodies."""

_NEWEST_KNOWN = 9, 0
"""The newest devices that this version of the text knows; it is compiled for later ones as well."""

_CONDITIONAL_NODE, _IF, _WHILE = 13, 0, 1  # CU_GRAPH_NODE_TYPE_CONDITIONAL and CU_GRAPH_COND_TYPE_* of cuda.h
_THREAD_LOCAL, _SET = 1, 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_SET_CAPTURE_DEPENDENCIES

#: Sets a handle to the byte at an address.
_DECIDE = """
.version 8.3
.target sm_{capability}
.address_size 64

.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);

.visible .entry decide (.param .u64 handle, .param .u64 address)
{{
    .reg .b16 %byte;
    .reg .b32 %value;
    .reg .b64 %handle, %address;
    ld.param.u64 %handle, [handle];
    ld.param.u64 %address, [address];
    cvta.to.global.u64 %address, %address;
    ld.global.u8 %byte, [%address];
    cvt.u32.u16 %value, %byte;
    {{
        .param .b64 first;
        .param .b32 second;
        st.param.b64 [first], %handle;
        st.param.b32 [second], %value;
        call.uni cudaGraphSetConditional, (first, second);
    }}
    ret;
}}
"""


class _Conditional(ctypes.Structure):
    """``CUDA_CONDITIONAL_NODE_PARAMS`` of cuda.h."""

    _fields_ = (
        ("handle", ctypes.c_uint64),
        ("kind", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("graphs", ctypes.POINTER(ctypes.c_void_p)),
        ("context", ctypes.c_void_p),
    )


class _OfAnyKind(ctypes.Union):
    _fields_ = (("conditional", _Conditional), ("reserved", ctypes.c_longlong * 29))


class _NodeParams(ctypes.Structure):
    """``CUgraphNodeParams`` of cuda.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved", ctypes.c_int * 3),
        ("of", _OfAnyKind),
        ("reserved_too", ctypes.c_longlong),
    )


@functools.cache
def why_not_conditional() -> str:
    """Say in a few words why there are no conditional nodes; empty where there are."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        driver.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return "CUDA's driver is not to be had"
    if version.value < OLDEST_DRIVER:
        found, needed = (f"{each // 1000}.{each % 1000 // 10}" for each in (version.value, OLDEST_DRIVER))
        return f"the driver is for CUDA {found}, and conditional nodes with two bodies are there from {needed} on"
    return ""


@functools.cache
def conditional_nodes(index: int) -> ConditionalNodes:
    """What makes conditional nodes on the CUDA device of this number, which is current.

    Raises:
        RuntimeError: The driver refuses.
    """
    return ConditionalNodes(ctypes.CDLL("libcuda.so.1"), torch.cuda.get_device_capability(index))


class ConditionalNodes:
    """Makes conditional nodes while a stream is captured.

    Args:
        driver: CUDA's, of a device that is current.
        capability: Of that device.

    Raises:
        RuntimeError: It refuses the kernel that decides.
    """

    def __init__(self, driver: Any, capability: tuple[int, int]) -> None:
        self._driver = driver
        module, self._kernel, self._context = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        text = _DECIDE.format(capability="{}{}".format(*min(capability, _NEWEST_KNOWN)))
        self._call("cuModuleLoadData", ctypes.byref(module), text.encode())
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"decide")
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"CUDA's driver refuses {name} with the status {status}.")

    def branch(self, stream: int, address: int) -> tuple[int, int]:
        """Add a node after what is captured on a stream: one of two bodies.

        Args:
            stream: Its handle; what is captured there from now on comes after the node.
            address: Of a byte on the device: 1 for the first body, 0 for the second.

        Returns:
            The graphs of the bodies.
        """
        handle = self._handle(stream)
        self.decide(handle, stream, address)
        first, second = self._add(stream, handle, _IF, 2)
        return first, second

    def loop(self, stream: int, address: int) -> tuple[int, int]:
        """Add a node after what is captured on a stream: a body that runs as long as its handle is not 0.

        Args:
            stream: Its handle.
            address: Of a byte on the device: whether the body runs at all.

        Returns:
            The handle, which the body is to ``decide`` anew, and the graph of the body.
        """
        handle = self._handle(stream)
        self.decide(handle, stream, address)
        (body,) = self._add(stream, handle, _WHILE, 1)
        return handle, body

    def decide(self, handle: int, stream: int, address: int) -> None:
        """Launch the kernel that sets a node's handle to the byte at an address."""
        given = ctypes.c_uint64(handle), ctypes.c_uint64(address)
        pointers = (ctypes.c_void_p * 2)(*map(ctypes.addressof, given))
        one = ctypes.c_uint(1)
        sizes = one, one, one, one, one, one
        self._call("cuLaunchKernel", self._kernel, *sizes, ctypes.c_uint(0), ctypes.c_void_p(stream), pointers, None)

    @contextmanager
    def body(self, graph: int, stream: int) -> Iterator[None]:
        """Capture what is launched on a stream, which is not captured otherwise, into the graph of a body."""
        handle, ended = ctypes.c_void_p(stream), ctypes.c_void_p()
        nothing = None, None, ctypes.c_size_t(0)
        self._call("cuStreamBeginCaptureToGraph", handle, ctypes.c_void_p(graph), *nothing, ctypes.c_int(_THREAD_LOCAL))
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # which only says that there was an error
                self._call("cuStreamEndCapture", handle, ctypes.byref(ended))
            raise
        self._call("cuStreamEndCapture", handle, ctypes.byref(ended))

    def _captured(self, stream: int) -> tuple[ctypes.c_void_p, Any, ctypes.c_size_t]:
        """The graph that a stream is captured into, and the nodes that the next launch comes after."""
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        nodes, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        found = map(ctypes.byref, (status, number, graph, nodes, count))
        self._call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *found)
        return graph, nodes, count

    def _handle(self, stream: int) -> int:
        graph, _, _ = self._captured(stream)
        handle, default, flags = ctypes.c_uint64(), ctypes.c_uint(0), ctypes.c_uint(0)
        self._call("cuGraphConditionalHandleCreate", ctypes.byref(handle), graph, self._context, default, flags)
        return handle.value

    def _add(self, stream: int, handle: int, kind: int, size: int) -> tuple[int, ...]:
        graph, before, count = self._captured(stream)
        params, node = _NodeParams(), ctypes.c_void_p()
        params.type = _CONDITIONAL_NODE
        params.of.conditional = _Conditional(handle, kind, size, None, self._context)
        self._call("cuGraphAddNode", ctypes.byref(node), graph, before, count, ctypes.byref(params))
        nodes = (ctypes.c_void_p * 1)(node)
        one, how = ctypes.c_size_t(1), ctypes.c_uint(_SET)
        self._call("cuStreamUpdateCaptureDependencies", ctypes.c_void_p(stream), nodes, one, how)
        return tuple(int(params.of.conditional.graphs[number] or 0) for number in range(size))
