"""Activities of the training thread at any time: spans where a hook saw them, samples elsewhere.

A sample speaks for the time since the look before. Of that time the thread ran ``cpu_ns``, was ready for ``ready_ns``,
and slept for the rest: how much of each is exact, however short the waits are. At what line it ran or slept, and for
what, is known at the moment of the look only: where steps are shorter than the time between two looks, a thread that is
seen asleep has run elsewhere, and one that is seen awake has slept elsewhere. So what a look does not show is charged
to the nearest look that does, and over many looks each line gets its share.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from millstream.insight.causes import Cause
from millstream.insight.intervals import Interval, complement, flatten, union
from millstream.insight.looks import FAR_NS, Doing, Evidence, others_held, running_state, split_sample
from millstream.insight.records import Activity, HostSpan, Recording, Sample, Site, Stack, State

_LONG_NS = 10_000_000  # time that at least two looks speak for
_LAUNCHES_WITHIN_NS = 1_000_000  # operators that are called one after another: each launches something
_HELD_NS = 200_000  # what is shorter lies between any two operators

_CAUSE_OF = {
    State.COMPUTE: Cause.LAUNCH,  # where the device is another: calling operators, which launch
    State.PYTHON: Cause.PYTHON,
    State.WAITING: Cause.WAITING,
    State.GIL: Cause.GIL,
    State.DESCHEDULED: Cause.DESCHEDULED,
    State.IO: Cause.IO,
    State.UNKNOWN: Cause.UNKNOWN,
}


def doings(recording: Recording) -> list[Doing]:
    """Return what samples say of the training thread where no hook saw it, in order; they never overlap.

    A look into a hook's span says nothing of the time before that. Such time goes to the next look outside of one, as
    in any statistic of samples, unless that is far away; and what comes after the last look goes to that. Where
    operators are so short that the interpreter is hard to get between them, looks come too late, within a span: that
    they were held tells that the thread ran, though not where.
    """
    seen = union((start, end) for start, end, _ in spans_of(recording))
    starts = [start for start, _ in seen]
    looks: list[tuple[Sample, list[Interval], list[Interval]]] = []
    pending: list[Interval] = []
    held: list[int] = []
    latest = recording.start_ns
    mine = [sample for sample in recording.samples if sample.thread == recording.thread]
    for sample in _with_early_readiness(mine):
        if sample.start_ns < latest or sample.start_ns >= sample.end_ns:
            continue
        latest = sample.end_ns
        first = max(bisect.bisect_right(starts, sample.start_ns) - 1, 0)
        over = bisect.bisect_left(starts, sample.end_ns)
        free = complement(seen[first:over], sample.start_ns, sample.end_ns)
        if over and seen[over - 1][1] >= sample.end_ns:  # the thread was inside a span when it was looked at
            pending += free
            planned = sample.end_ns - sample.held_ns[0]
            at = bisect.bisect_right(starts, planned) - 1
            is_outside = at < 0 or planned >= seen[at][1]
            if is_outside and sample.held_ns[0] >= _HELD_NS and not others_held(sample):
                held.append(planned)
            continue
        looks.append((sample, free, [each for each in pending if sample.end_ns - each[1] <= FAR_NS]))
        pending.clear()
    if looks:  # what comes after the last look is as that was
        sample, free, near = looks[-1]
        over = complement(seen, latest, max(recording.end_ns, latest))
        looks[-1] = sample, free, near + [each for each in pending + over if each[1] - sample.end_ns <= FAR_NS]
    evidence = Evidence([sample for sample, _, _ in looks], recording)
    found: list[Doing] = []
    for sample, free, near in looks:
        if evidence.is_asleep(sample):
            state, stack, detail = evidence.sleep(sample)
        else:
            state, stack, detail = running_state(sample, recording.switch_ns), sample.stack, ""
        found += (Doing(start, end, state, stack, detail) for start, end in near if end <= sample.end_ns)
        found += split_sample(sample, free, recording) if sample.asleep is None else evidence.split(sample, free)
        found += (Doing(start, end, state, stack, detail) for start, end in near if end > sample.end_ns)
    known = union([*seen, *((each.start_ns, each.end_ns) for each in found)])
    for start, end in complement(known, recording.start_ns, latest) if held else ():
        near = bisect.bisect_left(held, start - FAR_NS)
        if near < len(held) and held[near] <= end + FAR_NS:
            found.append(Doing(start, end, State.COMPUTE, ()))
    found.sort(key=lambda each: each.start_ns)
    return list(_with_late_launches(found, recording))


def _with_early_readiness(samples: Sequence[Sample]) -> list[Sample]:
    """Samples whose time of being ready stands where it was: the system counts it once the thread runs again."""
    found, carried_ns, begin = [], 0, None
    for sample in reversed(samples):
        if sample.asleep is not None and sample.ready_ns is not None and sample.cpu_ns is not None:
            ready_ns = sample.ready_ns + (carried_ns if begin == sample.end_ns else 0)
            room_ns = max(sample.end_ns - sample.start_ns - sample.cpu_ns, 0)
            carried_ns, begin = max(ready_ns - room_ns, 0), sample.start_ns
            sample = replace(sample, ready_ns=ready_ns - carried_ns)
        found.append(sample)
    return found[::-1]


def _with_late_launches(found: Sequence[Doing], recording: Recording) -> Iterator[Doing]:
    """A look into an operator speaks from the first launch on: before that the thread was where it was seen last."""
    starts = sorted(launch.start_ns for launch in recording.launches)
    before: Doing | None = None
    for each in found:
        at = bisect.bisect_left(starts, each.start_ns)
        if (
            each.state is State.COMPUTE
            and before is not None
            and before.state is not State.COMPUTE
            and before.end_ns == each.start_ns
            and at < len(starts)
            and each.start_ns + _LAUNCHES_WITHIN_NS <= starts[at] <= each.end_ns + _LAUNCHES_WITHIN_NS
        ):
            until = min(starts[at], each.end_ns)
            before = replace(before, start_ns=each.start_ns, end_ns=until)
            yield before
            if until == each.end_ns:
                continue
            each = replace(each, start_ns=until)
        yield each
        before = each


def spans_of(recording: Recording) -> list[tuple[int, int, HostSpan]]:
    """The training thread's spans, cut into pieces of the innermost.

    A collection during a compilation is the compilation's, which made the garbage; whatever happens while the profiler
    starts or stops is the profiler's.
    """
    spans = [span for span in recording.spans if span.thread == recording.thread]
    compiling = _Within(span for span in spans if span.cause is Cause.COMPILE)
    profiling = _Within(span for span in spans if span.cause is Cause.PROFILER)
    return flatten(
        [
            span
            for span in spans
            if not (span.cause is Cause.GC and span in compiling)
            and not (span.cause is not Cause.PROFILER and span in profiling)
        ]
    )


class _Within:
    """Whether a span lies within others."""

    def __init__(self, spans: Iterable[HostSpan]) -> None:
        self._intervals = union((span.start_ns, span.end_ns) for span in spans)

    def __contains__(self, span: HostSpan) -> bool:
        at = bisect.bisect_right(self._intervals, span.start_ns, key=lambda interval: interval[0]) - 1
        return at >= 0 and span.end_ns <= self._intervals[at][1]


def unseen_python(recording: Recording, start_ns: int, end_ns: int) -> tuple[float, Site | None]:
    """In what part of a window Python code ran in pieces too short to be interrupted, which count as operators.

    The other result is the user's line of the operators that came next most often: the code is before or in it.

    A look that comes late because the interpreter was held, and finds the thread in an operator, was planned while
    Python code ran, or another library's that keeps the interpreter; so were all that were planned until it was made.
    Looks are planned at any time, whatever the program does, so the share of these is that of the time: of ``n`` of
    them, within a standard deviation of ``sqrt(share * (1 - share) / n)`` or less.
    """
    seen = _Within([span for _, _, span in spans_of(recording)])
    looks = [each for each in recording.samples if each.thread == recording.thread and start_ns <= each.end_ns < end_ns]
    late = Counter(
        recording.user_site(each.stack)
        for each in looks
        if not each.in_bytecode and not others_held(each) and running_state(each, recording.switch_ns) is State.COMPUTE
        for held_ns in each.held_ns
        if held_ns >= _HELD_NS
        and HostSpan(each.thread, each.end_ns - held_ns, each.end_ns - held_ns, Cause.PYTHON) not in seen
    )
    share = late.total() / max(sum(len(each.held_ns) for each in looks), 1)
    return share, late.most_common(1)[0][0] if late else None


def compute_activities(recording: Recording) -> tuple[Activity, ...]:
    """Return where the host is the device: when its operators ran, outside of what hooks saw it do otherwise."""
    computing = union((each.start_ns, each.end_ns) for each in doings(recording) if each.state is State.COMPUTE)
    return tuple(Activity(start, end, name="operators") for start, end in computing)


def host_pieces(recording: Recording, refills: Sequence[HostSpan]) -> list[tuple[int, int, HostSpan]]:
    """Return what the training thread did, cut into disjoint pieces.

    Spans first, then refills of the queue, then samples.

    A refill is what launching takes: long computations in Python after a wait, which two looks or more have seen, are
    none.

    Args:
        recording: What was seen.
        refills: After a wait for the device: until its queue is filled again.
    """
    latest, over = recording.start_ns, recording.end_ns
    known = list(_locate(spans_of(recording), recording))
    seen = doings(recording)
    sampled = _sampled(seen, recording.thread)
    for layer in (list(_within(sampled, _long_stretches(seen))), flatten(refills), sampled):
        free = complement([(start, end) for start, end, _ in known], latest, over)
        known = sorted([*known, *_within(layer, free)], key=lambda piece: piece[0])
    return known


def with_located_waits(recording: Recording) -> Recording:
    """The recording with lines for waits that have none, as far as samples tell."""
    stacks = {end: span.stack for _, end, span in _locate(spans_of(recording), recording) if span.cause is Cause.SYNC}
    spans = (
        replace(span, stack=stacks.get(span.end_ns, span.stack))
        if span.cause is Cause.SYNC and not recording.knows_line(span.stack)
        else span
        for span in recording.spans
    )
    return replace(recording, spans=tuple(spans))


def _locate(exact: Sequence[tuple[int, int, HostSpan]], recording: Recording) -> Iterator[tuple[int, int, HostSpan]]:
    """Say where within a loader's span, or one of the driver's, the thread was, as far as samples tell.

    Only a look that was made while the span lasted tells: the next one, after its end, already sees the step. Pieces
    too short to be looked into get the line of the next look into one of the same kind, or else of the last.
    """
    looks = [(each.end_ns, each.stack) for each in recording.samples if each.thread == recording.thread]
    times = [at for at, _ in looks]
    found: list[tuple[int, int, HostSpan, Stack]] = []
    for start, end, span in exact:
        if recording.knows_line(span.stack) and span.cause is not Cause.IN_PROCESS:
            found.append((start, end, span, span.stack))
            continue
        first, over = bisect.bisect_left(times, start), bisect.bisect_right(times, end)
        within = [(at, stack) for at, stack in looks[first:over] if _is_below(stack, span.stack)]
        latest = start
        for at, stack in within:
            if latest < at:
                found.append((latest, at, span, stack))
            latest = at
        if latest < end:
            found.append((latest, end, span, within[-1][1] if within else ()))
    for forwards in (False, True):
        found = _with_stacks_of_neighbours(found, forwards=forwards)
    for start, end, span, stack in found:
        yield start, end, replace(span, stack=stack) if stack and stack is not span.stack else span


def _with_stacks_of_neighbours(
    pieces: Sequence[tuple[int, int, HostSpan, Stack]], *, forwards: bool
) -> list[tuple[int, int, HostSpan, Stack]]:
    """Pieces without a stack get that of the one before, or after, that is of the same kind and not far away."""
    latest: dict[tuple[Cause, str, Stack], tuple[int, Stack]] = {}
    found = []
    for start, end, span, stack in pieces if forwards else reversed(pieces):
        key = span.cause, span.detail, span.stack
        if stack:
            latest[key] = start, stack
        elif key in latest and abs(latest[key][0] - start) <= FAR_NS:
            stack = latest[key][1]
        found.append((start, end, span, stack))
    return found if forwards else found[::-1]


def _is_below(stack: Stack, caller: Stack) -> bool:
    """Whether a look saw the thread in what a caller's innermost line called, and not in that caller's next lines."""
    return bool(stack) and (not caller or caller[0] in stack[1:])


def _sampled(seen: Sequence[Doing], thread: int) -> list[tuple[int, int, HostSpan]]:
    found = []
    for each in seen:
        cause = _CAUSE_OF[each.state]
        if cause is Cause.PYTHON and any("torch_dynamo_resume_in" in site.function for site in each.stack[:1]):
            cause = Cause.GRAPH_BREAK
        span = HostSpan(thread, each.start_ns, each.end_ns, cause, each.stack, each.detail)
        found.append((each.start_ns, each.end_ns, span))
    return found


def _long_stretches(seen: Sequence[Doing]) -> list[Interval]:
    """Return where a thread was seen again and again outside of operators: it launched nothing."""
    busy = union((each.start_ns, each.end_ns) for each in seen if each.state is not State.COMPUTE)
    return [(start, end) for start, end in busy if end - start >= _LONG_NS]


def _within(
    pieces: Sequence[tuple[int, int, HostSpan]], free: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, HostSpan]]:
    """The parts of pieces that lie in free intervals; both are disjoint and in order."""
    i = k = 0
    while i < len(pieces) and k < len(free):
        start, end = max(pieces[i][0], free[k][0]), min(pieces[i][1], free[k][1])
        if start < end:
            yield start, end, pieces[i][2]
        if pieces[i][1] < free[k][1]:
            i += 1
        else:
            k += 1
