import pytest

from millstream.errors import PlanError
from millstream.graph import HappensBefore, Launch, Plan, Record, StreamClocks, Wait
from millstream.testing import towers_graph


def order_of(*steps, num_streams=3):
    return HappensBefore(Plan(towers_graph(3, 2), steps, num_streams))


def test_one_stream_is_ordered():
    order = order_of(Launch(0, 0), Launch(1, 0))
    assert order.before(0, 1)
    assert not order.before(1, 0)
    assert not order.before(0, 0)


def test_streams_are_not_ordered_by_the_host():
    order = order_of(Launch(0, 0), Launch(2, 1))
    assert not order.before(0, 1)
    assert not order.before(1, 0)


def test_a_wait_orders_what_is_issued_behind_it_after_what_was_issued_before_the_record():
    order = order_of(Launch(0, 0), Record(0, 0), Launch(1, 0), Launch(2, 1), Wait(0, 1), Launch(3, 1))
    assert order.before(0, 5)
    assert not order.before(0, 3)  # issued before the wait
    assert not order.before(2, 5)  # issued after the record


def test_order_is_transitive_through_a_third_stream():
    order = order_of(Launch(0, 0), Record(0, 0), Wait(0, 1), Record(1, 1), Wait(1, 2), Launch(4, 2))
    assert order.before(0, 5)
    assert order.first_behind(2, 0) == 4
    assert order.first_behind(1, 0) == 2
    assert order.first_behind(0, 0) == 1
    assert order.first_behind(0, 5) == 6  # nothing


def test_only_what_stream_0_waits_for_is_joined():
    order = order_of(Launch(2, 1), Record(0, 1), Launch(3, 1), Launch(4, 2), Wait(0, 0))
    assert [order.joined(position) for position in range(5)] == [True, True, False, False, True]


def test_waiting_for_the_future_is_refused():
    with pytest.raises(PlanError, match="step 1 waits for event 7") as caught:
        order_of(Launch(0, 0), Wait(7, 1), Record(7, 0))
    assert caught.value.step == 1


def test_a_wait_tells_whether_it_says_anything_new():
    clocks = StreamClocks(3)
    first, second = clocks.advance(0), clocks.advance(0)
    assert clocks.wait(1, second)
    assert not clocks.wait(1, first)
    assert not clocks.wait(0, first)  # its own stream
    through = clocks.advance(1)
    assert clocks.wait(2, through)
    assert not clocks.wait(2, second)  # known through stream 1
