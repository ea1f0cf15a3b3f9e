"""Suites survive their cases: errors, crashes, hangs, and a budget that runs out."""

import sys
from dataclasses import dataclass

import pytest

from benchmarks.measuring.results import Row
from benchmarks.measuring.suite import parse, run_cases
from benchmarks.measuring.worker import run_apart
from tests.clocks import HANG_S


@dataclass(frozen=True)
class Case:
    name: str
    estimate_s: float = 1.0


def run(cases, *arguments, **work):
    events = []
    options = parse("cpu", cases, "cpu", arguments)
    run_cases(cases, lambda case, settings: work[case.name](), options, "cpu", events.append)
    assert "device" in events[0]
    return events[1:]


def test_an_error_ends_its_case_only(capsys):
    def fail():
        raise RuntimeError("it broke\nbadly")

    events = run([Case("a"), Case("b")], a=fail, b=lambda: [Row("b", ours_ms=1.0)])
    assert [event.get("begin") for event in events] == ["a", None, "b", None]
    assert events[1] == {
        "case": "a",
        "rows": [{"case": "a", "note": "not run: RuntimeError: it broke"}],
        "failed": True,
    }
    assert events[3]["rows"][0]["ours_ms"] == 1.0
    assert not events[3]["failed"]
    assert "badly" in capsys.readouterr().err


def test_what_does_not_fit_the_budget_is_recorded():
    cases = [Case("a", 1e6), Case("b", 0.0)]
    skipped, begun, done = run(cases, "--budget-seconds", "1000", b=lambda: [Row("b", ours_ms=1.0)])
    assert skipped["rows"][0]["note"] == "not run: it takes about 1000000 s, and 1000 s were left"
    assert not skipped["failed"]
    assert begun == {"begin": "b"}
    assert done["case"] == "b"


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        run([Case("a")], "--cases", "b")
    assert "unknown cases: b" in capsys.readouterr().err


CHILD = """
import json, os, sys, time
log, *cases = sys.argv[1:]
for case in cases:
    with open(log, "a") as file:
        print(json.dumps({"begin": case}), file=file, flush=True)
        if case == "crash":
            os.abort()
        if case == "hang":
            time.sleep(1000)
        print(json.dumps({"case": case, "rows": [], "failed": False, "by": os.getpid()}), file=file)
"""


def run_children(cases, program=CHILD, limits=()):
    events = []
    run_apart(
        cases,
        lambda left, log: [sys.executable, "-c", program, str(log), *left],
        lambda name: dict(limits).get(name, HANG_S),
        events.append,
    )
    return [event for event in events if "case" in event]


def test_good_cases_share_a_process():
    events = run_children(["a", "b", "c"])
    assert [event["case"] for event in events] == ["a", "b", "c"]
    assert len({event["by"] for event in events}) == 1


def test_a_crash_costs_one_case():
    a, crash, b = run_children(["a", "crash", "b"])
    assert crash["rows"][0]["note"] == "not run: the process was ended by SIGABRT"
    assert crash["failed"]
    assert a["by"] != b["by"]


def test_a_hang_costs_one_case():
    hang, b = run_children(["hang", "b"], limits=[("hang", 0.0)])
    assert hang["rows"][0]["note"] == "not run: no result after 0 s"
    assert b["case"] == "b"


def test_a_process_that_never_begins_is_not_started_again():
    events = run_children(["a", "b"], "raise SystemExit(3)")
    assert [event["rows"][0]["note"] for event in events] == ["not run: the process ended with status 3"] * 2
