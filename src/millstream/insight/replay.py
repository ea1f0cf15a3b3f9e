"""Estimate what removing a cause would give: the recorded run is played again, with and without it.

Time charged to a cause is not what its remedy returns: after one wait there may stand another. So the host's and the
device's work are played again as they depend on each other, once as recorded and once without the cause; the
difference is what can be *recovered*. Gains of several causes do not add up.

**Model.** The host goes through its launches and waits for the device in order, with the time between them as it was.
An activity starts when its stream is free, its launch has been called, and what its stream waits for is over. A CUDA
graph is one activity.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from millstream.insight.causes import Cause
from millstream.insight.gaps import Slice, find_launch_runs, find_refills
from millstream.insight.host import host_pieces
from millstream.insight.intervals import overlay
from millstream.insight.records import Activity, ActivityKind, HostSpan, LaunchCall, Recording, State


def recoverable_ns(
    recording: Recording,
    slices: Sequence[Slice],
    exposed: Mapping[Cause, int],
    causes: Sequence[Cause],
    start_ns: int,
    end_ns: int,
    *,
    apart: Collection[Cause] = (),
) -> dict[Cause, int]:
    """By how much the time between two moments would shrink without each cause, one at a time.

    Args:
        recording: What was seen.
        slices: Its idle time by cause.
        exposed: Time in which the device only copied, or only communicated.
        causes: Which to take away.
        start_ns: Begin of the window.
        end_ns: Its end.
        apart: Causes that the window caught by chance: in no replay are they there for others to hide.
    """
    if recording.is_synchronous or not recording.launches:
        # Without a queue nothing hides behind anything: what is taken away is gone.
        charged = {cause: sum(s.end_ns - s.start_ns for s in slices if s.cause is cause) for cause in causes}
        if Cause.PYTHON in charged:  # a thread that does not run Python does not wait for a processor to run it
            waits = (s for s in slices if s.cause is Cause.DESCHEDULED and s.detail == State.PYTHON)
            charged[Cause.PYTHON] += sum(s.end_ns - s.start_ns for s in waits)
        return charged
    model = _Model(recording, start_ns, end_ns)
    base = max(model.play(frozenset(apart)), 1)
    idle = sum(each.end_ns - each.start_ns for each in slices)
    # What computes takes its time whatever the host does; and a model that is off must not promise by its own scale.
    most = {cause: idle + exposed.get(cause, 0) for cause in causes}
    spent_apart = sum(each.end_ns - each.start_ns for each in slices if each.cause in apart)
    scale = (end_ns - start_ns - spent_apart) / base

    def gain(cause: Cause) -> int:
        return min(max(round((base - model.play({*apart, cause})) * scale), 0), most[cause])

    return {cause: gain(cause) for cause in causes}


BLOCKING = 0.5
"""A call that lasts so much of the copy that it asks for waits for it."""
_SAME_CALL_NS = 50_000  # from a copy to the wait for it, both of one operator
_OF_LAUNCHING = (Cause.LAUNCH, Cause.PYTHON)
"""What a run of launches spends its time on; what else happens in it, such as a collection, remains in a graph."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A launch or a wait, in the host's order.

    Attributes:
        before_ns: Host time since the call before.
        saved_ns: What of that goes with each cause.
        length_ns: Of the call itself; of a wait, what remains after the device is done.
        stream: Of the activity; ``None`` of a wait for the device.
        lag_ns: From the begin of the call until the activity may start.
        device_ns: Length of the activity.
        kind: Of the activity.
        is_blocking: The call returns when the activity is over.
        is_of_copy: A wait for the copy that was called just before it: PyTorch waits so for memory that is not pinned.
        is_run: Of a run of launches.
    """

    before_ns: int
    saved_ns: dict[Cause, int]
    length_ns: int
    stream: int | None = None
    lag_ns: int = 0
    device_ns: int = 0
    kind: ActivityKind = ActivityKind.KERNEL
    is_blocking: bool = False
    is_of_copy: bool = False
    is_run: bool = False


class _Model:
    def __init__(self, recording: Recording, start_ns: int, end_ns: int) -> None:
        launches = sorted(recording.launches, key=lambda launch: launch.start_ns)
        in_run = find_launch_runs(launches, recording)
        pieces = [
            piece
            for piece in host_pieces(recording, find_refills(recording, launches))
            if piece[2].cause is not Cause.SYNC  # a wait is a call, and its refill goes with it
        ]
        piece_ends = [end for _, end, _ in pieces]
        work = _work_of(recording.activities)
        syncs = [span for span in recording.spans if span.cause is Cause.SYNC and span.thread == recording.thread]
        calls: list[LaunchCall | HostSpan] = [*(each for each in launches if each.number in work), *syncs]
        calls = [each for each in calls if start_ns <= each.start_ns < end_ns]
        calls.sort(key=lambda each: (each.start_ns, -each.end_ns))
        self.calls: list[_Call] = []
        latest = done = start_ns
        for each in calls:
            if each.start_ns < latest:  # within the call before
                continue
            saved: dict[Cause, int] = {}
            for first, last, span in overlay(pieces, latest, each.start_ns, bisect.bisect_right(piece_ends, latest)):
                if span is not None:
                    saved[span.cause] = saved.get(span.cause, 0) + last - first
            before_ns = each.start_ns - latest
            latest = max(each.end_ns, each.start_ns)
            if isinstance(each, HostSpan):  # what remains of the wait when the device is done
                rest_ns = each.end_ns - min(max(each.start_ns, done), each.end_ns)
                is_of_copy = bool(self.calls) and self.calls[-1].is_blocking and before_ns <= _SAME_CALL_NS
                self.calls.append(_Call(before_ns, saved, rest_ns, is_of_copy=is_of_copy))
                continue
            first, last, sample = work[each.number]
            done = max(done, last)
            # The call returns when the last of the host's memory has been read, a little before the copy is over.
            is_blocking = (
                sample.kind is ActivityKind.COPY
                and sample.is_pageable
                and each.end_ns - each.start_ns >= BLOCKING * (last - first)
            )
            self.calls.append(
                _Call(
                    before_ns,
                    saved,
                    each.end_ns - each.start_ns if not is_blocking else max(each.end_ns - last, 0),
                    sample.stream,
                    max(min(first, each.end_ns) - each.start_ns, 0),
                    last - first,
                    sample.kind,
                    is_blocking,
                    is_run=each.number in in_run,
                )
            )
        self.tail_ns = max(end_ns - latest, 0)

    def play(self, without: Collection[Cause]) -> int:
        """Length of the run without some causes."""
        host, device = 0, 0
        free: dict[int, int] = {}
        for call in self.calls:
            is_fused = Cause.LAUNCH in without and call.is_run  # one graph: nothing is called in between
            if is_fused:
                host += sum(spent for cause, spent in call.saved_ns.items() if cause not in {*_OF_LAUNCHING, *without})
            else:
                host += call.before_ns - sum(call.saved_ns.get(cause, 0) for cause in without)
            if call.stream is None:
                if Cause.SYNC not in without and not (call.is_of_copy and Cause.COPY in without):
                    host = max(host, device) + call.length_ns
                continue
            hidden = (Cause.COPY in without and call.kind is ActivityKind.COPY) or (
                Cause.COMMUNICATION in without and call.kind is ActivityKind.COMMUNICATION
            )
            start = max(host + (0 if is_fused else call.lag_ns), free.get(call.stream, 0))
            end = start + (0 if hidden else call.device_ns)
            free[call.stream] = end
            device = max(device, end)
            if call.is_blocking and not hidden and Cause.SYNC not in without:
                host = max(host, end)
            host += 0 if is_fused else call.length_ns
        return max(host + self.tail_ns, device)


def _work_of(activities: Sequence[Activity]) -> dict[int, tuple[int, int, Activity]]:
    """By launch: when what it launched began and ended, and one of it."""
    work: dict[int, tuple[int, int, Activity]] = {}
    for each in activities:
        if each.launch is None:
            continue
        first, last, one = work.get(each.launch, (each.start_ns, each.end_ns, each))
        work[each.launch] = min(first, each.start_ns), max(last, each.end_ns), one
    return work
