"""What the suite ``idle`` makes of a report."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.idle.peers import to_kineto
from benchmarks.idle.suite import CASES, SCRIPTS, Run, judge, to_markdown, with_jitter
from millstream.insight import Cause, Severity, analyse
from millstream.insight.profiler.kineto import read_trace
from tests.insight.virtual import serial_recording

SLOW = next(case for case in CASES if case.name == "python_loop")
CLEAN = next(case for case in CASES if case.name == "clean_matmuls")
LINES = (SCRIPTS / "python_loop.py").read_text(encoding="utf-8").splitlines()
LINE = next(number for number, line in enumerate(LINES, 1) if "# slow" in line)


def row(cause, line, idle_ns, share):
    site = {"file": str(SCRIPTS / "python_loop.py"), "line": line, "function": "<module>"}
    shares = {"recoverable_share": share, "share": share}
    return {"cause": cause, "site": site, "idle_ns": idle_ns, "is_rare": False} | shares


def report_of(severity, leading, rows=()):
    return {
        "severity": severity, "why_unreliable": "", "leading": leading, "num_steps": 10, "step_ns": 22e6,
        "usual_step_ns": 20e6, "idle": 0.6,
        "idle_ns_by_cause": {"python": 120_000_000}, "unknown": 0.01, "looking_slowed": 0.02, "cost": 0.03,
        "always_on": 0.005, "rows": list(rows),
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_script_is_there_with_the_lines_that_are_to_blame(case):
    text = (SCRIPTS / f"{case.name}.py").read_text(encoding="utf-8")
    assert all(marker in text for marker in case.markers)
    assert bool(case.markers) == bool(case.causes)
    assert "clock.show()" in text


def test_outcome_lines_and_promise_are_judged():
    rows = [row("python", LINE, 90, 0.45), row("python", 3, 10, 0.05), row("gc", 3, 5, 0.0)]
    report = report_of("HIGH", rows[0], rows)
    found = judge(SLOW, Run(20.4, report, report_s=0.5), Run(20.0, None), Run(10.0, None))
    assert found["is_right"]
    assert found["right_line"] == 0.9
    assert found["promised_ms"] == pytest.approx(10.0)
    assert found["gained_ms"] == 10.0
    assert found["always_on"] == 0.005
    assert found["after_windows"] == pytest.approx(0.02)
    text = to_markdown([found], "virtual")
    assert "1 of 1 planted" in text
    assert "±25 % of what the twin gains: 1 of 1" in text


@pytest.mark.parametrize("severity", ["HIGH", "MODERATE", "unreliable"])
def test_clean_script_with_an_outcome_is_wrong(severity):
    found = judge(CLEAN, Run(1.0, report_of(severity, row("sync", 1, 1, 0.3))), Run(1.0, None), Run(None, None))
    assert not found["is_right"]
    assert judge(CLEAN, Run(1.0, report_of("healthy", None)), Run(1.0, None), Run(None, None))["is_right"]


def test_process_that_failed_is_told():
    found = judge(SLOW, Run(None, None, "profiled: killed"), Run(None, None), Run(None, None))
    assert not found["is_right"]
    assert "python_loop: profiled: killed" in to_markdown([found], "virtual")


def test_records_are_the_trace_that_the_profiler_would_have_written():
    host = [(Cause.SYNC, 5_000, 51), *[(None, 10_000, 5)] * 3]
    recording = serial_recording(host, [900_000] * 3, steps=4)
    recording = replace(recording, spans=tuple(replace(s, detail="cudaStreamSynchronize") for s in recording.spans))
    trace = read_trace(to_kineto(recording)).shifted(recording.launches[0].start_ns)
    assert [(a.start_ns, a.end_ns, a.launch) for a in trace.activities] == [
        (a.start_ns, a.end_ns, a.launch) for a in recording.activities
    ]
    assert [launch.start_ns for launch in trace.launches] == [launch.start_ns for launch in recording.launches]
    assert [s.start_ns for s in trace.spans] == [s.start_ns for s in recording.spans[1:]]  # the first is before them


def test_jitter_keeps_order_and_outcome():
    recording = serial_recording([(None, 10_000, 5)] * 8, [900_000] * 8, steps=30)
    moved = with_jitter(recording, random.Random(3))
    assert moved.activities != recording.activities
    for before, after in zip(recording.activities, moved.activities, strict=True):
        assert 0.6 < (after.end_ns - after.start_ns) / (before.end_ns - before.start_ns) < 1.4
    assert [a.end_ns <= b.start_ns for a, b in pairwise(moved.activities)] == [True] * 239
    assert analyse(moved).severity is Severity.HEALTHY
