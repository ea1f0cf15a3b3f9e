"""Which kernel a device's activity belongs to, and measuring a compiled program without changing anything of it."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.graph import Buffer, Kernel, KernelGraph, KernelKind, Launch, Plan, Role, Span, Timeline
from millstream.insight import Activity, ActivityKind
from millstream.insight.intervals import total, union
from millstream.insight.profiler.replays import idle_in_graph, time_of_kernels, timeline_of_replay

NAMES = ("triton_poi_add_0", "aten.mm.out", "aten.convolution.default", "triton_poi_add_0", "aten.addmm.out")


def plan_of(names, streams=None):
    kernels = tuple(Kernel(i, name, KernelKind.LIBRARY, "cuda:0", ("x",), (f"t{i}",)) for i, name in enumerate(names))
    made = (Buffer(f"t{i}", 4, "cuda:0", Role.TEMPORARY) for i in range(len(names)))
    buffers = (Buffer("x", 4, "cuda:0", Role.INPUT), *made)
    streams = streams or [0] * len(names)
    return Plan(
        KernelGraph("g", kernels, buffers, ("x",)),
        tuple(Launch(i, s) for i, s in enumerate(streams)),
        max(streams) + 1,
    )


def ran(*names, streams=None):
    streams = streams or [7] * len(names)
    return [
        Activity(
            1000 + 10 * i,
            1007 + 10 * i,
            streams[i],
            ActivityKind.MEMSET if name == "Memset" else ActivityKind.KERNEL,
            name,
        )
        for i, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("triton_poi_add_0", "gemm", "conv", "triton_poi_add_0", "gemm"), [0, 1, 2, 3, 4]),
        (("triton_poi_add_0", "gemm", "splitKreduce", "conv", "triton_poi_add_0", "Memset", "gemm"),
         [0, 1, 1, 2, 3, 4, 4]),
        # Two convolutions' backward passes, as cuDNN runs them on an H100.
        (("triton_poi_add_0", "nchwToNhwcKernel", "nchwToNhwcKernel", "init_device_workspace", "wgrad",
          "a_split_k_kernel", "nhwcToNchwKernel", "nchwToNhwcKernel", "dgrad", "nhwcToNchwKernel",
          "triton_poi_add_0", "scal_kernel", "gemm", "epilogue"),
         [0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 4, 4, 4]),
        (("triton_poi_add_0", "a", "b", "c", "d", "triton_poi_add_0", "e"), [0, None, None, None, None, 3, 4]),
        (("Memset", "triton_poi_add_0", "gemm", "conv", "triton_poi_add_0", "triton_of_somebody", "gemm"),
         [None, 0, 1, 2, 3, None, 4]),
    ],
)  # fmt: skip
def test_activities_of_one_stream_are_told_to_kernels_in_order(names, expected):
    timeline = timeline_of_replay(plan_of(NAMES), ran(*names))
    assert [span.kernel for span in timeline.spans] == expected
    assert timeline.spans[0].start_ns == 0
    assert timeline.end_ns == 10 * len(names) - 3
    assert sum(time_of_kernels(timeline).values()) == 7 * len(names)
    assert sum(idle_in_graph(timeline, plan_of(NAMES)).values()) == timeline.idle_ns


def test_activities_of_several_streams_are_told_by_names_alone():
    plan = plan_of(("triton_a_0", "aten.mm.out", "triton_b_1"), streams=[0, 1, 1])
    timeline = timeline_of_replay(plan, ran("gemm", "triton_b_1", "triton_a_0", streams=[9, 9, 4]))
    assert [(span.kernel, span.stream) for span in timeline.spans] == [(1, 0), (2, 0), (0, 1)]
    two = plan_of(("aten.mm.out", "aten.mm.out"), streams=[0, 1])
    assert [span.kernel for span in timeline_of_replay(two, ran("gemm", "gemm")).spans] == [None, None]


def test_idle_time_has_the_cause_of_what_comes_next():
    spans = (Span("a", 0, 5, 10, 0), Span("b", 1, 13, 20, 1), Span("c", 1, 22, 30, 2), Span("memset", 0, 34, 40))
    idle = idle_in_graph(Timeline(spans, 2, 41), plan_of(NAMES))
    assert idle == {"next kernel": 5 + 2, "copies in and out": 4, "other stream": 3, "end": 1}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout, self.out = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.dropout(self.norm(x).relu()))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.embed = Block(), nn.Embedding(5, 8)

    def forward(self, index):
        return self.layer1(self.embed(index)).square().mean()


def test_measuring_a_step_changes_nothing_and_tells_each_kernels_module():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())

    @ms.step
    def step(index):
        loss = model(index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    index = torch.tensor([1, 4, 2])
    for _ in range(3):
        step(index)
    moments = [each for state in optimizer.state.values() for each in state.values()]
    state = [each.clone() for each in (*model.state_dict().values(), *moments)]
    random = torch.get_rng_state()
    (program,) = ms.explain(step, measure=True).programs
    assert all(torch.equal(a, b) for a, b in zip(state, (*model.state_dict().values(), *moments), strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert [span.kernel for span in program.timeline.spans] == [kernel.id for kernel in program.graph.kernels]
    assert sum(program.measured_by_kernel.values()) + sum(program.idle_by_cause.values()) == program.timeline.end_ns
    assert program.is_calculated
    assert {"measured", "calculated"} == program.accounts.keys()
    modules = {kernel.module for kernel in program.graph.kernels}
    assert "layer1.out" in modules
    assert modules <= {"", "layer1", "layer1.norm", "layer1.dropout", "layer1.out", "embed"}


def test_forward_and_backward_of_a_compiled_model_know_their_modules():
    compiled = ms.compile(Model())
    compiled(torch.tensor([1, 4, 2])).backward()
    forward, backward = ms.explain(compiled, measure=True).programs
    for program in (forward, backward):
        assert "layer1.out" in {kernel.module for kernel in program.graph.kernels}
        assert program.measured_ns


def test_replay_that_an_h100_recorded_is_told_to_kernels_whole():
    recorded = json.loads((Path(__file__).parent / "traces" / "h100_replay.json").read_text(encoding="utf-8"))
    activities = [
        Activity(start, end, 7, ActivityKind.MEMSET if name.startswith("Memset") else ActivityKind.KERNEL, name)
        for name, start, end in recorded["spans"]
    ]
    plan = plan_of(recorded["kernels"])
    timeline = timeline_of_replay(plan, activities)
    assert {span.kernel for span in timeline.spans} == {kernel.id for kernel in plan.graph.kernels}
    found = [span.kernel for span in timeline.spans]
    assert found == sorted(found)
    busy = union((span.start_ns, span.end_ns) for span in timeline.spans)  # some begin before the one before is over
    assert total(busy) + timeline.idle_ns == timeline.end_ns == 1_051_892
