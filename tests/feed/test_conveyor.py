import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.feed.conveyor import Conveyor


@given(st.integers(1, 5), st.integers(0, 40))
def test_everything_arrives_in_order_within_the_capacity(capacity, num_things):
    belt = Conveyor(capacity)
    most = []

    def work():
        for i in range(num_things):
            assert belt.wait_for_room()
            belt.put(i)
        belt.finish()

    thread = threading.Thread(target=work)
    thread.start()
    got = []
    while waiting := belt.look():
        most.append(len(waiting))
        assert belt.look()[0] == waiting[0]  # until removed, the same comes first
        got.append(waiting[0])
        belt.remove()
    thread.join()
    assert got == list(range(num_things))
    assert max(most, default=0) <= capacity


def test_the_end_and_its_error_come_after_everything_else():
    belt = Conveyor(2)
    belt.put("a")
    belt.finish(ValueError("no more"))
    assert belt.look() == ("a",)
    belt.remove()
    assert belt.look() == ()
    assert isinstance(belt.error, ValueError)


@pytest.mark.parametrize("side", ["worker", "consumer"])
def test_stop_wakes_whoever_waits(side):
    belt = Conveyor(1)
    if side == "worker":
        belt.put(0)
    entered, results = threading.Event(), []

    def wait():
        entered.set()
        results.append(belt.wait_for_room() if side == "worker" else belt.look())

    thread = threading.Thread(target=wait)
    thread.start()
    entered.wait()
    belt.stop()
    thread.join(5)
    assert results == ([False] if side == "worker" else [()])
    assert belt.drain() == ([0] if side == "worker" else [])


def test_after_stop_nothing_blocks():
    belt = Conveyor(1)
    belt.stop()
    assert not belt.wait_for_room()
    assert belt.look() == ()
    belt.put(1)  # a worker that was just about to
    belt.remove()
    belt.remove()
    assert belt.drain() == []


def test_stop_may_come_from_a_finalizer_inside_a_method():
    belt = Conveyor(1)
    with belt._changed:  # as if a collection ran inside ``look`` and closed the feed
        belt.stop()
    assert belt.look() == ()
