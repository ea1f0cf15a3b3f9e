"""CUDA's driver on memory of the host, as far as copies are concerned."""

import ctypes
import types

import torch

from millstream.device.cuda_graphs import memcpy_nodes

STREAM = 77
CONTEXT, GRAPH = 55, 66
POINTER, NUMBER, SIZE, STATUS = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int

OTHER_FORMS = {
    "sizes": torch.ones(4, 3),
    "strides": torch.ones(4, 3).t(),
    "dtype": torch.ones(3, 4, dtype=torch.int32),
    "device": torch.ones(3, 4, device="meta"),
    "negated": torch._neg_view(torch.ones(3, 4)),
    "expanded": torch.ones(1, 4).expand(3, 4),
}
"""Tensors that must not be copied as the bytes they are to where a dense one of 3 x 4 lies."""


class HostDriver:
    """The functions that are called, by their names in ``cuda.h``.

    Attributes:
        refuses: Names of the functions that do.
        nodes: Copies that were captured: ``copy`` as the graph has it, and whether it ``happens``.
        num_set: How often one was set to another address.
    """

    def __init__(self):
        self.refuses, self.nodes, self.num_set = set(), [], 0
        self.cuMemcpyAsync = self._function(self._copy, NUMBER, POINTER, SIZE, POINTER)
        self.cuEventRecord = self._function(self._record, POINTER, POINTER)
        self.cuStreamWaitEvent = self._function(self._wait, POINTER, POINTER, ctypes.c_uint)
        self.cuMemcpyDtoDAsync_v2 = self._function(self._capture, NUMBER, NUMBER, SIZE, POINTER)
        self.cuStreamGetCaptureInfo_v2 = self._function(self._tell_node, *[POINTER] * 6)
        self.cuGraphMemcpyNodeGetParams = self._function(self._get, POINTER, POINTER)
        self.cuGraphExecMemcpyNodeSetParams = self._function(self._set, *[POINTER] * 4)
        self.cuGraphNodeSetEnabled = self._function(self._enable, POINTER, POINTER, ctypes.c_uint)
        self.cuCtxGetCurrent = self._function(self._tell_context, POINTER)

    def _function(self, function, *kinds):
        def call(*arguments):
            return 201 if function.__name__.strip("_") in self.refuses else function(*arguments) or 0

        return ctypes.CFUNCTYPE(STATUS, *kinds)(call)

    def _record(self, event, stream):
        pass

    def _wait(self, stream, event, flags):
        pass

    def _copy(self, to, source, num_bytes, stream):
        assert stream == STREAM
        ctypes.memmove(to, source, num_bytes)

    def _capture(self, to, source, num_bytes, stream):
        assert stream == STREAM
        copy = memcpy_nodes.GraphCopy(width=num_bytes, height=1, depth=1)
        copy.start.device, copy.end.device = source, to
        self.nodes.append(types.SimpleNamespace(copy=copy, happens=True))

    def _tell_node(self, stream, status, number, graph, nodes, count):
        self.told = (POINTER * 1)(len(self.nodes))  # handles count from 1
        POINTER.from_address(nodes).value = ctypes.addressof(self.told)
        SIZE.from_address(count).value = 1

    def _get(self, node, copy):
        ctypes.memmove(copy, ctypes.addressof(self.nodes[node - 1].copy), ctypes.sizeof(memcpy_nodes.GraphCopy))

    def _set(self, graph, node, copy, context):
        assert (graph, context) == (GRAPH, CONTEXT)
        told, held = memcpy_nodes.GraphCopy.from_address(copy), self.nodes[node - 1]
        assert (told.width, told.height, told.depth) == (held.copy.width, 1, 1)
        held.copy = memcpy_nodes.GraphCopy.from_buffer_copy(told)
        self.num_set += 1

    def _enable(self, graph, node, happens):
        assert graph == GRAPH
        self.nodes[node - 1].happens = bool(happens)

    def _tell_context(self, context):
        POINTER.from_address(context).value = CONTEXT


def launch(nodes):
    """Do what captured copies do."""
    for node in nodes:
        if node.happens:
            ctypes.memmove(node.copy.end.device, node.copy.start.device, node.copy.width)
