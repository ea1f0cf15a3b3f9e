"""What trials capture, and for how long they keep it, with captures that are pretended."""

import types
import weakref

import pytest
import torch

from millstream.engine.planning import trial
from millstream.engine.planning.trial import Trials
from millstream.engine.unchanged import replays_unchanged

SERIAL, FIRST, SLOWER, BEST, LAST = (types.SimpleNamespace(plan=name) for name in ("s", "f", "l", "b", "z"))
"""Candidate plans."""

NO_RANDOMS = types.SimpleNamespace(graph=types.SimpleNamespace(buffers=()))
CONTEXT = types.SimpleNamespace(place=types.SimpleNamespace(index=0))


class Graph:
    """A capture of a plan, which is a letter here."""

    written = ()

    def __init__(self, plan):
        self.graph = self.plan = plan


class Device:
    """Captures plans, and times their graphs as they are called."""

    def __init__(self, fails_at=None):
        self.captured, self.alive, self.fails_at = [], weakref.WeakSet(), fails_at
        self.most_alive = 0

    def capture(self, plan):
        self.captured.append(plan)
        self.most_alive = max(self.most_alive, len(self.alive) + 1)
        if plan == self.fails_at:
            raise torch.OutOfMemoryError("pretended")
        graph = Graph(plan)
        self.alive.add(graph)
        return graph


@pytest.fixture
def make_trials(monkeypatch):
    monkeypatch.setattr(torch.cuda, "default_generators", (None,))
    monkeypatch.setattr(trial, "compare", lambda graph, base, rewind: (graph, base))
    return lambda device: Trials(device.capture, SERIAL.plan, CONTEXT, NO_RANDOMS)


def test_the_best_is_captured_once_and_no_more_than_two_are_alive(make_trials):
    device = Device()
    trials = make_trials(device)
    assert not trials.ran
    assert trials.serial_ns() == "s"
    times = [trials.compare(*pair) for pair in ((FIRST, SERIAL), (SLOWER, FIRST), (BEST, FIRST), (LAST, BEST))]
    assert times == [("f", "s"), ("l", "f"), ("b", "f"), ("z", "b")]
    assert "".join(device.captured) == "sflbz"
    assert device.most_alive == 2
    assert (trials.ran, trials.error) == (True, None)
    del trials
    assert not device.alive


def test_nothing_is_tried_after_a_failure_and_nothing_of_it_kept(make_trials):
    device = Device(fails_at=FIRST.plan)
    trials = make_trials(device)
    assert trials.compare(FIRST, SERIAL) == "could not be captured"
    assert isinstance(trials.error, torch.OutOfMemoryError)
    assert trials.error.__traceback__ is None
    assert trials.compare(LAST, SERIAL) == "could not be captured"
    assert trials.serial_ns() is None
    assert "".join(device.captured) == "sf"


@pytest.mark.parametrize("in_slots", [False, True])
def test_what_is_tried_again_and_again_does_not_count_on(in_slots, monkeypatch):
    """Else it would write past the end of a cache: on a GPU nothing runs any more after that."""
    position, cache = torch.tensor([6]), torch.zeros(8)
    slots = []

    class Counting(Graph):
        def __init__(self, plan):
            super().__init__(plan)
            self.graph = self
            self.written = (position.clone(), cache) if in_slots else (position, cache)
            slots.append(self.written[0])

        def replay(self):
            self.written[0].add_(1)
            cache[self.written[0]] += 1
            return 1.0

    monkeypatch.setattr(torch.cuda, "default_generators", (None,))
    monkeypatch.setattr(trial, "_replay_ms", Counting.replay)
    trials = Trials(Counting, SERIAL.plan, CONTEXT, NO_RANDOMS)
    assert trials.compare(FIRST, SERIAL) == (1_000_000, 1_000_000)
    assert trials.error is None
    assert [slot.item() for slot in slots] == [6, 6]
    assert not cache.any()


def test_what_is_replayed_to_be_explained_does_not_count_on():
    position, cache = torch.tensor([6]), torch.zeros(8)

    def replay():
        position.add_(1)
        cache[position] += 1

    with replays_unchanged(NO_RANDOMS, (position, cache), None, replay) as again:
        for _ in range(3):
            again()
        assert position.item() == 7
        assert cache[7] == 3
    assert position.item() == 6
    assert not cache.any()
