"""Straggler against transfer: synthetic reports of several ranks, and two processes with Gloo."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.cli import main
from millstream.data_parallel.buckets import Bucket
from millstream.data_parallel.exchange import Exchange
from millstream.errors import ArgumentError
from millstream.insight import Cause, Severity
from millstream.insight.ranks import merge
from millstream.report.idle import several_ranks as report
from tests.clocks import HANG_S

MS = 1_000_000
SCRIPTS = Path(__file__).parent / "scripts"


def report_of(rank, collectives, *, steps=10, step_ms=50, rows=()):
    return {
        "rank": rank,
        "num_steps": steps,
        "step_ns": step_ms * MS,
        "collectives": [list(each) for each in collectives],
        "rows": [
            {"cause": cause, "idle_ns": spent * steps, "is_rare": False, "site": {"file": "train.py", "line": line}}
            for cause, spent, line in rows
        ],
    }


def run_of(delays, *, transfer, steps=10, per_step=2, offset=0):
    """For each rank its collectives: rank r comes ``delays[r]`` after the first; all end together."""
    found = [[] for _ in delays]
    for step in range(steps):
        for number in range(per_step):
            begin = (step * per_step + number) * 25 * MS
            end = begin + max(delays) + transfer
            for rank, delay in enumerate(delays):
                shift = offset * rank
                found[rank].append((step, number, begin + delay + shift, end + shift))
    return found


def test_late_rank_is_the_straggler_and_its_largest_cause_is_told():
    times = run_of([0, 8 * MS, 0], transfer=MS)
    rows = [("communication", 40 * MS, 9), ("host waits", 15 * MS, 17), ("python", MS, 18)]
    found = merge([report_of(rank, each, rows=rows if rank == 1 else ()) for rank, each in enumerate(times)])
    assert found.severity is Severity.HIGH
    assert (found.straggler.rank, found.straggler.cause, found.straggler.site) == (1, "host waits", ("train.py", 17))
    assert found.straggler.caused_ns == 2 * 8 * MS
    assert [share.waited_ns for share in found.ranks] == [16 * MS, 0, 16 * MS]
    assert found.transfer_ns == 2 * MS
    text = report.to_text(found)
    assert "wait for rank 1: 16 ms a step (32 %)" in text
    assert "train.py:17" in text


def test_large_collectives_are_transfer_and_nobody_is_late():
    found = merge([report_of(rank, each) for rank, each in enumerate(run_of([0, MS // 10], transfer=10 * MS))])
    assert found.severity is Severity.HIGH
    assert found.straggler is None
    assert "Transfer takes 20 ms a step (40 %), and no rank is late" in report.to_text(found)


def test_ranks_that_come_together_are_healthy_and_ranks_late_in_turn_are_said_to_be():
    found = merge([report_of(rank, each) for rank, each in enumerate(run_of([0, 1000], transfer=1000))])
    assert found.severity is Severity.HEALTHY
    turns = run_of([0, 0, 0], transfer=0, steps=1)
    for step in range(9):
        for rank in range(3):
            turns[rank] += [
                (step + 1, 0, step * 90 * MS + (30 * MS if step % 3 == rank else 0), step * 90 * MS + 30 * MS)
            ]
    found = merge([report_of(rank, each) for rank, each in enumerate(turns)])
    assert found.straggler is None
    assert "late in turn" in report.to_text(found)


@given(st.lists(st.integers(0, 9 * MS), min_size=2, max_size=5), st.integers(0, 5 * MS), st.integers(0, 10**12))
def test_waits_and_transfer_are_what_was_planted_whatever_the_clocks_say(delays, transfer, offset):
    offset = 0 if offset < 2 * MS else offset
    times = run_of(delays, transfer=transfer, offset=offset)
    found = merge([report_of(rank, each) for rank, each in reversed(list(enumerate(times)))])
    assert [share.rank for share in found.ranks] == list(range(len(delays)))
    assert [share.waited_ns for share in found.ranks] == [2 * (max(delays) - delay) for delay in delays]
    assert found.transfer_ns == 2 * transfer
    assert found.num_collectives == 20


def test_reports_that_have_nothing_in_common_tell_nothing():
    found = merge([report_of(0, [(0, 0, 1, 2)]), report_of(1, [])])
    assert found.severity is Severity.UNRELIABLE
    assert "cannot be determined" in report.to_text(found)
    for reports in ([report_of(0, [])], [report_of(0, []), report_of(0, [])]):
        with pytest.raises(ArgumentError, match="two ranks"):
            merge(reports)


def test_wait_of_a_step_for_other_ranks_is_communication_and_not_the_users():
    class Work:
        def wait(self):
            threading.Event().wait(0.004)  # the others are late

    def begin(*_, **__):
        return Work()

    like = torch.zeros(4)
    bucket = Bucket((0,), (0,), 4)
    exchanges = [Exchange(bucket, [like], None, lambda _: begin, f"bucket {number}") for number in range(2)]
    with ms.profile() as run:
        for _ in range(20):
            for exchange in exchanges:
                exchange.start()
            for exchange in exchanges:
                exchange.wait()
                exchange.wait()  # over by then
            run.step()
    found = run.findings
    assert found.idle_by_cause[Cause.COMMUNICATION] > 0.8 * found.idle_ns
    assert found.idle_by_cause.get(Cause.WAITING, 0) < 0.1 * found.idle_ns
    assert {row.cause for row in found.rows[:1]} == {Cause.COMMUNICATION}
    numbers = [(step, number) for step, number, *_ in found.collectives()]
    assert len(numbers) == len({*numbers}) == 2 * len({step for step, _ in numbers})
    details = {span.detail for span in found.recording.spans if span.cause is Cause.COMMUNICATION}
    assert details == {"bucket 0", "bucket 1"}


def test_two_processes_are_merged_by_the_first_and_from_their_files(tmp_path, capsys):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "millstream",
    ]
    command += ["profile", "--save", str(tmp_path / "run.json"), str(SCRIPTS / "straggler.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "The others wait for rank 1" in done.stderr
    assert "time.sleep(0.02)  # late" in done.stderr
    assert done.stderr.count("a step (") == 1 + 1 + 1  # merged, and rank 0's own: rank 1 is silent
    files = [tmp_path / f"run.rank{rank}.json" for rank in (0, 1)]
    assert [json.loads(Path(each).read_text())["rank"] for each in files] == [0, 1]
    assert main(["profile", "--merge", *map(str, files)]) == 0
    assert "The others wait for rank 1" in capsys.readouterr().out
