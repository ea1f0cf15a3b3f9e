"""Alike convolutions of our own that wait for nothing of each other are one launch."""

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from millstream.graph import derive_dependencies, validate_graph
from millstream.kernels import horizontal_fusion, registry
from millstream.kernels.conv2d.conv2d import Conv2d
from millstream.kernels.depthwise import depthwise
from millstream.kernels.depthwise.depthwise import Depthwise
from millstream.kernels.family import Grouping
from millstream.kernels.horizontal_fusion import MOST_TOGETHER, fuse_horizontally
from millstream.program import KernelCall, Program, Value
from tests.kernels.stand_ins import own_kernels, pretended_gpu, run_everywhere, use_groupings
from tests.networks import assert_close
from tests.properties.strategies import graphs

__all__ = ["own_kernels", "pretended_gpu"]


# --- which kernels, and in which order -------------------------------------------------------------------------------


class Stand(NamedTuple):
    """In place of a convolution: it says by itself which others it is like."""

    kind: int
    window: tuple[int, ...]
    kernel: int
    out: torch.Tensor


def alone(*_, out):
    del out


def together(*_):
    pass


STANDS = Grouping(alone, Stand, None, together, most_windows=depthwise.MOST_WINDOWS)


@pytest.fixture(autouse=True)
def one_family(request, monkeypatch):
    """Programs of ``program_of`` have one family of kernels; those from Inductor have the real ones."""
    if "pretended_gpu" not in request.fixturenames:
        somewhere = torch.empty(0)
        monkeypatch.setattr(
            Program,
            "described",
            lambda program, arguments: [somewhere if isinstance(each, Value) else each for each in arguments],
        )


def program_of(graph, kinds):
    """A program in which some kernels are convolutions, each of a kind and with a window of its own."""
    calls = tuple(
        KernelCall(alone, (kind, (window,), kernel.id), {"out": Value(kernel.writes[0])})
        if kind is not None and kernel.writes and not kernel.allocates
        else KernelCall(print, (kernel.id,), {})
        for kernel, (kind, window) in zip(graph.kernels, kinds, strict=True)
    )
    return Program(graph, calls, (), (), {}, {}, {}, frozenset(), frozenset(), {})


def members(joined):
    """For each kernel of a joined program those of the other that it does the work of."""
    for call in joined.calls:
        yield [each[2] for each in call.args] if call.target is together else [call.args[-1]]


@settings(max_examples=60, deadline=None)
@given(graph=graphs(max_kernels=120), seed=st.integers(0, 2**32), num_kinds=st.integers(1, 3))
def test_a_joined_program_does_the_same_in_an_order_that_is_right(graph, seed, num_kinds):
    rng = random.Random(seed)
    kinds = [(rng.choice([None, *range(num_kinds)]), rng.randint(1, 3)) for _ in graph.kernels]
    program = program_of(graph, kinds)
    joined = fuse_horizontally(program, [STANDS])
    validate_graph(joined.graph)
    groups = [*members(joined)]
    assert sorted(i for group in groups for i in group) == [kernel.id for kernel in graph.kernels]
    place = {i: position for position, group in enumerate(groups) for i in group}
    for later, found in enumerate(derive_dependencies(graph)):
        assert all(place[each.kernel] < place[later] for each in found)
    for kernel, group in zip(joined.graph.kernels, groups, strict=True):
        parts = [graph.kernels[i] for i in group]
        assert set(kernel.reads) == {name for part in parts for name in part.reads}
        assert set(kernel.writes) == {name for part in parts for name in part.writes}
        assert set(kernel.parts) == {name for part in parts for name in part.parts}
        assert kernel.num_bytes == sum(part.num_bytes for part in parts)
        assert len(group) <= MOST_TOGETHER
        assert len({kinds[i][0] for i in group}) == 1
        assert len({kinds[i][1] for i in group}) <= depthwise.MOST_WINDOWS
    assert chain(joined.graph) <= chain(graph)


def chain(graph):
    return max(horizontal_fusion._depths(graph)[0])


@pytest.mark.parametrize(("number", "sizes"), [(1, [1]), (2, [2]), (8, [8]), (9, [4, 5]), (17, [5, 6, 6])])
def test_many_are_divided_evenly(number, sizes):
    from millstream.testing import towers_graph

    graph = towers_graph(number, 1)
    program = program_of(graph, [(0, 1)] * number)
    joined = fuse_horizontally(program, [STANDS])
    assert sorted(len(group) for group in members(joined)) == sizes
    names = sorted(kernel.name for kernel in joined.graph.kernels)
    assert (names == sorted(kernel.name for kernel in graph.kernels)) is (number == 1)


def test_what_is_alone_keeps_its_program():
    from millstream.testing import chain_graph

    program = program_of(chain_graph(6), [(0, 1)] * 6)
    assert fuse_horizontally(program, [STANDS]) is program


