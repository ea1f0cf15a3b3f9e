"""Clocks that only go into meters, logs and results: read before the graph runs, or after it."""

import time
from time import perf_counter

import pytest
import torch

from millstream.capture.step.step import Step
from millstream.errors import CaptureError
from tests.capture.worlds import interpret


class Meter:
    def __init__(self):
        self.total, self.count, self.end = 0.0, 0, time.time()
        self.rows, self.last = [], {}

    def update(self, value, n=1):
        self.total += value * n
        self.count += n


class Timer:
    def __enter__(self):
        self.start = time.monotonic_ns()
        return self

    def __exit__(self, *_):
        self.seconds = (time.monotonic_ns() - self.start) / 1e9


def test_times_of_meters_are_those_around_the_graph(capsys):
    meter = Meter()
    begun = time.time()

    def step(x):
        meter.update(time.time() - meter.end)
        start = perf_counter()
        with Timer() as timer:
            x = x.sin().cos().exp()
        y = x.tanh().abs() + x
        meter.rows.append(perf_counter() - start)
        meter.last["seconds"] = timer.seconds
        if meter.count % 2:
            print(f"{time.time() - meter.end:.1f} s, {int(time.time())}")  # noqa: T201
        meter.end = time.time()
        return y, perf_counter() - start, time.process_time_ns()

    captured = Step(step, build=interpret, strict=True)
    ends = []
    for _ in range(4):
        before = time.time(), perf_counter(), time.process_time_ns()
        _, seconds, spent = captured(torch.ones(3))
        assert 0 < meter.rows[-1] <= seconds <= perf_counter() - before[1]
        assert 0 <= meter.last["seconds"] <= seconds
        assert type(spent) is int
        assert before[2] <= spent <= time.process_time_ns()
        assert before[0] <= meter.end <= time.time()
        ends.append(meter.end)
    assert len(captured.graphs) == 2
    assert len(meter.rows) == meter.count == 4
    assert 0 <= meter.total <= time.time() - begun
    assert ends == sorted(ends)
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert type(perf_counter) is type(time.perf_counter) is type(len)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * time.time(),
        lambda x: x * 2 if perf_counter() % 2 > 1 else x * 3,
        lambda x: x[time.time_ns() % 2 :],
        lambda x: x + (time.time() - time.time()) * 0,
    ],
)
def test_a_time_on_which_the_graph_depends_is_refused(function):
    with pytest.raises(CaptureError, match="reads a clock, which gives something else each time"):
        Step(function, build=interpret, strict=True)(torch.ones(3))
    assert type(perf_counter) is type(time.perf_counter) is type(len)
