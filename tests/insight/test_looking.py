"""What the device's profiler takes is taken out of times: only idle time, after launches, and no more than that."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.insight import Activity, ActivityKind, Cause, analyse
from millstream.insight.profiler.looking import without_looking
from tests.insight.virtual import is_busy, recordings, serial_recording

US, MS = 1_000, 1_000_000


def launch_bound(launch_ns, **facts):
    return serial_recording([(None, launch_ns, 5)] * 400 + [(Cause.IO, MS, 6)], [2 * US] * 400, steps=30, **facts)


def test_steps_are_as_long_as_without_the_profiler_and_the_caveat_says_what_is_taken_out():
    plain, looked = launch_bound(8 * US), launch_bound(13 * US)
    slowed = looked.end_ns / plain.end_ns - 1
    true, found = analyse(plain), analyse(replace(looked, looking_slowed=slowed))
    assert found.step_ns == pytest.approx(true.step_ns, rel=0.01)
    for cause in (Cause.LAUNCH, Cause.IO):
        assert found.idle_by_cause[cause] == pytest.approx(true.idle_by_cause[cause], rel=0.02)
        assert found.recoverable[cause] == pytest.approx(true.recoverable[cause], rel=0.03)
    assert "5.0 µs for each launch" in found.recording.caveats[0]
    assert analyse(found.recording).step_ns == found.step_ns  # it is done once


def test_hidden_launches_are_left_as_they_are_and_what_they_do_not_explain_is_said():
    full = serial_recording([(None, 10 * US, 5)] * 4 + [(Cause.SYNC, 0, 6)], [5 * MS] * 4, steps=30)
    found = analyse(replace(full, looking_slowed=0.5))
    assert found.step_ns == pytest.approx(analyse(full).step_ns, rel=0.01)
    assert "took 50 % of a step longer than others" in found.recording.caveats[-1]


def test_clocks_of_ranks_are_left_alone():
    looked = launch_bound(13 * US, looking_slowed=0.5)
    reduced = Activity(looked.end_ns - 5, looked.end_ns, 0, ActivityKind.COMMUNICATION)
    looked = replace(looked, activities=(*looked.activities, reduced))
    found = without_looking(looked)
    assert found.steps == looked.steps
    assert "50 % longer than others: without" in found.caveats[0]


@settings(max_examples=100)
@given(recordings(), st.floats(0.04, 2.0))
def test_only_idle_time_goes_and_no_activity_changes_its_length_or_place_in_the_order(recording, slowed):
    found = without_looking(replace(recording, looking_slowed=slowed))
    gone = recording.end_ns - found.end_ns
    assert 0 <= gone <= slowed / (1 + slowed) * recording.end_ns + 1
    assert gone <= found.looking_taken_ns * len(recording.launches)
    for before, after in zip(recording.activities, found.activities, strict=True):
        assert after.end_ns - after.start_ns == before.end_ns - before.start_ns
        assert 0 <= before.start_ns - after.start_ns <= gone
    assert sorted(found.activities, key=lambda each: each.start_ns) == list(found.activities)

    def num_busy(of):
        return sum(is_busy(of, at) for at in range(of.end_ns))

    assert num_busy(found) == num_busy(recording)
