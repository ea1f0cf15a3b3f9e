"""Communication as people see it: sentences, tables, lanes, saved steps."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.cost import NVLINK, Costs, KernelCost, Network
from millstream.errors import ArgumentError
from millstream.graph import KernelKind, Span, Timeline
from millstream.report import Arrivals, CommunicationReport, Explanation, read_steps, saved_steps
from millstream.simulate import costs_on, plan_beside, with_collectives
from millstream.testing import chain_graph, data_parallel_graph

GRAPH = data_parallel_graph([1 << 25] * 4, 2)


def report_of(graph=GRAPH, eager=False, **more):
    plan = plan_beside(graph, eager=eager)
    kernels = tuple(KernelCost(300_000, 0.0, 0.0) for _ in graph.kernels)
    return CommunicationReport(plan, costs_on(plan, Costs(kernels), Network(NVLINK), 4), 4, **more)


def test_exposed_and_hidden_are_told_for_each_bucket():
    text = "\n".join(report_of().text())
    assert "exchanges 134 MB between 4 processes, in 2 collectives, in one graph with its kernels" in text
    assert "predicted: communication takes 723 µs of a step of 3.96 ms: 61.6 µs exposed (2 % of the step)" in text
    assert "all_reduce bucket 0 of layers (2 of 4 gradients)  67.1 MB    2.1 ms   2.1 ms  2.46 ms     0 ns" in text


def test_between_segments_all_of_it_is_exposed():
    report = report_of(eager=True, is_one_graph=False, source="a link of tests")
    assert sum(each.exposed_ns for each in report.transfers["predicted"]) == sum(
        each.took_ns for each in report.transfers["predicted"]
    )
    assert "times of collectives are calculated, a link of tests" in "\n".join(report.text())


def test_what_was_measured_stands_first():
    collective = next(kernel for kernel in GRAPH.kernels if kernel.kind is KernelKind.COLLECTIVE)
    spans = (Span("a", 0, 0, 10, 0), Span("nccl", 1, 5, 20, collective.id))
    report = report_of(timeline=Timeline(spans, 2, 20))
    (measured,) = report.transfers["measured"]
    assert (measured.exposed_ns, measured.took_ns) == (10, 15)
    assert list(report.sentences()) == ["measured", "predicted"]
    assert next(picture.end_ns for picture in report.pictures()) == 20


def test_collectives_of_a_trace_are_told_by_their_names():
    collectives = [kernel.id for kernel in GRAPH.kernels if kernel.kind is KernelKind.COLLECTIVE]
    spans = [
        Span("gemm", 0, 0, 5, 0),
        Span("ncclDevKernel_AllReduce", 1, 2, 9),
        Span("ncclDevKernel_AllReduce", 1, 9, 12),
    ]
    told = with_collectives(GRAPH, Timeline(tuple(spans), 2, 12))
    assert [span.kernel for span in told.spans] == [0, *collectives]
    fewer = Timeline(tuple(spans[:2]), 2, 12)
    assert with_collectives(GRAPH, fewer) is fewer


def test_why_nothing_was_measured_is_told():
    assert "not measured: a reason" in "\n".join(report_of(obstacle="a reason").text())


def test_backward_buckets_and_optimizer_are_drawn_side_by_side(tmp_path):
    report = report_of()
    (picture,) = report.pictures()
    assert picture.lanes == ("backward", "buckets", "optimizer")
    lanes = {bar.kernel.name.rstrip("0123456789"): picture.lanes[bar.stream] for bar in picture.bars if bar.kernel}
    assert lanes["forward"] == lanes["gradient"] == lanes["backward"] == "backward"
    assert lanes["update"] == "optimizer"
    explanation = Explanation("step", (), (), (report,))
    for suffix in ("svg", "html", "json"):
        explanation.save(tmp_path / f"step.{suffix}")
    assert "optimizer: " in (tmp_path / "step.svg").read_text()
    html = (tmp_path / "step.html").read_text()
    assert '"lanes":["backward","buckets","optimizer"]' in html
    assert "communication takes" in html
    assert explanation.to_dict()["communication"][0]["collectives"]["predicted"][0]["num_bytes"] == 1 << 26


# --- who waits for whom ----------------------------------------------------------------------------------------------


def test_straggler_is_named():
    arrivals = Arrivals.of([[0, 5000, 100], [10_000, 14_000, 10_500], [20_000, 20_100, 20_300], [0, 9000, 0]])
    assert (arrivals.num_steps, arrivals.last) == (4, (0, 3, 1))
    assert "rank 1 is the last to begin 75 % of the last 4 steps" in arrivals.text(10_000)


def test_processes_that_come_together_have_no_straggler():
    arrivals = Arrivals.of([[0, 5], [10, 14]])
    assert "come to the last 2 steps together" in arrivals.text(10_000)


def test_one_that_is_last_by_chance_is_not_named():
    times = [[1000 if rank == step % 3 else 0 for rank in range(3)] for step in range(9)]
    assert "which is last changes" in Arrivals.of(times).text(1000)


def test_nothing_is_told_of_arrivals_that_nobody_knows():
    assert Arrivals.of([]).text(1000) == ""


@given(st.lists(st.lists(st.integers(0, 1 << 40), min_size=3, max_size=3), min_size=1, max_size=20))
def test_in_each_step_one_is_last_and_waits_for_nobody(times):
    arrivals = Arrivals.of(times)
    assert sum(arrivals.last) == arrivals.num_steps == len(times)
    assert all(waited >= 0 for waited in arrivals.waited_ns)
    for rank, number in enumerate(arrivals.last):
        if number == len(times):
            assert arrivals.waited_ns[rank] == 0


# --- saved steps -----------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.lists(st.sampled_from([4096, 1 << 20]), min_size=1, max_size=5), st.integers(1, 3), st.booleans())
def test_a_saved_step_is_read_as_it_was(layers, num_buckets, eager):
    report = report_of(data_parallel_graph(layers, num_buckets), eager)
    (step,) = read_steps(json.dumps(saved_steps([report])))
    assert (step.plan, step.costs, step.num_processes) == (report.plan, report.costs, 4)


def spoiled(**changes):
    content = saved_steps([report_of()])
    content["millstream_steps"]["steps"][0].update(changes)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not what"),
        ("[]", "no data-parallel step in it"),
        ('{"traceEvents": []}', r"no data-parallel step in it: write it with ms\.explain"),
        ('{"millstream_steps": {"format": 9}}', "its format is 9, expected 1"),
        (spoiled(plan="nonsense"), "it is not what"),
        (spoiled(costs=[]), "0 costs of"),
        (spoiled(wait_ns=-1), "waits take -1 ns"),
        (spoiled(costs=[[-5, 0, 0]] * len(GRAPH.kernels)), "a kernel takes -5 ns"),
        (spoiled(costs=[[5, 0, 7]] * len(GRAPH.kernels)), "a kernel takes 5 ns"),
    ],
)
def test_a_spoiled_file_is_refused(text, message):
    with pytest.raises(ArgumentError, match=message):
        read_steps(text)


def test_a_step_without_collectives_is_refused():
    graph = chain_graph(2)
    with pytest.raises(ArgumentError, match="no kernel is a collective"):
        read_steps(json.dumps(saved_steps([report_of(graph)])))
