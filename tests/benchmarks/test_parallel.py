"""What becomes of the answers of a group of processes."""

import pytest
import torch

from benchmarks import parallel
from benchmarks.measuring.suite import Settings
from millstream.insight.records import Activity, ActivityKind

SETTINGS = Settings(torch.device("cpu"), 2, True)
FACTS = {"kernels": 3, "streams": 2, "waits": 1}


def answer(wrong="", **sides):
    timed = {name.replace("_", " "): side for name, side in sides.items()}
    return {"sides": timed, "wrong": wrong, "facts": FACTS, "note": "1 graphs"}


def times(*ms, build_s=2.0):
    return {"times": list(ms), "build_s": build_s, "peak_bytes": None}


def test_one_gpu_over_ours_is_the_efficiency():
    rows = parallel.compare("case", 2, answer(ours=times(8, 10, 12), one_gpu=times(9), ddp_compile=times(30)))
    assert [(row.baseline, row.ours_ms, row.baseline_ms, row.ratio) for row in rows] == [
        ("one gpu", 10, 9, 0.9),
        ("ddp compile", 10, 30, 3),
    ]
    assert (rows[0].variant, rows[0].kernels, rows[0].equal) == ("2 processes", 3, True)


def test_a_baseline_that_fails_is_not_timed():
    (row,) = parallel.compare("case", 2, answer(ours=times(8), hand_graph={"failure": "no memory"}))
    assert (row.ours_ms, row.baseline_ms) == (8, None)
    assert "hand graph not timed: no memory" in row.note


@pytest.mark.parametrize("wrong", ["losses differ by a part of 1", "processes have other parameters"])
def test_what_computes_something_else_is_not_timed(wrong):
    (row,) = parallel.compare("case", 2, answer(wrong, ours=times(8), one_gpu=times(9)))
    assert (row.ours_ms, row.equal, row.note) == (None, False, wrong)


def test_a_failure_of_ours_is_told():
    (row,) = parallel.compare("case", 2, answer(ours={"failure": "CaptureError"}, one_gpu=times(9)))
    assert (row.ours_ms, row.note) == (None, "not run: CaptureError")


def test_processes_that_end_are_no_answer(monkeypatch):
    monkeypatch.setattr(parallel.sys, "executable", "false")
    with pytest.raises(RuntimeError, match="status 1"):
        parallel.ask("case", 2, ["ours"], SETTINGS)


def test_processes_that_do_not_end_are_ended(monkeypatch, tmp_path):
    script = tmp_path / "hang"
    script.write_text("#!/bin/sh\ntrap 'echo > told; kill $child; exit 1' TERM\nsleep 60 & child=$!\nwait $child\n")
    script.chmod(0o755)
    monkeypatch.setattr(parallel.sys, "executable", str(script))
    monkeypatch.setattr(parallel, "LIMIT_S", 0.5)
    monkeypatch.setattr(parallel, "__file__", str(tmp_path / "benchmarks" / "parallel.py"))
    (tmp_path / "benchmarks").mkdir()
    with pytest.raises(RuntimeError, match=r"did not end within 0\.5 s"):
        parallel.ask("case", 2, ["ours"], SETTINGS)
    assert (tmp_path / "told").exists()


def activities(*times, kind=ActivityKind.KERNEL):
    return [Activity(start * 1000, end * 1000, kind=kind) for start, end in times]


def test_a_collective_is_exposed_where_nothing_else_runs():
    steps = activities((5, 20), (105, 120), (205, 220))
    barriers = [(0, 4), (100, 104), (200, 204)]
    mine = [(10, 30), (40, 45), (110, 132), (140, 145), (210, 220), (221, 226)]
    steps += activities(*barriers, *mine, kind=ActivityKind.COMMUNICATION)
    assert parallel.exposed(steps, 2) == [[(10, 20), (5, 5)], [(12, 22), (5, 5)], [(0, 10), (5, 5)]]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_steps_are_told_apart_where_first_kernels_are_lost(lost):
    mine = [(at + offset, at + offset + 1) for at in (0, 100, 200) for offset in (0, 10, 40)]
    found = parallel.exposed(activities(*mine[lost:], kind=ActivityKind.COMMUNICATION), 2)
    assert found[-2:] == [[(1, 1), (1, 1)]] * 2


def test_of_each_collective_the_rank_that_waits_least_counts(monkeypatch):
    exchange = type("Exchange", (), {"num_bytes": 1 << 20})
    seen = []
    mine = [Activity(at * 1000, (at + 9) * 1000, kind=ActivityKind.COMMUNICATION) for at in range(0, 1000, 10)]
    monkeypatch.setattr("millstream.api.exchanges", lambda step: [exchange] * 4)
    monkeypatch.setattr(parallel, "sample_ms", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(parallel, "read_trace", lambda trace: type("Trace", (), {"activities": mine}))
    monkeypatch.setattr(parallel, "told_by_all", lambda found: [found, [[(5.0, 7.0)] * 4] * 3])
    whole, told = parallel.communication(print, None, SETTINGS.device)
    assert whole == 20
    assert told == "exposed: " + ", ".join(["1.00 MiB 5 of 7 µs (first rank 9)"] * 4)
    assert len(seen) == parallel.TRACED_STEPS + 1
