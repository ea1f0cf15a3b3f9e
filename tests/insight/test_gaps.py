"""Causes against an oracle that looks at every nanosecond; ``MILLSTREAM_FUZZ=10000`` tries so many recordings."""

import itertools
import math
import os
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream.insight import Asleep, Cause, HostSpan, Recording, Sample, Severity, analyse
from millstream.insight.gaps import attribute, find_gaps
from millstream.insight.host import doings, host_pieces
from millstream.insight.intervals import complement, flatten, intersect, total, union
from millstream.insight.records import State
from millstream.report.idle import to_text
from tests.insight.virtual import (
    THREAD,
    interrupted,
    is_busy,
    line,
    looked_at,
    part_at,
    recordings,
    short_loops,
    span_at,
)

EXAMPLES = int(os.environ.get("MILLSTREAM_FUZZ", "100"))
MS = 1_000_000
DEVICE_CAUSES = {Cause.GRAPH_TAIL, Cause.STREAM_WAIT, Cause.DEVICE_GAP, Cause.UNKNOWN}


@settings(max_examples=EXAMPLES)
@given(recordings())
def test_slices_are_exactly_the_idle_time(recording):
    start, end = recording.start_ns + 7, recording.end_ns - 3
    slices = attribute(recording, start, end)
    covered = [at for each in slices for at in range(each.start_ns, each.end_ns)]
    assert covered == [at for at in range(start, end) if not is_busy(recording, at)]


@settings(max_examples=EXAMPLES)
@given(recordings())
def test_each_nanosecond_has_the_cause_that_the_rules_give(recording):
    for each in attribute(recording, recording.start_ns, recording.end_ns):
        for at in range(each.start_ns, each.end_ns):
            part, _launch = part_at(recording, at)
            span = span_at(recording, at)
            if part == "device":
                assert each.cause in DEVICE_CAUSES
            elif part == "launch":
                if span is not None:
                    assert each.cause is span.cause
                else:
                    assert each.cause is not Cause.UNKNOWN
                assert each.stack
            elif span is not None:
                assert each.cause is span.cause
            else:
                assert each.cause is not Cause.IN_PROCESS
                if not any(s.start_ns < at + 1 for s in recording.samples) and each.cause is not Cause.SYNC:
                    assert each.cause is Cause.UNKNOWN


@settings(max_examples=EXAMPLES)
@given(recordings())
def test_flatten_takes_the_innermost_span_everywhere(recording):
    mine = [span for span in recording.spans if span.thread == THREAD]
    pieces = flatten(mine)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(pieces))
    found = {at: span for start, end, span in pieces for at in range(start, end)}
    for at in range(recording.end_ns):
        assert found.get(at) is span_at(recording, at, as_it_is=True)


@settings(max_examples=EXAMPLES)
@given(recordings())
def test_what_the_host_did_never_overlaps(recording):
    for pieces in ([(each.start_ns, each.end_ns) for each in doings(recording)],):
        assert total(union(pieces)) == total(pieces)
    pieces = [(start, end) for start, end, _ in host_pieces(recording, [])]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(pieces))


@settings(max_examples=EXAMPLES)
@given(recordings())
def test_intervals_are_those_of_sets(recording):
    one = union((each.start_ns, each.end_ns) for each in recording.activities)
    other = union((each.start_ns, each.end_ns) for each in recording.spans)
    sets = [{at for start, end in each for at in range(start, end)} for each in (one, other)]
    both = {at for start, end in intersect(one, other) for at in range(start, end)}
    assert both == sets[0] & sets[1]
    rest = {at for start, end in complement(one, 5, 200) for at in range(start, end)}
    assert rest == set(range(5, 200)) - sets[0]
    gaps = find_gaps(recording.activities, 5, 200)
    assert [(gap.start_ns, gap.end_ns) for gap in gaps] == complement(one, 5, 200)