# --- what is alike ---------------------------------------------------------------------------------------------------


def a_dense(**changes):
    def tensor(*size):
        return torch.empty(size, dtype=torch.half).contiguous(memory_format=torch.channels_last)

    usual = Conv2d(
        tensor(1, 16, 8, 8), tensor(32, 16, 1, 1), torch.empty(32), None, True, 32, [1, 1], [0, 0], tensor(1, 32, 8, 8)
    )
    return usual._replace(**{name: change(tensor) for name, change in changes.items()})


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({}, True),
        ({"addend": lambda tensor: tensor(1, 32, 8, 8)}, True),
        ({"bias": lambda tensor: None}, False),
        ({"bias": lambda tensor: torch.empty(32, dtype=torch.double)}, False),
        ({"relu": lambda tensor: False}, False),
        ({"kept": lambda tensor: 30}, False),
        ({"image": lambda tensor: tensor(1, 24, 8, 8), "weight": lambda tensor: tensor(32, 24, 1, 1)}, False),
        ({"out": lambda tensor: tensor(1, 64, 8, 8)[:, :32]}, False),
        ({"padding": lambda tensor: [0, 1]}, False),
        ({"image": lambda tensor: tensor(1, 16, 8, 8).bfloat16()}, False),
    ],
)
def test_dense_convolutions_are_alike_but_for_what_is_added(changes, alike):
    assert (a_dense(**changes).kind == a_dense().kind) is alike


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({"weight": torch.empty(16, 1, 5, 5), "padding": [2] * 4}, True),
        ({"relu": False}, False),
        ({"stride": [2, 2]}, False),
        ({"image": torch.empty(1, 24, 8, 8)}, False),
    ],
)
def test_depthwise_convolutions_are_alike_but_for_windows(changes, alike):
    image = torch.empty(1, 16, 8, 8)
    usual = Depthwise(image, torch.empty(16, 1, 3, 3), True, [1, 1], [1] * 4, [1, 1], torch.empty_like(image))
    assert (usual._replace(**changes).kind == usual.kind) is alike


# --- through Inductor ------------------------------------------------------------------------------------------------


class Cell(nn.Module):
    """Branches of NASNet's kind: depthwise convolutions of one image, products, and sums of them."""

    def __init__(self, num_branches):
        super().__init__()
        self.first = nn.Conv2d(16, 16, 1)
        self.depthwise = nn.ModuleList(
            nn.Conv2d(16, 16, size, padding=size // 2, groups=16, bias=False) for size in [3, 5, 3, 7, 5][:num_branches]
        )
        self.products = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(num_branches))

    def forward(self, x):
        x = torch.relu(self.first(x))
        branches = [product(each(x)) for each, product in zip(self.depthwise, self.products, strict=True)]
        return torch.cat([torch.relu(branch) for branch in branches], 1) + F.avg_pool2d(x, 3, 1, 1).repeat(
            1, len(branches), 1, 1
        )


@pytest.mark.parametrize(("num_branches", "sizes"), [(1, []), (2, [2, 2]), (5, [5, 3, 2])])
def test_a_cell_through_inductor(own_kernels, num_branches, sizes):
    torch.manual_seed(0)
    model, x = Cell(num_branches).double().eval(), torch.randn(2, 16, 6, 6, dtype=torch.double)
    program, (result, *_) = run_everywhere(model, x)
    assert_close(result, model(x), 1e-12)
    joint = [call.args for call in program.calls if call.target.__name__.endswith("_together")]
    assert sorted(map(len, joint), reverse=True) == sizes
    assert sum("×" in kernel.name for kernel in program.graph.kernels) == len(sizes)


@pytest.mark.parametrize("num_branches", [1, 3, 5])
def test_what_is_compiled_ahead_is_what_runs(own_kernels, monkeypatch, num_branches):
    torch.manual_seed(0)
    ahead = []

    def noted(grouping):
        name = grouping.alone.__name__
        return grouping._replace(launches=lambda tasks: [(name, len(tasks))])

    use_groupings(monkeypatch, noted)
    find = registry.find_launches
    monkeypatch.setattr(registry, "find_launches", lambda graph: ahead.extend(find(graph)) or ())
    program, _ = run_everywhere(Cell(num_branches).double().eval(), torch.randn(2, 16, 6, 6, dtype=torch.double))
    groupings = [each.grouping for each in registry.FAMILIES if each.grouping]
    alone, together = {each.alone for each in groupings}, {each.together for each in groupings}
    launched = [
        (call.target.__name__.removesuffix("_together"), len(call.args) if call.target in together else 1)
        for call in program.calls
        if call.target in together | alone
    ]
    assert sorted(ahead) == sorted(launched)
    assert len(launched) < 8
