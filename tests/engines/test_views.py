"""Operators that return views, and are kernels all the same: users of the view come after, on all streams."""

import random

import pytest
import torch

import millstream as ms
from millstream.api import executables
from millstream.check import check_plan
from millstream.cost import Costs, KernelCost
from millstream.device import context
from millstream.engine.plan_source import compile_plan
from millstream.schedule import plan_graph


def transform(x):
    left = torch.fft.fft(x).conj() @ torch.fft.fft(x.T)
    y = x
    for _ in range(6):
        y = torch.mm(y, x).tanh()
    return left.abs(), y


def rotate(x, angles):
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    y = x
    for _ in range(4):
        y = torch.mm(y, x).tanh()
    return torch.view_as_real(turned).flatten(-2), y


def lowered(function, *inputs):
    torch._dynamo.reset()
    compiled = ms.compile(function, engine="serial", strict=True)
    with torch.no_grad():
        results = compiled(*inputs)
    (executable,) = executables(compiled)
    return executable.lowered.program, results


def test_in_every_plan_a_view_is_made_before_it_is_used():
    x = torch.randn(32, 32)
    rng = random.Random(0)
    for function, inputs in ((transform, (x,)), (rotate, (x, torch.randn(32, 16)))):
        program, _ = lowered(function, *inputs)
        for _ in range(40):
            costs = [KernelCost(rng.randint(1_000, 20_000), 0.1, 0.1) for _ in program.graph.kernels]
            plan = plan_graph(program.graph, Costs(tuple(costs), 400), rng.choice((2, 3, 4, 8)), "list", packed=True)
            check_plan(plan)
            compile_plan(program, plan, context=context("cpu"))  # goes through the steps in the host's order


def test_complex_numbers_on_threads_are_those_of_one():
    x = torch.randn(32, 32)
    for function, inputs in ((transform, (x,)), (rotate, (x, torch.randn(32, 16)))):
        _, expected = lowered(function, *inputs)
        torch._dynamo.reset()
        compiled = ms.compile(function, engine="threads", streams=2, strict=True)
        with torch.no_grad():
            for _ in range(12):
                assert all(map(torch.equal, compiled(*inputs), expected))


@pytest.mark.parametrize("offset", [0, 6])
def test_a_view_beyond_its_input_is_not_taken_for_the_input(offset):
    """A graph may read the input where it has been copied to, and beyond that lies something else."""

    def reach(x):
        return x.as_strided((10,), (1,), offset) * 2

    torch._dynamo.reset()
    whole = torch.arange(20.0)
    with pytest.raises(ms.errors.LoweringError, match=r"of an input that has 10 .*in reach"):
        ms.compile(reach, strict=True)(whole[5:15])
    torch._dynamo.reset()
    with pytest.warns(ms.FallbackWarning, match=r"on plain torch.compile|as plain Python"):
        assert torch.equal(ms.compile(reach)(whole[5:15]), whole[offset : offset + 10] * 2)


def test_a_view_within_a_part_of_a_tensor_is_taken():
    def inner(x):
        return x.as_strided((3, 2), (3, 1), 6) + 1

    torch._dynamo.reset()
    whole = torch.arange(20.0)
    assert torch.equal(ms.compile(inner, strict=True)(whole[5:15]), inner(whole[5:15]))


def test_parts_of_one_tensor_are_told_apart():
    def both(x, y):
        return x.as_strided((10,), (1,), 5) + y.as_strided((4,), (1,), 15).sum()

    torch._dynamo.reset()
    whole = torch.arange(20.0)
    parts = whole[5:15], whole[15:19]
    assert torch.equal(ms.compile(both, strict=True)(*parts), both(*parts))
