"""Idle times of the device, and what each nanosecond of them waited for.

**Contract**
- *Busy* is the union over all streams; a *gap* is what lies between, within the window of the steps.
- Each gap is cut into slices without overlap that cover it exactly; each slice has one cause.
- What nothing was seen of is ``UNKNOWN``; it is not spread over others.

**Steps**, for a gap (a, b) whose next activity was launched by a call L of the training thread, or of another:
1. *Host part*, from a until L begins: what the thread did then, the innermost span first; after a wait for the device,
   until two launches are outstanding again, the refill of the queue belongs to that wait; then samples. A queue that
   a whole run of launches does not fill is launching's, and only the first of them the wait's.
2. *Launch part*, while L ran: launching, unless it refills the queue, or the driver compiles or allocates in it.
3. *Device part*, from the end of L: between two graphs, after another stream's event, or the device's own.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from millstream.insight.causes import Cause
from millstream.insight.host import host_pieces, with_located_waits
from millstream.insight.intervals import complement, overlay, total, union
from millstream.insight.records import Activity, ActivityKind, HostSpan, LaunchCall, Recording, Stack, StreamWait

SYNC_SLACK_NS = 20_000
"""A wait that returned so shortly before the device was seen to end belongs to it: clocks of host and device differ."""
RUN_INTERVAL_NS, RUN_LENGTH = 100_000, 16
"""So many launches, each so shortly after the last and without a wait for the device between them, are a run: if the
queue stays empty, launching is what it costs."""
OWN_GAP_NS = 10_000
"""A device's own pause between two kernels that wait in its queue is shorter."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of idle time with its cause.

    Attributes:
        start_ns: Begin.
        end_ns: End.
        cause: What the device waited for.
        stack: What the host was doing, the innermost frame first; empty if nobody knows.
        detail: A few words more.
    """

    start_ns: int
    end_ns: int
    cause: Cause
    stack: Stack = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Gap:
    """Nothing ran from ``start_ns`` to ``end_ns``; ``ender`` came next, if anything did."""

    start_ns: int
    end_ns: int
    ender: Activity | None


def find_gaps(activities: Sequence[Activity], start_ns: int, end_ns: int) -> list[Gap]:
    """All the time within a window in which no activity ran."""
    busy = union((each.start_ns, each.end_ns) for each in activities)
    first_at: dict[int, Activity] = {}
    for each in sorted(activities, key=lambda each: (each.start_ns, -each.end_ns)):
        if each.start_ns < each.end_ns:
            first_at.setdefault(each.start_ns, each)
    return [Gap(start, end, first_at.get(end)) for start, end in complement(busy, start_ns, end_ns)]


def exposed_ns(activities: Sequence[Activity], kind: ActivityKind, start_ns: int, end_ns: int) -> int:
    """Time within a window in which activities of one kind ran, and none of any other."""
    other = union((each.start_ns, each.end_ns) for each in activities if each.kind is not kind)
    mine = union((each.start_ns, each.end_ns) for each in activities if each.kind is kind)
    clipped = [(max(start, start_ns), min(end, end_ns)) for start, end in mine]
    return sum(total(complement(other, start, end)) for start, end in clipped if start < end)


def attribute(recording: Recording, start_ns: int, end_ns: int) -> list[Slice]:
    """Give every nanosecond between two times in which the device idled to a cause.

    Returns:
        Slices in order that do not overlap; together they are exactly the gaps.
    """
    gaps = find_gaps(recording.activities, start_ns, end_ns)
    launches = sorted(recording.launches, key=lambda launch: launch.start_ns)
    recording = with_located_waits(recording)
    pieces = host_pieces(recording, find_refills(recording, launches))
    ends = [end for _, end, _ in pieces]
    context = _Context(
        {launch.number: launch for launch in launches},
        find_launch_runs(launches, recording),
        by_end := sorted(recording.activities, key=lambda each: each.end_ns),
        [each.end_ns for each in by_end],
        recording.waits,
    )
    found: list[Slice] = []
    for gap in gaps:
        first = bisect.bisect_right(ends, gap.start_ns)
        found += _slice_gap(gap, pieces, first, context)
    return found


@dataclass(frozen=True)
class _Context:
    launch_of: dict[int, LaunchCall]
    in_run: frozenset[int]
    by_end: list[Activity]
    ends: list[int]
    waits: Sequence[StreamWait]


def _slice_gap(gap: Gap, pieces: Sequence[tuple[int, int, HostSpan]], first: int, context: _Context) -> Iterator[Slice]:
    ender = gap.ender
    launch = context.launch_of.get(ender.launch) if ender is not None and ender.launch is not None else None
    # Without a launch the host itself is the device, or nobody knows: what the host did is all there is to say.
    host_end = gap.end_ns if launch is None else min(max(launch.start_ns, gap.start_ns), gap.end_ns)
    launch_end = host_end if launch is None else min(max(launch.end_ns, host_end), gap.end_ns)
    is_run = launch is not None and launch.number in context.in_run
    for start, end, span in overlay(pieces, gap.start_ns, host_end, first):
        if span is None:
            yield Slice(start, end, Cause.UNKNOWN)
        elif is_run and launch is not None and span.cause is Cause.PYTHON:
            yield Slice(start, end, Cause.LAUNCH, launch.stack or span.stack)
        else:
            yield Slice(start, end, span.cause, span.stack, span.detail)
    if launch is None:
        return
    for start, end, span in overlay(pieces, host_end, launch_end, first):
        is_plain = span is None or span.cause in (Cause.PYTHON, Cause.WAITING, Cause.LAUNCH, Cause.UNKNOWN)
        if span is None or is_plain:
            yield Slice(start, end, Cause.LAUNCH, launch.stack or (span.stack if span is not None else ()))
        else:
            yield Slice(start, end, span.cause, span.stack or launch.stack, span.detail)
    if launch_end < gap.end_ns and ender is not None:
        yield _slice_device_part(launch_end, gap, ender, launch, context)


def _slice_device_part(start_ns: int, gap: Gap, ender: Activity, launch: LaunchCall, context: _Context) -> Slice:
    before = bisect.bisect_right(context.ends, gap.start_ns)
    previous = context.by_end[before - 1] if before else None
    # A wait is called just before the launch that it holds back.
    waits = (each for each in context.waits if 0 <= launch.start_ns - each.at_ns <= RUN_INTERVAL_NS)
    if previous is not None and None not in (previous.graph, ender.graph) and previous.launch != ender.launch:
        cause = Cause.GRAPH_TAIL
    elif any(wait.stream == ender.stream for wait in waits):
        cause = Cause.STREAM_WAIT
    else:
        cause = Cause.DEVICE_GAP if gap.end_ns - start_ns <= OWN_GAP_NS else Cause.UNKNOWN
    return Slice(start_ns, gap.end_ns, cause, launch.stack)


def find_refills(recording: Recording, launches: Sequence[LaunchCall]) -> list[HostSpan]:
    """After each wait for the device that found its queue empty: the time until two launches are outstanding.

    Where a run of launches does not fill the queue, launching is slower than running, wait or no wait: such a refill
    ends with the first launch.
    """
    end_of: dict[int, int] = {}
    for each in recording.activities:
        if each.launch is not None:
            end_of[each.launch] = max(end_of.get(each.launch, 0), each.end_ns)
    syncs = _waits_for_device(recording)
    starts = [launch.start_ns for launch in launches]
    refills = []
    for number, sync in enumerate(syncs):
        before = bisect.bisect_left(starts, sync.end_ns)
        if any(end_of.get(each.number, 0) > sync.end_ns + SYNC_SLACK_NS for each in launches[:before][-64:]):
            continue  # work was queued after what was waited for: nothing is lost
        limit = syncs[number + 1].start_ns if number + 1 < len(syncs) else recording.end_ns
        end, outstanding = limit, []
        for count, launch in enumerate(launches[before : before + RUN_LENGTH + 1]):
            if launch.end_ns >= limit:
                break
            if count == RUN_LENGTH:
                end = launches[before].end_ns
                break
            outstanding = [each for each in outstanding if end_of.get(each.number, 0) > launch.end_ns] + [launch]
            if len(outstanding) >= 2:
                end = launch.end_ns
                break
        if sync.end_ns < end:
            refills.append(HostSpan(sync.thread, sync.end_ns, end, Cause.SYNC, sync.stack, sync.detail))
    return refills


def _waits_for_device(recording: Recording) -> list[HostSpan]:
    waits = (span for span in recording.spans if span.cause is Cause.SYNC and span.thread == recording.thread)
    return sorted(waits, key=lambda span: span.end_ns)


def find_launch_runs(launches: Sequence[LaunchCall], recording: Recording) -> frozenset[int]:
    """Numbers of the launches that belong to runs which launching alone makes slow, each run's first one excepted.

    What came before the first one is not of the run. A wait for the device ends a run: the queue is empty after it
    however quick launching is.

    Args:
        launches: In order.
        recording: What they launched, and the waits.
    """
    end_of: dict[int, int] = {}
    length_of: dict[int, int] = {}
    for each in recording.activities:
        if each.launch is not None:
            end_of[each.launch] = max(end_of.get(each.launch, 0), each.end_ns)
            length_of[each.launch] = length_of.get(each.launch, 0) + each.end_ns - each.start_ns
    found: set[int] = set()
    run: list[LaunchCall] = []

    def close() -> None:
        if len(run) >= RUN_LENGTH:
            intervals = [later.start_ns - earlier.start_ns for earlier, later in pairwise(run)]
            if median(length_of.get(each.number, 0) for each in run) < median(intervals):
                found.update(each.number for each in run[1:])
        run.clear()

    waits = [span.end_ns for span in _waits_for_device(recording)]
    outstanding: list[int] = []  # ends of what is launched and not finished
    for launch in launches:
        outstanding = [end for end in outstanding if end > launch.start_ns]
        if run:
            has_waited = bisect.bisect_right(waits, run[-1].start_ns) < bisect.bisect_right(waits, launch.start_ns)
            if has_waited or launch.start_ns - run[-1].start_ns >= RUN_INTERVAL_NS or len(outstanding) > 1:
                close()
        run.append(launch)
        outstanding.append(end_of.get(launch.number, launch.end_ns))
    close()
    return frozenset(found)
