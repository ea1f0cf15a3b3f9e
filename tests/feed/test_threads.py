import os
import threading
import time

import pytest
import torch

from millstream.feed import threads
from millstream.feed.threads import LARGE_BYTES, TRIES, ThreadChoice, openmp_threads


def run(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_so_many_threads_are_used_here_and_as_many_as_before_elsewhere():
    def note():
        numbers.append(torch.get_num_threads())

    def work():
        with openmp_threads(before + 2):
            note()
            run(note)
        note()

    numbers, before = [], torch.get_num_threads()
    run(work)
    note()
    assert numbers == [before + 2, before, before, before]


def test_without_openmp_nothing_changes(monkeypatch):
    monkeypatch.setattr(threads, "_find_setter", lambda: None)
    before = torch.get_num_threads()
    with openmp_threads(before + 2):
        assert torch.get_num_threads() == before


class Machine:
    """Its copies take as long as is said for each number of threads."""

    def __init__(self, monkeypatch, seconds, processors=16):
        self.now, self.used = 0.0, []
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(threads, "_find_setter", lambda: self.used.append)
        self.seconds = seconds

    def copy(self, choice, num_bytes=LARGE_BYTES):
        with choice.use(num_bytes):
            self.now += self.seconds[self.used[-1]] * num_bytes
        return self.used[-2]


@pytest.mark.parametrize("best", [4, 8, 12, 16])
def test_the_fastest_number_is_found_and_kept(monkeypatch, best):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    machine = Machine(monkeypatch, {number: 1.0 + abs(number - best) for number in (4, 8, 12, 16)})
    choice = ThreadChoice()
    tried = [machine.copy(choice, LARGE_BYTES * (1 + i % 3)) for i in range(4 * TRIES)]
    assert tried == [number for number in (4, 8, 12, 16) for _ in range(TRIES)]
    assert choice.chosen == best
    assert [machine.copy(choice), machine.copy(choice, 10)] == [best, best]


def test_small_batches_are_no_trial(monkeypatch):
    machine = Machine(monkeypatch, dict.fromkeys((4, 8, 12, 16), 1.0))
    choice = ThreadChoice()
    assert {machine.copy(choice, LARGE_BYTES - 1) for _ in range(10 * TRIES)} == {4}
    assert choice.chosen is None


@pytest.mark.parametrize(("number", "processors"), [(3, 16), (None, 1)])
def test_without_a_choice_nothing_is_tried(monkeypatch, number, processors):
    Machine(monkeypatch, {}, processors)
    assert ThreadChoice(number).chosen == (number or 1)


def test_an_error_is_no_measurement(monkeypatch):
    Machine(monkeypatch, {})
    choice = ThreadChoice()
    with pytest.raises(LookupError), choice.use(LARGE_BYTES):
        raise LookupError
    assert not any(choice._seconds_per_byte.values())
