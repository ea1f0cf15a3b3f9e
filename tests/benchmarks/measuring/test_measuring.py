"""Measuring: samples, turns, clocks and the ordering that a device time relies on."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config as inductor_config

from benchmarks import plans
from benchmarks.measuring import baselines
from benchmarks.measuring.equality import Comparison
from benchmarks.measuring.harness import Sample, alternate, by_rounds, loop_clock
from benchmarks.measuring.results import Row
from benchmarks.measuring.sides import Failure, Side, compare
from benchmarks.measuring.suite import Settings, parse, settings_of
from benchmarks.overhead import host_rows
from millstream.device.cuda_graphs import capturing
from millstream.engine import plan_source
from millstream.graph import KernelGraph, Plan
from tests.networks import lowered

CPU = torch.device("cpu")
SETTINGS = Settings(CPU, rounds=3, tiny=True)


class Executable:
    num_kernels, num_streams, num_waits = 7, 1, 0
    plan, costs, candidates = Plan(KernelGraph("model", (), ()), ()), None, ()


def side(name, *, equal=True, replay=None):
    comparison = Comparison(equal, 0.0, "" if equal else "differs")
    return Side(name, comparison, lambda: None, replay, 1.0, 200, Executable())


def test_a_sample_has_median_and_percentiles():
    sample = Sample.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert (sample.median, sample.p20, sample.p80, len(sample.times)) == (3.5, 2.0, 5.0, 6)


def test_rounds_are_compared_where_the_host_drifts():
    ours, theirs = Sample.of([1.0, 1.0, 2.0, 2.0, 2.0]), Sample.of([1.1, 1.1, 1.1, 2.2, 2.2])
    assert theirs.median / ours.median < 1
    assert by_rounds(theirs, ours).median == pytest.approx(1.1)


def test_sides_take_turns_and_the_first_one_rotates():
    order = []
    clocks = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    samples = alternate(clocks, 3)
    assert "".join(order) == "abcbcacab"
    assert {len(sample.times) for sample in samples.values()} == {3}


def test_a_loop_is_warm_before_its_first_sample():
    calls = []
    clock = loop_clock(lambda: calls.append(1), CPU)
    warm = len(calls)
    assert warm >= 5
    assert clock() > 0
    assert len(calls) > warm


def test_replays_are_compared_with_replays_and_calls_with_calls():
    peers = [side("graph", replay=lambda: None), side("eager"), Failure("broken", "no reason")]
    rows = compare("case", side("ours", replay=lambda: None), peers, SETTINGS)
    assert [(row.variant, row.baseline) for row in rows] == [("replay", "graph"), ("call", "eager"), ("call", "broken")]
    assert rows[0].ratio == pytest.approx(rows[0].baseline_ms / rows[0].ours_ms)
    assert rows[0].peak_ratio == 1.0
    assert rows[2].note == "broken not run: no reason"
    assert rows[2].baseline_ms is None
    assert rows[2].ours_ms is not None


def test_variants_are_named_by_what_is_unusual():
    settings = settings_of(parse("inference", [], "cpu", ["--freeze", "--channels-last"]), "cpu")
    (row,) = compare("case", side("ours"), [side("eager")], settings)
    assert row.variant == "call, channels last, frozen"


@pytest.mark.parametrize("freeze", [False, True])
def test_peers_are_built_with_frozen_parameters_where_ours_is(monkeypatch, freeze):
    seen = []
    monkeypatch.setattr(baselines, "_build_inference", lambda *arguments: seen.append(inductor_config.freezing))
    baselines.build_inference(None, "compile", freeze=freeze)
    assert seen == [freeze]
    assert not inductor_config.freezing


def test_what_computes_something_else_is_not_timed():
    (row,) = compare("case", side("ours", equal=False), [side("eager")], SETTINGS)
    assert (row.equal, row.ours_ms, row.note) == (False, None, "not timed: differs")
    (row,) = compare("case", side("ours"), [side("eager", equal=False)], SETTINGS)
    assert (row.baseline_ms, row.ratio, row.note) == (None, None, "eager not timed: differs")


def test_host_rows_tell_what_a_call_adds_to_its_replay():
    rows = host_rows(
        "case", side("ours", replay=lambda: None), [side("eager"), Failure("broken", "no reason")], SETTINGS
    )
    assert [row.baseline for row in rows] == ["own replay", "eager", "broken", None]
    assert rows[-1].variant == "call minus replay"
    assert rows[-1].ours_ms == pytest.approx(rows[0].ours_ms - rows[0].baseline_ms)


def test_graphs_of_plans_are_compared_with_one_stream():
    samples = {
        plans.BASE: Sample.of([2.0]),
        plans.CHAIN: Sample.of([0.5]),
        "apart": Sample.of([1.0]),
        "even": Sample.of([0.8]),
    }
    rows = plans.rows_of(Row("model", bound_ms=0.5), samples, SETTINGS, chosen="even", num_in_chain=3)
    assert [(row.variant, row.ours_ms, row.ratio, row.note) for row in rows] == [
        (plans.CHAIN, 0.5, 4.0, "3 kernels"),
        ("apart", 1.0, 2.0, None),
        ("even", 0.8, 2.5, "chosen"),
    ]
    assert all(
        (row.case, row.baseline, row.baseline_ms, row.bound_ms) == ("model", plans.BASE, 2.0, 0.5) for row in rows
    )


def test_only_the_kernels_of_a_chain_are_captured(monkeypatch):
    """In place of a capture, they run."""
    x = torch.randn(4, 4)
    known, given, result = lowered(lambda x: torch.softmax(x @ x, 0) @ x, x)
    launched, compile_plan = [], plan_source.compile_plan

    def noting(program, plan, *, observe):
        def noted(kernel, launch, written):
            return observe(kernel, lambda: launched.append(kernel) or launch(), written)

        return compile_plan(program, plan, observe=noted)

    monkeypatch.setattr(plan_source, "compile_plan", noting)
    monkeypatch.setattr(capturing, "capture", lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))

    class Base:
        inputs = property(lambda _: [*given])  # a run empties its list

    kernels = [kernel.id for kernel in known.program.graph.kernels]
    for chain in (kernels, kernels[1:2]):
        launched.clear()
        (output,) = plans.capture_chain(SimpleNamespace(lowered=known), Base(), chain).outputs
        assert launched == kernels + chain
        assert torch.equal(output, result)
