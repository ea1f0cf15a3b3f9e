"""Convolutions of long sums become two kernels. What these compute is tested on a GPU."""

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from millstream.check import check_plan
from millstream.cost import Costs, KernelCost
from millstream.graph import Role, derive_dependencies, validate_graph
from millstream.kernels.conv2d import conv2d, split_k
from millstream.kernels.conv2d.conv2d_tiles import choose_splits
from millstream.kernels.conv2d.split_k import split_long_sums
from millstream.program import KernelCall, Program, TensorLayout, Value
from millstream.schedule import plan_graph, plan_serial
from tests.kernels.stand_ins import own_kernels, pretended_gpu, run_everywhere
from tests.networks import assert_close
from tests.properties.strategies import graphs

__all__ = ["own_kernels", "pretended_gpu"]


# --- how many splits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs", "pixels", "window", "wanted"),
    [
        (4032, 672, 121, (1, 1), 6),
        (2016, 336, 441, (1, 1), 3),
        (2048, 320, 64, (1, 1), 8),
        (512, 512, 49, (3, 3), 15),
        (448, 384, 64, (3, 3), 16),
        (256, 256, 196, (3, 3), 8),
        (1024, 256, 196, (1, 1), 1),  # short
        (192, 192, 289, (1, 7), 7),
        (160, 160, 289, (7, 1), 7),
        (160, 160, 289, (1, 7), 1),  # short
        (144, 144, 49, (3, 3), 1),  # as short, and fewer results
        (2048, 2048, 3136, (1, 1), 1),  # there are results enough
    ],
)
def test_long_sums_of_few_results_are_split(inputs, outputs, pixels, window, wanted):
    with FakeTensorMode():
        weight, output = torch.empty(outputs, inputs, *window), torch.empty(1, outputs, 1, pixels)
    assert choose_splits(weight, output) == wanted


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 600), st.integers(1, 80), st.integers(1, 3), st.integers(1, 400))
def test_no_split_is_empty(inputs, outputs, rows, pixels):
    with FakeTensorMode():
        weight, output = torch.empty(8 * outputs, 8 * inputs, rows, 1), torch.empty(1, 8 * outputs, 1, pixels)
    number = choose_splits(weight, output)
    steps = rows * -(-8 * inputs // 64)
    assert (number - 1) * -(-steps // number) < steps


# --- which kernels ---------------------------------------------------------------------------------------------------


class Stand(NamedTuple):
    """In place of a convolution's tensors."""

    is_long: bool


def alone(*_, out):
    del out


def together(*_):
    pass


def use_stands(monkeypatch):
    monkeypatch.setattr(split_k, "convolve_2d", alone)
    monkeypatch.setattr(split_k, "convolve_2d_together", together)
    monkeypatch.setattr(split_k, "_described", lambda program, convolutions: [Stand(each[5]) for each in convolutions])
    monkeypatch.setattr(split_k, "partials_shape", lambda stands: (len(stands), 3, 5, 8) if stands[0].is_long else None)


def program_of(graph, seed):
    """A program in which some kernels are convolutions of two tensors that they read, alone or two of them."""
    rng = random.Random(seed)
    calls = []
    for kernel in graph.kernels:
        call = KernelCall(print, (kernel.id,), {})
        if len(kernel.reads) >= 2 and kernel.writes and not kernel.allocates and rng.random() < 0.7:
            image, weight, *others = map(Value, kernel.reads)
            addend = others[0] if others else None
            one = (image, weight, None, addend, kernel.id, rng.random() < 0.6, [1, 1], [0, 0])
            out = Value(kernel.writes[0])
            is_alone = rng.random() < 0.5
            call = (
                KernelCall(alone, one, {"out": out})
                if is_alone
                else KernelCall(together, ((*one, out), (*one, out)), {})
            )
        calls.append(call)
    layout = TensorLayout((5,), (1,), torch.half, torch.device("cpu"))
    tensors = {buffer.id: layout for buffer in graph.buffers}
    return Program(graph, tuple(calls), (), (), {}, {}, {}, frozenset(), frozenset(), tensors)


def values_of(tree):
    if isinstance(tree, Value):
        return {tree.name}
    if isinstance(tree, KernelCall):
        return values_of((tree.args, tree.kwargs.values()))
    return set().union(*map(values_of, tree)) if not isinstance(tree, (str, int)) and tree is not None else set()


@settings(max_examples=80, deadline=None)
@given(graph=graphs(max_kernels=80), seed=st.integers(0, 2**32))
def test_two_kernels_do_the_work_of_one(graph, seed):
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_stands(monkeypatch)
        program = program_of(graph, seed)
        parted = split_long_sums(program)
    validate_graph(parted.graph)
    assert len(parted.calls) == len(parted.graph.kernels)
    pairs = [i for i, call in enumerate(parted.calls) if call.target is conv2d.convolve_2d_partials]
    assert (parted is program) is (not pairs)
    found = derive_dependencies(parted.graph)
    for number, i in enumerate(pairs):
        products, rest = parted.graph.kernels[i : i + 2]
        (memory,) = products.writes
        assert parted.calls[i + 1].target is conv2d.reduce_2d_partials
        assert parted.calls[i].kwargs["out"] == parted.calls[i + 1].args[0] == Value(memory)
        assert parted.graph.buffer_of[memory].role is Role.TEMPORARY
        assert parted.graph.buffer_of[memory].num_bytes == 4 * parted.layouts[memory].size[0] * 3 * 5 * 8
        for kernel in (products, rest):
            assert values_of(parted.calls[kernel.id]) <= {*kernel.reads, *kernel.writes}
        assert memory in rest.reads
        assert i in {each.kernel for each in found[i + 1]}
        old = graph.kernels[i - number]
        assert (rest.writes, rest.parts) == (old.writes, old.parts)
        assert {*products.reads, *rest.reads} - {memory} == {*old.reads}
    costs = Costs(tuple(KernelCost(1000, 0.1, 0.1) for _ in parted.graph.kernels))
    for plan in (plan_serial(parted.graph), plan_graph(parted.graph, costs, 4, "list")):
        check_plan(plan)


# --- through Inductor ------------------------------------------------------------------------------------------------


class Funnel(nn.Module):
    """Sums of 1,536 and of 16 products, alone and side by side, some with what follows."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(16, 1536, 1)
        self.first = nn.Conv2d(1536, 8, 1)
        self.others = nn.ModuleList(nn.Conv2d(1536, 16, 1) for _ in range(3))

    def forward(self, x):
        x = torch.relu(self.wide(x))
        return torch.cat([torch.relu(self.first(x)), sum(torch.relu(other(x)) for other in self.others)], 1) + 1


def test_a_network_through_inductor(own_kernels):
    torch.manual_seed(0)
    model, x = Funnel().double().eval(), torch.randn(2, 16, 6, 6, dtype=torch.double)
    program, (result, *_) = run_everywhere(model, x)
    assert_close(result, model(x), 1e-6)  # partials are in single precision
    partials = [program.layouts[name].size for name in program.layouts if name.startswith("partials_")]
    assert sorted(partials) == [(1, 6, 72, 8), (3, 6, 72, 16)]
    names = [kernel.name for kernel in program.graph.kernels]
    assert sum(name.count("convolve_2d_partials") for name in names) == 2
    assert sum("reduce_2d_partials" in name for name in names) == 2
    assert any(name.startswith("convolve_2d ") for name in names)