@settings(max_examples=max(EXAMPLES // 10, 20))
@given(short_loops(), st.integers(0, 1 << 30), st.booleans())
def test_waits_shorter_than_the_time_between_looks_have_their_share_and_their_lines(loop, seed, spins):
    recording, truth = looked_at(loop, random.Random(seed), num_looks=400, mean_us=4000, spins=spins)
    whole, spent, true = recording.end_ns, Counter(), Counter()
    for each in doings(recording):
        length, is_asleep = each.end_ns - each.start_ns, each.state is State.WAITING
        spent.update({each.state: length, (is_asleep, each.stack[-1].line): length})
    for (state, number), length in truth.items():
        true.update({state: length, (state is State.WAITING, number): length})
    is_noise = any(true[state] < 0.15 * whole for state, _ in truth)  # less than a tenth of a look is
    for state in State:
        assert spent[state] == pytest.approx(true[state], abs=(0.1 * is_noise + 0.02) * whole)
    for key in true.keys() - set(State):
        assert spent[key] == pytest.approx(true[key], abs=0.17 * whole)


def test_sleep_between_short_steps_is_no_computing_though_other_threads_spin():
    loop = [(State.WAITING, 1000, 14), (State.COMPUTE, 500, 7)]
    recording, _ = looked_at(loop, random.Random(0), num_looks=400, mean_us=4000, spins=True)
    found = analyse(recording)
    assert (found.severity, found.leading.cause, found.leading.site.line) == (Severity.HIGH, Cause.WAITING, 14)
    assert found.idle_share == pytest.approx(2 / 3, abs=0.01)
    untold = replace(recording, samples=tuple(replace(each, asleep=Asleep.LOCK) for each in recording.samples))
    assert analyse(untold).severity is Severity.NOT_SURE
    assert "a lock" in to_text(analyse(untold)).splitlines()[1]


@settings(max_examples=40)
@given(st.integers(100, 4900), st.integers(50, 12_000), st.integers(2000, 20_000), st.integers(0, 1 << 30))
@example(4000, 4000, 4000, 0)  # looks as far apart as steps, or half of that, or twice
@example(3000, 5000, 4000, 1)
@example(500, 1500, 4000, 2)
@example(4900, 50, 2000, 3)
@example(3000, 3000, 10_000, 4)
def test_python_too_short_to_be_interrupted_is_told_of_and_is_not_healthy(python, compute, interval, seed):
    found = analyse(interrupted(python, compute, random.Random(seed), num_looks=1000, interval_us=interval))
    share = max(python - 200, 0) / (python + compute)
    num_planned = sum(len(each.held_ns) for each in found.recording.samples)
    chance = 5 * math.sqrt(share * (1 - share) / num_planned)
    assert found.unseen_python == pytest.approx(share, abs=chance + 5 / num_planned)
    assert found.severity is (Severity.NOT_SURE if found.unseen_python >= 0.1 else Severity.HEALTHY)
    text = to_text(found)
    assert found.unseen_before is None or found.unseen_before.line == 8
    assert ("too short to be looked into" in text) == (found.unseen_python >= 0.05)


def test_what_comes_after_the_last_look_is_as_that_was_unless_it_is_long():
    looks = (Sample(THREAD, 0, 5, line(1), 5, 0, True), Sample(THREAD, 5, 9, line(2), 4, 0, True))
    spans = (HostSpan(THREAD, 9, 12, Cause.IO, line(3)),)
    recording = Recording(end_ns=20, thread=THREAD, samples=looks, spans=spans)
    assert [(each.start_ns, each.end_ns, each.stack) for each in doings(recording)][1:] == [
        (5, 9, line(2)),
        (12, 20, line(2)),
    ]
    assert doings(replace(recording, end_ns=2 * 10**9))[-1].end_ns == 9


@pytest.mark.parametrize("held_us", [0, 500])
def test_looks_that_come_too_late_for_short_operators_tell_that_the_thread_ran(held_us):
    # A loop that waits 4 ms for data and then calls operators for 1 ms, between which no look gets the interpreter.
    waits = ((1000 * at, 1000 * (at + 4000)) for at in range(0, 3_000_000, 5000))
    spans = [HostSpan(THREAD, start, end, Cause.IN_PROCESS, line(3)) for start, end in waits]
    looks = [  # the next wait has begun by 0.1 ms
        Sample(THREAD, at, at + 20 * MS, line(3), MS, 0, None, MS, (), 0, None, (1000 * held_us,))
        for at in range(MS // 10, 3000 * MS, 20 * MS)
    ]
    recording = Recording(end_ns=3 * 10**9, thread=THREAD, spans=tuple(spans), samples=tuple(looks[:-1]))
    found = doings(recording)
    assert {each.state for each in found} == ({State.COMPUTE} if held_us else set())
    assert sum(each.end_ns - each.start_ns for each in found) == pytest.approx(0.6 * 10**9 * bool(held_us), rel=0.02)
