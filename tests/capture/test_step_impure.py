# ruff: noqa: PTH123, PTH204, PTH208, SIM115
"""Clocks, files and the system's randomness: noticed while a step is traced, and refused with the line."""

import datetime
import logging
import os
import random
import secrets
import threading
import time
import uuid
from pathlib import Path
from time import perf_counter

import pytest
import torch

from millstream.capture import Step
from millstream.errors import CaptureError, FallbackWarning
from tests.capture.worlds import interpret

SYSTEM = random.SystemRandom()
OPENED = []
READS = {
    "a clock": {
        "time.time": lambda x: x * time.time(),
        "a name of its own": lambda x: x * perf_counter(),
        "datetime.now": lambda x: x * datetime.datetime.now().microsecond,
        "date.today": lambda x: x * datetime.date.today().toordinal(),
        "a branch": lambda x: x * 2 if time.monotonic_ns() % 2 else x * 3,
    },
    "a file": {
        "open": lambda x: x * len(open(__file__).read()),
        "Path.read_text": lambda x: x * len(Path(__file__).read_text()),
        "an open file": lambda x: x * (1 + len(OPENED[0].read(1))),
        "os.listdir": lambda x: x * len(os.listdir()),
        "os.path.getmtime": lambda x: x * os.path.getmtime(__file__),
    },
    "the system's randomness": {
        "os.urandom": lambda x: x * os.urandom(1)[0],
        "secrets": lambda x: x * secrets.randbelow(100),
        "uuid": lambda x: x * (uuid.uuid4().int % 100),
        "SystemRandom": lambda x: x * SYSTEM.random(),
    },
}
CASES = [(what, name) for what, reads in READS.items() for name in reads]


@pytest.fixture(autouse=True)
def _opened():
    with Path(__file__).open() as file:
        OPENED[:] = [file]
        yield


@pytest.mark.parametrize(("what", "name"), CASES, ids=[name for _, name in CASES])
def test_it_is_refused_with_the_line(what, name):
    function = READS[what][name]
    with pytest.raises(CaptureError, match=f"The step reads {what}, which gives something else each time") as caught:
        Step(function, build=interpret, strict=True)(torch.ones(1))
    assert f"{__file__}:{function.__code__.co_firstlineno}" in str(caught.value)


def test_an_error_that_the_step_catches_counts():
    def step(x):
        try:
            return x * time.time()
        except CaptureError:
            return x

    with pytest.raises(CaptureError, match="reads a clock"):
        Step(step, build=interpret, strict=True)(torch.ones(1))


def test_the_remedy_works():
    step = Step(lambda x, now: x * now, build=interpret, strict=True)
    times, x = [torch.tensor(time.time(), dtype=torch.float64) for _ in range(4)], torch.ones(1, dtype=torch.float64)
    assert [step(x, now).item() for now in times] == [now.item() for now in times]
    assert len(step.graphs) == 1


def test_it_runs_eagerly_otherwise():
    step = Step(lambda x: (x, time.perf_counter_ns()), build=interpret)
    with pytest.warns(FallbackWarning, match="reads a clock"):
        first = step(torch.ones(1))
    assert step(torch.ones(1))[1] > first[1]


def test_clocks_of_the_library_for_output_and_waiting_do_not_matter(caplog):
    lock = threading.Condition()

    def step(x):
        with lock:
            lock.wait(0.001)
        logging.getLogger("millstream.test").debug("a record has the time")
        return x * 2

    captured = Step(step, build=interpret, strict=True)
    for _ in range(3):
        assert captured(torch.ones(1)).item() == 2
    assert captured.graphs
