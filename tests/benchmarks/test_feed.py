"""The suite runs through without a GPU, and judges before it times."""

from dataclasses import replace

import pytest
import torch

from benchmarks import feed
from benchmarks.measuring.suite import Settings

CPU = Settings(torch.device("cpu"), rounds=2, tiny=True)
QUICK = [case for case in feed.CASES if "resnet50" not in case.name and "images" not in case.name]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_cases_run_through(case, monkeypatch):
    monkeypatch.setattr(feed, "BATCHES", 4)
    monkeypatch.setattr(feed, "NEXT_PAUSE_MS", 0.0)
    rows = case.run(CPU)
    assert {row.case for row in rows} == {case.name}
    timed = [row for row in rows if row.ours_ms is not None]
    assert timed
    assert all(row.ours_ms > 0 for row in timed)
    assert all(row.equal is not False for row in rows)


def test_names_are_those_of_the_plan():
    names = [case.name for case in feed.CASES]
    assert len(set(names)) == len(names)
    assert {f"copy : compute {share:g}" for share in (0.25, 0.5, 0.8, 1, 2, 4)} <= set(names)
    assert sum(case.estimate_s for case in QUICK) < 300


def test_a_way_that_changes_bytes_is_not_timed(monkeypatch):
    def spoil(batches, device):
        for batch in batches:
            yield [leaf + 1 for leaf in batch]

    monkeypatch.setattr(feed, "make_feed", lambda *_, **__: spoil)
    (row,) = feed.run_loop("x", [64 * 100], 1.0, CPU)
    assert row.equal is False
    assert row.ours_ms is None


def test_a_peer_that_cannot_run_is_recorded():
    rows = feed.run_loop("x", [64 * 100], 1.0, CPU)
    side = next(row for row in rows if row.baseline == "side stream")
    assert side.baseline_ms is None
    assert "needs a CUDA device" in side.note


def test_ours_is_told_where_no_peer_can_run():
    ours, side, *_ = feed.run_loop("x", [64 * 100], 1.0, replace(CPU, baselines=frozenset({"side stream"})))
    assert ours.baseline is None
    assert ours.ours_ms > 0
    assert side.ours_ms is None


def test_work_takes_about_as_long_as_asked():
    work = feed.Work(torch.device("cpu"))
    short, long = (feed.wall_ms(work.of(ms), torch.device("cpu")) for ms in (2, 20))
    assert long > 2 * short
