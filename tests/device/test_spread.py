"""Small kernels kept apart: which asks for how much shared memory, with a pretended driver."""

# ruff: noqa: N802 - names of the driver

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from millstream.device.cuda_graphs import occupancy, spread
from millstream.device.cuda_graphs.occupancy import filled_share
from millstream.device.cuda_graphs.spread import spread_kernels
from millstream.graph import Spread

DEVICE = torch.device("cuda:0")
MULTIPROCESSORS, SHARED_BYTES = 100, 200_000
HALF = SHARED_BYTES // 2
STATIC, LIMIT = 1, 8


@dataclass
class Function:
    """A kernel's code: its static shared memory, the most that launches of it may take beside that, and its name."""

    static: int = 0
    limit: int = 48_000
    name: bytes = b"known"


@dataclass
class Node:
    """A kernel in a graph; of another kind if it has no function."""

    blocks: tuple[int, int, int]
    function: Function | None = field(default_factory=Function)
    shared_bytes: int = 0
    through_library: bool = False


class Driver:
    """CUDA's driver, as far as it shows graphs and changes their kernels. Handles are positions, from 1 on."""

    def __init__(self, nodes, most=SHARED_BYTES, refuses=()):
        self.nodes, self.most, self.refuses = nodes, most, refuses

    def cuGraphGetNodes(self, graph, nodes, count):
        if nodes is not None:
            nodes[:] = range(1, len(self.nodes) + 1)
        count._obj.value = len(self.nodes)
        return 0

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = 0 if self.nodes[node.value - 1].function else 2
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, params):
        found = self.nodes[node.value - 1]
        params._obj.grid, params._obj.block = (ctypes.c_uint * 3)(*found.blocks), (ctypes.c_uint * 3)(64, 2, 1)
        params._obj.shared_bytes = found.shared_bytes
        params._obj.func, params._obj.kernel = (None, node.value) if found.through_library else (node.value, None)
        return 0

    def cuKernelGetFunction(self, function, kernel):
        function._obj.value = kernel.value
        return 0

    def cuFuncGetName(self, name, function):
        name._obj.value = self.nodes[function.value - 1].function.name
        return 0

    def cuFuncGetAttribute(self, value, number, function):
        found = self.nodes[function.value - 1].function
        value._obj.value = {STATIC: found.static, LIMIT: found.limit}[number.value]
        return 0

    def cuFuncSetAttribute(self, function, number, value):
        assert number.value == LIMIT
        if "limit" in self.refuses:
            return 1
        self.nodes[function.value - 1].function.limit = value.value
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, fitting, function, threads, dynamic):
        assert threads.value == 128
        taken = self.nodes[function.value - 1].function.static + dynamic.value
        fitting._obj.value = self.most // max(taken, 50_000)
        return 0

    def cuGraphKernelNodeSetParams_v2(self, node, params):
        if "params" in self.refuses:
            return 1
        found = self.nodes[node.value - 1]
        assert params._obj.shared_bytes <= found.function.limit
        found.shared_bytes = params._obj.shared_bytes
        return 0


@pytest.fixture
def pretend(monkeypatch):
    """Puts a driver in place and returns a graph of its nodes."""
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS, shared_memory_per_multiprocessor=SHARED_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def put(driver):
        for module in (occupancy, spread):
            monkeypatch.setattr(module, "load_driver", lambda: driver)
        return SimpleNamespace(raw_cuda_graph=lambda: 7)

    return put


def spread_known(graph, way):
    """Spread the kernels of a graph whose code is called ``known``."""
    return spread_kernels(graph, DEVICE, way, "known".__eq__)


