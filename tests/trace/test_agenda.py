"""When the sampler looks, and when the device's profiler is on."""

import itertools
import random

from hypothesis import example, given
from hypothesis import strategies as st

from millstream.trace.agenda import ENOUGH_NS, FAR_NS, FIRST_STEP, Agenda, Turn, Windows

LENGTHS = st.lists(st.integers(1, 3 * ENOUGH_NS), min_size=40, max_size=60)


@given(LENGTHS, st.sampled_from([0, 2 * ENOUGH_NS]))
@example([ENOUGH_NS] * 40, 0)
@example([ENOUGH_NS // 100] * 40, 2 * ENOUGH_NS)
@example([ENOUGH_NS // 10] * 40, 0)
def test_windows_follow_each_other_and_end_with_enough_steps_or_enough_time(lengths, taking):
    windows, now, taken = Windows(), 0, []
    for number, length in enumerate(lengths, 1):
        now += length
        if (turn := windows.at_step(number, now)) is not None:
            now += taking  # the profiler starts, or writes
            windows.taken(now)
            taken.append((turn, number, now))
    assert [turn for turn, _, _ in taken] == list(Turn)
    begin, end, lined, over = taken
    assert begin[1] == FIRST_STEP
    assert lined[1] == end[1] + 2
    assert windows.over == over[1]
    for first, last, most, least in ((begin, end, 20, 6), (lined, over, 3, 2)):
        num_steps = last[1] - first[1]
        assert num_steps == most or last[2] - taking - first[2] >= ENOUGH_NS
        assert least <= num_steps <= most
        before = last[2] - taking - lengths[last[1] - 1] - first[2]
        assert num_steps == least or before < ENOUGH_NS  # it is not longer than it has to be


@given(st.lists(st.tuples(st.integers(1, 50_000), st.integers(0, 100_000)), max_size=50), st.integers(0, 99))
def test_moments_are_planned_once_in_each_interval_and_never_in_the_past(turns, seed):
    agenda, now = Agenda(0, 4000, random.Random(seed)), 0
    planned = [agenda.due_ns]
    for looked, held in turns:
        agenda.skip_to(now)
        assert agenda.due_ns >= now
        planned.append(agenda.due_ns)
        now = agenda.due_ns + held
        others = agenda.take(now)
        assert others[0] == held
        assert list(others) == sorted(others, reverse=True)
        assert len(others) <= held // 4000 + 2
        assert all(0 < each <= held for each in others[1:])
        now += looked
    assert all(later - earlier >= 0 for earlier, later in itertools.pairwise(planned))


def test_pause_of_the_process_is_not_caught_up_with():
    agenda = Agenda(0, 4000, random.Random(0))
    assert len(agenda.take(agenda.due_ns + 10 * FAR_NS)) <= FAR_NS // 4000 + 2
    agenda.skip_to(100 * FAR_NS)
    assert agenda.due_ns == 100 * FAR_NS
