"""What processes tell each other through shared memory, and who is named when one does not come."""

import random
import threading
import time
from contextlib import suppress

import pytest

from millstream.data_parallel import board as board_module
from millstream.data_parallel.board import PAYLOAD_BYTES, NotTogetherError
from millstream.engine.parallel import watchdog
from millstream.errors import DataParallelError
from tests.clocks import HANG_S, Clock
from tests.parallel.threads import in_both, in_turns


def test_all_hear_what_all_say_in_every_round(boards):
    def act(board):
        return [board.gather(10 * number + board.rank) for number in range(300)]

    expected = [[10 * number, 10 * number + 1] for number in range(300)]
    assert in_both(boards, act) == [expected, expected]


def test_processes_that_come_meet(boards):
    for _ in range(3):
        assert in_both(boards, lambda board: board.meet(HANG_S)) == [True, True]
    assert in_both(boards, lambda board: board.gather(board.rank)) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("rank", [0, 1])
def test_process_alone_meets_nobody(boards, rank):
    assert not boards[rank].meet(0.01)
    assert not boards[1 - rank].meet(0.01)
    assert in_both(boards, lambda board: board.meet(HANG_S)) == [True, True]


@pytest.mark.parametrize("seed", range(5))
def test_processes_that_lose_patience_meet_as_often_as_each_other(boards, seed, monkeypatch):
    monkeypatch.setattr(board_module, "time", Clock())
    boards[0].timeout_s = boards[1].timeout_s = 0.1  # of that clock

    def act(board):
        rng = random.Random(board.rank)
        return sum(board.meet(rng.choice((0.0, 1e-4, 1e-3, 4e-3)), "meet") for _ in range(60))

    one, other = in_turns(boards, act, seed)
    assert 0 < one == other < 60


def test_first_process_ends_after_it_came(boards):
    boards[1]._words[12] = 1  # as it says when it comes
    boards[0].ended_processes.add(1000)
    with pytest.raises(DataParallelError, match=r"Rank 1 waited for rank 0 \(process 1000\), which has ended, to meet"):
        boards[1].meet(0.0, "meet")


def test_process_that_took_fewer_steps_is_missing(boards):
    first, second = boards
    for board, count in ((first, 5), (second, 3)):
        for _ in range(count):
            board.count_exchange()
    assert first.missing() == "of 5 exchanges rank 1 (process 1001) has begun 3 only"
    assert second.missing() == ""
    first.ended_processes.add(1001)
    assert first.missing(1.0) == "of 5 exchanges rank 1 (process 1001) has ended, after it had begun 3"


def test_all_know_when_each_came(boards):
    def act(board):
        before = time.monotonic_ns()
        board.gather(board.rank)
        after = time.monotonic_ns()
        own = board.arrivals_ns()
        board.gather(0)
        return before, after, own

    for _ in range(3):
        (first, first_end, one), (second, second_end, other) = in_both(boards, act)
        assert one == other
        assert first <= one[0] <= first_end
        assert second <= one[1] <= second_end


@pytest.mark.parametrize("size", [0, 5, PAYLOAD_BYTES, 2 * PAYLOAD_BYTES + 3])
def test_bytes_of_the_first_reach_all(boards, size):
    payload = bytes(range(256)) * (size // 256 + 1)
    payload = payload[:size]
    shared = in_both(boards, lambda board: board.share(payload if board.rank == 0 else b""))
    assert shared == [payload, payload]


def test_rank_that_does_not_come_is_named(boards):
    boards[0].timeout_s = 0.0
    with pytest.raises(
        DataParallelError, match=r"Rank 0 waited for rank 1 \(process 1001\), which did not come within"
    ):
        boards[0].gather(1, "begin a step")


def test_rank_that_has_ended_is_named_at_once(boards):
    boards[0].ended_processes.add(1001)
    with pytest.raises(DataParallelError, match=r"rank 1 \(process 1001\), which has ended, to begin a step"):
        boards[0].gather(1, "begin a step")


def test_rank_that_fails_is_heard_by_all(boards):
    boards[1].fail()
    with pytest.raises(NotTogetherError, match="rank 1 could not capture"):
        boards[0].gather(1, "capture")
    assert in_both(boards, lambda board: board.gather(board.rank)) == [[0, 1], [0, 1]]


def test_rank_that_failed_leaves_slower_ones_their_words(boards):
    boards[0]._tell(5)  # it has yet to read what the other tells
    boards[1].gather(6)
    boards[1].fail()
    boards[1].timeout_s = 0.0
    with pytest.raises(DataParallelError, match="Rank 1 waited for rank 0"):
        boards[1].gather(7)
    assert boards[0]._await("") == [5, 6]


def test_old_word_is_not_taken_for_a_new_one(boards):
    in_both(boards, lambda board: board.gather(7))
    in_both(boards, lambda board: board.gather(7))
    boards[0].timeout_s = 0.0
    with pytest.raises(DataParallelError):
        boards[0].gather(7)


# --- replays that do not end ------------------------------------------------------------------------------------------


class Place:
    """A device whose events come when they are told to."""

    closed = False

    def __init__(self, ends):
        self._ends = ends
        self.capture_lock = threading.RLock()
        self.driver = self.events = self

    def acquire(self):
        return self

    def release(self, event):
        pass

    def record(self, stream):
        pass

    def current_stream(self):
        return None

    def spare_captures(self):
        return self.capture_lock

    def query(self):
        return self._ends


class OverError(Exception):
    """Of the watchdog's thread."""


class WatchClock(Clock):
    """The watchdog's: it looks when ``may_look`` is set, and it is over after an hour, or when it has given up."""

    def __init__(self, told):
        super().__init__()
        self.may_look, self._told, self._end_ns = threading.Event(), told, self.now_ns + 3600 * 10**9

    def sleep(self, seconds):
        self.may_look.wait()
        super().sleep(seconds)
        if self._told or self.now_ns > self._end_ns:
            raise OverError


class Watchdog(watchdog.Watchdog):
    def _run(self):
        with suppress(OverError):
            super()._run()


def watched(board, ends, monkeypatch):
    """What the watchdog of two replays tells; none of them comes to an end unless ``ends``."""
    told = []
    monkeypatch.setattr(watchdog, "time", clock := WatchClock(told))
    dog = Watchdog(board, told.append)
    dog.watch(Place(ends))
    dog.watch(Place(ends))
    clock.may_look.set()
    dog._thread.join()
    return told


def test_replay_that_ends_is_no_matter(boards, monkeypatch):
    assert watched(boards[0], True, monkeypatch) == []


def test_rank_behind_in_a_replay_that_hangs_is_named(boards, monkeypatch):
    boards[1].note(1)
    told = watched(boards[0], False, monkeypatch)
    assert "Rank 0: replay 2 of a step with collectives is not over" in told[0]
    assert "rank 1 (process 1001) did not launch it: [2, 1]" in told[0]


def test_rank_that_ended_in_a_replay_is_named(boards, monkeypatch):
    boards[0].ended_processes.add(1001)
    assert "rank 1 (process 1001) has ended" in watched(boards[0], False, monkeypatch)[0]


def test_all_launched_a_replay_that_hangs(boards, monkeypatch):
    boards[1].note(2)
    assert "so that a device stands still" in watched(boards[0], False, monkeypatch)[0]
