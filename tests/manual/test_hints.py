"""Streams by hand inside of what is captured: hints of the kernel graph, obeyed or tried."""

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.api.explaining import executables
from millstream.check import check_plan
from millstream.cost import Roofline
from millstream.errors import ArgumentError
from millstream.graph import Buffer, Kernel, KernelGraph, KernelKind, Launch, Role, format_graph, parse_graph
from millstream.schedule import Scheduling, plan_graph
from millstream.schedule.choose import propose


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.right = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16))

    def forward(self, x):
        with ms.streams(3) as s:
            left = self.left(x)
            with s[1]:
                right = self.right(x)
            third = s[2].mm(x, x.t())
        return (left * right).sum() + third.sum()


def hints_of(compiled):
    (executable,) = executables(compiled)
    return executable.plan, {kernel.hint for kernel in executable.plan.graph.kernels}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def test_model_is_planned_as_it_is_written():
    model, x = Towers().eval(), torch.randn(4, 16)
    compiled = ms.compile(model, streams="manual", strict=True, engine="threads")
    with torch.no_grad():
        expected = model(x)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected)
    plan, hints = hints_of(compiled)
    assert {"1", "2"} <= hints
    assert plan.policy == "manual"
    stream_of = {step.kernel: step.stream for step in plan.steps if isinstance(step, Launch)}
    by_hint = {}
    for kernel in plan.graph.kernels:
        by_hint.setdefault(kernel.hint or "", set()).add(stream_of[kernel.id])
    assert all(len(streams) == 1 for streams in by_hint.values())
    check_plan(plan)


def test_gradients_of_a_step_are_hinted_as_their_forward():
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), 0.001)

    @ms.step(streams="manual", strict=True)
    def train_step(x):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [train_step(torch.ones(4, 16)).item() for _ in range(3)]
    (executable,) = executables(train_step)
    products = [k.hint for k in executable.plan.graph.kernels if k.kind is KernelKind.GEMM]
    assert products.count("1") > 2, "two forward, the others backward"
    assert losses[0] != losses[1] != losses[2]


def diamond(hints):
    """Kernels that read one input and write a result each, with hints, and one that reads all."""
    names = [f"r{i}" for i in range(len(hints))]
    kernels = [
        Kernel(i, f"k{i}", KernelKind.GEMM, "cuda:0", ("x",), (name,), flops=10**9, num_bytes=10**6, hint=hint)
        for i, (name, hint) in enumerate(zip(names, hints, strict=True))
    ]
    kernels.append(Kernel(len(hints), "last", KernelKind.FUSED, "cuda:0", tuple(names), ("y",), num_bytes=10**4))
    buffers = [Buffer("x", 1024, "cuda:0", Role.INPUT), *(Buffer(n, 1024, "cuda:0", Role.TEMPORARY) for n in names)]
    buffers.append(Buffer("y", 1024, "cuda:0", Role.OUTPUT))
    return KernelGraph("diamond", tuple(kernels), tuple(buffers), ("x",), ("y",))


def test_plan_puts_each_hint_on_a_stream():
    graph = diamond(["1", "2.1", None, "1", ""])
    plan = plan_graph(graph, Roofline().estimate(graph), 8, "manual")
    check_plan(plan)
    stream_of = {step.kernel: step.stream for step in plan.steps if isinstance(step, Launch)}
    assert stream_of[0] == stream_of[3]
    assert stream_of[2] == stream_of[4] == stream_of[5]
    assert len(set(stream_of.values())) == 3


def test_hints_are_one_more_candidate():
    hinted, plain = diamond(["1", "2", "1"]), diamond([None] * 3)
    policies = {p.plan.policy for p in propose(hinted, Roofline().estimate(hinted), Scheduling())}
    assert "manual" in policies
    assert len(policies) > 2
    assert "manual" not in {p.plan.policy for p in propose(plain, Roofline().estimate(plain), Scheduling())}


def test_graph_without_hints_is_serial_by_hand():
    graph = diamond([None, None])
    assert plan_graph(graph, Roofline().estimate(graph), 8, "manual").num_streams == 1


def test_hints_are_in_the_text():
    graph = diamond(["1", "", None])
    assert parse_graph(format_graph(graph)) == graph


def test_manual_streams_leave_no_policy_open():
    with pytest.raises(ArgumentError, match="manual"):
        ms.compile(nn.Linear(1, 1), streams="manual", policy="list")
    with pytest.raises(ArgumentError, match="'auto' or 'manual'"):
        ms.compile(nn.Linear(1, 1), streams="by hand")


def test_bad_index_within_a_capture():
    with pytest.raises(ArgumentError, match="numbers"):
        ms.manual.hints.HintedScope(2)[-1]
