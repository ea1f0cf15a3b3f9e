"""Sides in processes of their own: what becomes of their answers."""

import pytest
import torch

from benchmarks import alone
from benchmarks.cases.models import INFERENCE
from benchmarks.measuring.suite import Settings

CASE = next(case for case in INFERENCE if case.name == "towers")
SETTINGS = Settings(torch.device("cpu"), 2, True)


def answer(*times, wrong=""):
    facts = {"kernels": 3, "streams": 2, "waits": 1}
    return {"call": list(times), "device": [t / 2 for t in times], "wrong": wrong, "facts": facts}


def run(monkeypatch, **sides):
    asked = []

    def ask(case, side, settings, *, judged):
        assert judged == (side not in asked)
        asked.append(side)
        result = sides[side.partition(" ")[2] or side].pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(alone, "ask", ask)
    return alone.run_case(CASE, SETTINGS), asked


def test_the_samples_of_all_processes_count_and_sides_take_turns(monkeypatch):
    ours, theirs = [answer(1, 1), answer(2, 2), answer(3, 3)], [answer(4, 4), answer(5, 5), answer(6, 6)]
    rows, asked = run(monkeypatch, ours=ours, **{"reduce-overhead": theirs, "compile": [answer(8)] * 3})
    assert asked == ["ours", "compile reduce-overhead", "compile"] * 3
    assert [(row.variant, row.baseline, row.ours_ms, row.baseline_ms, row.ratio) for row in rows] == [
        ("call", "compile reduce-overhead", 2, 5, 2.5),
        ("call", "compile", 2, 8, 4),
        ("device", "compile reduce-overhead", 1, 2.5, 2.5),
        ("device", "compile", 1, 4, 4),
    ]
    assert rows[0].note == "processes: ours 1, 2, 3; compile reduce-overhead 4, 5, 6"
    assert (rows[0].kernels, rows[0].streams, rows[0].equal) == (3, 2, True)


def test_a_peer_that_fails_or_is_wrong_is_not_timed(monkeypatch):
    wrong = [answer(1), answer(1, wrong="differs"), answer(1)]
    rows, asked = run(
        monkeypatch, ours=[answer(1)] * 3, **{"reduce-overhead": [RuntimeError("no memory")], "compile": wrong}
    )
    assert asked.count("compile reduce-overhead") == 1
    assert [row.note for row in rows[:2]] == [
        "compile reduce-overhead not timed: no memory",
        "compile not timed: differs",
    ]
    assert all(row.baseline_ms is None for row in rows)


def test_ours_that_is_wrong_or_fails_has_no_times(monkeypatch):
    sides = {"reduce-overhead": [answer(1)] * 3, "compile": [answer(1)] * 3}
    rows, _ = run(monkeypatch, ours=[answer(1), answer(1, wrong="differs"), answer(1)], **sides)
    assert [(row.equal, row.note, row.ours_ms) for row in rows] == [(False, "not timed: differs", None)]
    with pytest.raises(RuntimeError, match="broken"):
        run(monkeypatch, ours=[RuntimeError("broken")], **sides)


def test_a_process_measures_and_judges():
    ours, theirs = (
        alone.measure(CASE, side, torch.device("cpu"), 2, tiny=True, judged=True) for side in ("ours", "compile")
    )
    assert ours["wrong"] == theirs["wrong"] == ""
    assert len(ours["call"]) == len(ours["device"]) == 2
    assert ours["facts"]["kernels"] > 1


def test_an_error_of_a_process_is_its_last_line():
    with pytest.raises(RuntimeError, match="invalid choice"):
        alone.ask("towers", "nobody", SETTINGS, judged=False)
