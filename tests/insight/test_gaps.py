"""Causes against an oracle that looks at every nanosecond; ``MILLSTREAM_FUZZ=10000`` tries so many recordings."""

import itertools
import os

from hypothesis import given, settings

from millstream.insight import Cause
from millstream.insight.gaps import attribute, find_gaps
from millstream.insight.host import doings, host_pieces
from millstream.insight.intervals import complement, flatten, intersect, total, union
from tests.insight.virtual import THREAD, is_busy, part_at, recordings, span_at

EXAMPLES = int(os.environ.get("MILLSTREAM_FUZZ", "200"))
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
