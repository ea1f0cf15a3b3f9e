"""What becomes of the answers of a group of processes."""

import pytest
import torch

from benchmarks import parallel
from benchmarks.suite import Settings

SETTINGS = Settings(torch.device("cpu"), 2, True)
FACTS = {"kernels": 3, "streams": 2, "waits": 1}


def answer(wrong="", **sides):
    timed = {name.replace("_", " "): side for name, side in sides.items()}
    return {"sides": timed, "wrong": wrong, "facts": FACTS, "note": "1 graphs"}


def times(*ms, build_s=2.0):
    return {"times": list(ms), "build_s": build_s}


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
