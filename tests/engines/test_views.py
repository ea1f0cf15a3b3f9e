"""Operators that return views, and are kernels all the same: who uses the view comes behind, on all streams."""

import random

import torch

import millstream as ms
from millstream.api import executables
from millstream.check import check_plan
from millstream.cost import Costs, KernelCost
from millstream.device import context
from millstream.engine.source import compile_plan
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
