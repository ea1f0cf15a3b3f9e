"""Takes out of a recording what the device's profiler itself took, as far as steps without it tell.

A profiler takes some microseconds for each launch. Where the device has enough to do, they are hidden; where launching
is what a step takes, each of them is time in which the device idles, and would be charged to what the host did.

**Contract**
- Only time in which the device idled is taken out, right after the begin of a launch, and no more than ``MOST_NS`` for
  each launch, nor more in all than the steps took longer than others.
- No activity becomes shorter, and everything keeps its order; what is left is a recording as any other.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from millstream.insight.gaps import find_gaps
from millstream.insight.intervals import Interval, intersect, total
from millstream.insight.records import ActivityKind, Recording, Sample

LEAST, MUCH = 0.03, 0.10
"""Of a step: less is noise; what remains of more is reported."""
MOST_NS = 10_000
"""CUPTI took 5 µs for each launch on an H100: three records, of the call, the driver's, and the kernel."""


def without_looking(recording: Recording) -> Recording:
    """The recording as it would be if the device's profiler took no time; a caveat says what was taken out.

    Ranks that train together wait for each other: their clocks are left alone.
    """
    slowed = recording.looking_slowed
    if recording.is_synchronous or not recording.steps or slowed is None or slowed <= LEAST:
        return recording
    if recording.looking_taken_ns:  # it has been done
        return recording
    excess_ns = round(sum(step.end_ns - step.start_ns for step in recording.steps) * slowed / (1 + slowed))
    is_alone = not any(each.kind is ActivityKind.COMMUNICATION for each in recording.activities)
    idle = _idle_by_launch(recording) if is_alone else []
    each_ns = _share_out(excess_ns, [total(intervals) for intervals in idle])
    taken = [piece for intervals in idle for piece in _first(intervals, each_ns)]
    caveats, longer = [], f"{slowed:.0%}".replace("%", " %")
    rest = slowed * (1 - total(taken) / excess_ns) if excess_ns else 0.0
    if taken:
        each = f"{each_ns / 1000:.1f} µs"
        caveats.append(f"steps took {longer} longer under the device's profiler: {each} for each launch are taken out")
    if rest > MUCH:
        what = f"{rest:.0%} of a step".replace("%", " %") if taken else longer
        caveats.append(
            f"the steps that were looked at took {what} longer than others{', launches apart' if taken else ''}: "
            "without this profile the host's part is less"
        )
    return replace(
        _cut(recording, taken),
        caveats=(*recording.caveats, *(each for each in caveats if each not in recording.caveats)),
        looking_taken_ns=each_ns if taken else 0,
    )


def _idle_by_launch(recording: Recording) -> list[list[Interval]]:
    """From each launch to the next: when the device idled."""
    start, end = recording.steps[0].start_ns, recording.steps[-1].end_ns
    idle = [(gap.start_ns, gap.end_ns) for gap in find_gaps(recording.activities, start, end)]
    starts = sorted({launch.start_ns for launch in recording.launches if start <= launch.start_ns < end})
    ends = [gap[1] for gap in idle]
    found = []
    for begin, over in pairwise([*starts, end]):
        first = bisect.bisect_right(ends, begin)
        last = bisect.bisect_left(idle, (over,), first)
        found.append(intersect(idle[first:last], [(begin, over)]))
    return found


def _share_out(excess_ns: int, idle_ns: Sequence[int]) -> int:
    """How much each launch may take, at most all of its idle time, so that all of them take no more than there is."""
    left = sorted(idle_ns)
    for number, amount in enumerate(left):
        each_ns = excess_ns // (len(left) - number)
        if each_ns <= amount:
            return min(each_ns, MOST_NS)
        excess_ns -= amount
    return min(left[-1], MOST_NS) if left else 0


def _first(intervals: Sequence[Interval], length: int) -> list[Interval]:
    """The first so many nanoseconds of intervals."""
    found = []
    for start, end in intervals:
        if length <= 0:
            break
        found.append((start, min(start + length, end)))
        length -= end - start
    return found


def _cut(recording: Recording, taken: Sequence[Interval]) -> Recording:
    """The recording without some intervals; what lies within them has no length any more."""
    if not taken:
        return recording
    starts = [start for start, _ in taken]
    before = [0, *accumulate(end - start for start, end in taken)]

    def at(now: int) -> int:
        number = bisect.bisect_right(starts, now)
        within = max(taken[number - 1][1] - now, 0) if number else 0
        return now - before[number] + within

    def move(each: Any) -> Any:
        return replace(each, start_ns=at(each.start_ns), end_ns=at(each.end_ns))

    def move_look(each: Sample) -> Sample:
        look = move(each)
        less = (each.end_ns - each.start_ns) - (look.end_ns - look.start_ns)
        ran, process = (None if spent is None else max(spent - less, 0) for spent in (each.cpu_ns, each.process_ns))
        return replace(look, cpu_ns=ran, process_ns=process)

    return replace(
        recording,
        end_ns=at(recording.end_ns),
        steps=tuple(map(move, recording.steps)),
        spans=tuple(map(move, recording.spans)),
        samples=tuple(map(move_look, recording.samples)),
        activities=tuple(map(move, recording.activities)),
        launches=tuple(map(move, recording.launches)),
        waits=tuple(replace(each, at_ns=at(each.at_ns)) for each in recording.waits),
        notes=tuple(replace(each, at_ns=at(each.at_ns)) for each in recording.notes),
    )
