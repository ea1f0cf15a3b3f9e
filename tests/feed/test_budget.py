"""The budget: how many batches, and bytes, are under way between two threads."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ArgumentError
from millstream.feed.budget import Budget

DEADLINE_S = 20


class Waiting:
    """A worker that takes, and has to wait for that."""

    def __init__(self, budget, number, num_bytes=1):
        self._ends = []
        self._thread = threading.Thread(target=lambda: self._ends.append(budget.take(number, num_bytes)), daemon=True)
        self._thread.start()
        self._thread.join(0.05)
        assert not self._ends

    def end(self):
        """What taking has come to."""
        self._thread.join(DEADLINE_S)
        return self._ends[0]


def test_who_has_no_room_waits_until_a_batch_is_delivered():
    budget = Budget(2, None)
    assert budget.take(0, 100)
    assert budget.take(1, 100)
    waiting = Waiting(budget, 2)
    budget.deliver(0)
    assert waiting.end()


def test_batches_are_delivered_in_order_and_saying_it_again_changes_nothing():
    budget = Budget(2, None)
    for number in range(2):
        budget.take(number, 1)
    for number in (0, 0, 0):
        budget.deliver(number)
    budget.take(2, 1)  # for the one that was delivered, which was one batch, however often that was said
    waiting = Waiting(budget, 3)
    budget.deliver(2)  # and the one before it
    assert waiting.end()
    assert budget.take(4, 1)


def test_bytes_are_bounded_too_and_one_batch_always_fits():
    budget = Budget(9, 1000)
    budget.take(0, 1000)
    waiting = Waiting(budget, 1)
    budget.deliver(0)
    assert waiting.end()
    assert budget.take(2, 999)
    with pytest.raises(ArgumentError, match=r"1,001 bytes does not fit into max_bytes=1,000"):
        budget.take(3, 1001)


def test_cancelling_wakes_who_waits_and_refuses_all_others():
    budget = Budget(1, None)
    budget.take(0, 1)
    waiting = Waiting(budget, 1)
    budget.cancel()
    assert not waiting.end()
    budget.deliver(0)
    assert not budget.take(2, 1)


@given(
    depth=st.integers(1, 4),
    max_bytes=st.none() | st.integers(10, 40),
    sizes=st.lists(st.integers(0, 10), max_size=30),
    late=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_never_is_more_under_way_than_may_be(depth, max_bytes, sizes, late):
    """The consumer takes a batch when there is no room for another, and at times before, as in a model of it."""
    budget, under_way = Budget(depth, max_bytes), []
    for number, size in enumerate(sizes):
        while under_way and (
            len(under_way) == depth or (max_bytes is not None and sum(s for _, s in under_way) + size > max_bytes)
        ):
            budget.deliver(under_way.pop(0)[0])
        budget.take(number, size)  # would wait for ever if the two disagreed
        under_way.append((number, size))
        if late[number]:
            budget.deliver(under_way.pop(0)[0])
    assert budget._num_bytes >= sum(size for _, size in under_way)
    assert len(budget._taken) <= depth