def test_small_kernels_ask_for_more_than_half_and_others_stay(pretend):
    small, through_library = Node((50, 1, 1)), Node((2, 5, 5), through_library=True)
    large, copy = Node((51, 1, 1), shared_bytes=10), Node((1, 1, 1), function=None)
    graph = pretend(Driver([small, large, copy, through_library]))
    assert spread_known(graph, Spread.APART) == 2
    assert [node.shared_bytes for node in (small, through_library, large, copy)] == [HALF, HALF, 10, 0]
    assert small.function.limit == HALF
    assert spread_known(graph, Spread.APART) == 0, "they have what they want"


@pytest.mark.parametrize(("blocks", "beside_each_other"), [(1, 3), (100, 3), (101, 4), (400, 6), (1900, 21)])
def test_as_many_blocks_fit_as_a_kernel_has_and_two_more(pretend, blocks, beside_each_other):
    node = Node((blocks, 1, 1))
    assert spread_known(pretend(Driver([node])), Spread.EVEN) == 1
    taken = node.shared_bytes + 1024
    assert node.shared_bytes % 128 == 0
    assert SHARED_BYTES // taken == beside_each_other


def test_what_needs_more_keeps_it_and_nothing_is_asked_for_where_hundreds_fit(pretend):
    nodes = [Node((100, 1, 1), shared_bytes=90_000), Node((30_000, 1, 1), shared_bytes=5)]
    assert spread_known(pretend(Driver(nodes)), Spread.EVEN) == 0
    assert [node.shared_bytes for node in nodes] == [90_000, 5]


def test_packed_kernels_stay(pretend):
    assert spread_known(pretend(Driver([Node((1, 1, 1))])), Spread.PACKED) == 0


def test_static_shared_memory_counts(pretend):
    some, enough = Node((1, 1, 1), Function(static=30_000)), Node((1, 1, 1), Function(static=30_000), HALF - 30_000)
    assert spread_known(pretend(Driver([some, enough])), Spread.APART) == 1
    assert some.shared_bytes == enough.shared_bytes == HALF - 30_000


def test_the_limit_of_a_function_is_never_lowered(pretend):
    """Another launch of it takes more, and would fail."""
    node = Node((1, 1, 1), Function(limit=150_000))
    assert spread_known(pretend(Driver([node])), Spread.APART) == 1
    assert (node.shared_bytes, node.function.limit) == (HALF, 150_000)


@pytest.mark.parametrize("refusing", [{"refuses": ("limit",)}, {"refuses": ("params",)}, {"most": HALF - 1}])
def test_what_the_driver_refuses_stays_as_it_was(pretend, refusing):
    node = Node((1, 1, 1), shared_bytes=5)
    assert spread_known(pretend(Driver([node], **refusing)), Spread.APART) == 0
    assert node.shared_bytes == 5


@pytest.mark.parametrize("way", [Spread.APART, Spread.EVEN])
def test_unknown_code_gets_what_it_asked_for(pretend, way):
    """A library's may use what it is given."""
    known, cudnn, nameless = (Node((1, 1, 1), Function(name=name)) for name in (b"known", b"sm90", b""))
    assert spread_known(pretend(Driver([cudnn, known, nameless])), way) == 1
    assert known.shared_bytes > 0 == cudnn.shared_bytes == nameless.shared_bytes


def test_where_names_are_not_told_nothing_happens(pretend, monkeypatch):
    node = Node((1, 1, 1))
    monkeypatch.delattr(Driver, "cuFuncGetName")
    assert spread_known(pretend(Driver([node])), Spread.APART) == node.shared_bytes == 0


def test_without_a_driver_nothing_happens(pretend):
    assert spread_known(pretend(None), Spread.APART) == 0
    assert filled_share(pretend(None), DEVICE) is None


def test_the_share_that_kernels_fill_is_the_mean_of_theirs(pretend):
    nodes = [Node((100, 1, 1)), Node((5000, 1, 1)), Node((1, 1, 1), function=None)]
    assert filled_share(pretend(Driver(nodes)), DEVICE) == (0.25 + 1.0) / 2  # a multiprocessor holds four
    assert filled_share(pretend(Driver(nodes[2:])), DEVICE) is None
