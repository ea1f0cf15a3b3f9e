"""Activities of the training thread at any time: spans where a hook saw them, samples elsewhere.

A sample speaks for the time since the look before. Of that time the thread ran ``cpu_ns``, was ready for ``ready_ns``,
and slept for the rest: how much of each is exact, however short the waits are. At what line it ran or slept, and for
what, is known at the moment of the look only: where steps are shorter than the time between two looks, a thread that is
seen asleep has run elsewhere, and one that is seen awake has slept elsewhere. So what a look does not show is charged
to the nearest look that does, and over many looks each line gets its share.

Whether a thread ran Python or an operator is told from what Python does anyway: an operator gives the interpreter away,
so that the sampler gets it at once; Python code has to be interrupted, which takes ``switch_ns`` and leaves the thread
between two instructions.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from millstream.insight.causes import Cause
from millstream.insight.intervals import Interval, complement, flatten, total, union
from millstream.insight.records import Activity, Asleep, HostSpan, Recording, Sample, Site, Stack, State

_LATE = 0.8  # of the switch interval: the sampler had to have the interpreter taken away from somebody
_RUNS = 0.5  # of a time: whoever ran so much of it was running
_HOLDS = 0.2  # of the time that a thread was kept: another one that ran so much of it held the interpreter
_FAR_NS = 1_000_000_000  # time that no look speaks for within so long is unknown
_LONG_NS = 10_000_000  # time that at least two looks speak for
_LAUNCHES_WITHIN_NS = 1_000_000  # operators that are called one after another: each launches something
_WORTH = 0.1  # of a sample's time: less than that is noise of two clocks
_HELD_NS = 200_000  # what is shorter lies between any two operators
_IO_FILES = (
    "torch/serialization.py",
    "/pickle.py",
    "/zipfile.py",
    "/zipfile/",
    "/logging/",
    "/tensorboard/",
    "/wandb/",
)
_TORCH = ("/torch/",)
_WAITS_FOR_OTHERS = ("/threading.py", "/queue.py", "/selectors.py", "/multiprocessing/", "/subprocess.py", "/socket.py")

_CAUSE_OF = {
    State.COMPUTE: Cause.LAUNCH,  # where the device is another: calling operators, which launch
    State.PYTHON: Cause.PYTHON,
    State.WAITING: Cause.WAITING,
    State.GIL: Cause.GIL,
    State.DESCHEDULED: Cause.DESCHEDULED,
    State.IO: Cause.IO,
    State.UNKNOWN: Cause.UNKNOWN,
}
_UNSEEN = "no look saw what it waited for"
_UNTOLD = "it waited for a lock while threads of operators ran: that may be one's own lock, or theirs"


@dataclass(frozen=True, slots=True)
class Doing:
    """A stretch of the training thread's time in one state.

    Attributes:
        start_ns: Begin.
        end_ns: End.
        state: What it did.
        stack: Where.
        detail: For ``GIL``, the other thread's place in words.
    """

    start_ns: int
    end_ns: int
    state: State
    stack: Stack
    detail: str = ""


def split_sample(sample: Sample, free: Sequence[Interval], recording: Recording) -> Iterator[Doing]:
    """Say what a thread did in the time that one sample speaks for, where nothing tells whether it slept at the look.

    Args:
        sample: The look.
        free: The parts of the time since the look before in which no hook saw the thread; they are covered exactly.
        recording: Which it is of.
    """
    length = total(free)
    running = _running_state(sample, recording.switch_ns)
    ran_ns = _ran_ns(sample, length)
    kept, detail = _kept_state(sample, length - ran_ns, running, recording) if ran_ns < length else (running, "")
    return _lay_out(free, [(ran_ns, running, sample.stack, ""), (length - ran_ns, kept, sample.stack, detail)])


Part = tuple[int, State, Stack, str]
"""Nanoseconds, and what a thread did in them."""


def _lay_out(free: Sequence[Interval], parts: Iterable[Part]) -> Iterator[Doing]:
    """Put parts one after another into intervals, which they cover exactly."""
    pending = [part for part in parts if part[0]]
    for start, end in free:
        while start < end:
            left, state, stack, detail = pending[0]
            until = min(start + left, end)
            yield Doing(start, until, state, stack, detail)
            if until - start == left:
                pending.pop(0)
            else:
                pending[0] = left - (until - start), state, stack, detail
            start = until


def _ran_ns(sample: Sample, length: int) -> int:
    ran_ns = length if sample.cpu_ns is None else min(max(sample.cpu_ns, 0), length)
    return length if length - ran_ns < _WORTH * length else ran_ns


class _Evidence:
    """The looks that saw a thread awake, and those that saw it asleep: the nearest one tells what another does not.

    A thread that waits for the interpreter while no other thread of Python's runs waits for the sampler's own look.

    Args:
        samples: Of the training thread, outside of hooks' spans, in order.
        recording: Which they are of.
    """

    def __init__(self, samples: Sequence[Sample], recording: Recording) -> None:
        self._recording = recording
        self._awake = [each for each in samples if each.asleep in (Asleep.AWAKE, Asleep.INTERPRETER)]
        self._asleep = [each for each in samples if self.is_asleep(each)]

    def is_asleep(self, look: Sample) -> bool:
        """Return whether a thread slept when it was looked at, and not because of that."""
        return look.asleep in (Asleep.LOCK, Asleep.CALL) or (
            look.asleep is Asleep.INTERPRETER and _holder(look, _slept_ns(look), self._recording) is not None
        )

    def split(self, sample: Sample, free: Sequence[Interval]) -> Iterator[Doing]:
        """Return what a thread did in the time that one sample speaks for."""
        length = total(free)
        ran_ns = _ran_ns(sample, length)
        ready_ns = min(max(sample.ready_ns or 0, 0), length - ran_ns)
        slept_ns = length - ran_ns - ready_ns
        if ready_ns and slept_ns < _WORTH * length:
            ready_ns, slept_ns = length - ran_ns, 0
        elif ready_ns < _WORTH * length:
            ready_ns, slept_ns = 0, length - ran_ns
        awake = _nearest(self._awake, sample) or sample
        running = _running_state(awake, self._recording.switch_ns)
        parts = [
            (ran_ns, running, awake.stack, ""),
            (ready_ns, State.DESCHEDULED, awake.stack, str(State.PYTHON) if running is State.PYTHON else ""),
            (slept_ns, *self.sleep(sample)),
        ]
        # At its end it did what the look saw.
        return _lay_out(free, parts if self.is_asleep(sample) else parts[::-1])

    def sleep(self, sample: Sample) -> tuple[State, Stack, str]:
        """Return what a thread slept for in the time of a sample."""
        look = _nearest(self._asleep, sample)
        if look is None:
            return State.UNKNOWN, sample.stack, _UNSEEN
        state, detail = _sleeping_state(look, self._recording)
        return state, look.stack, detail


def _nearest(looks: Sequence[Sample], sample: Sample) -> Sample | None:
    """The look that was made closest to a sample's, which may be its own; ``None`` if it is far away."""
    at = bisect.bisect_left(looks, sample.end_ns, key=lambda each: each.end_ns)
    near = min(looks[max(at - 1, 0) : at + 1], key=lambda each: abs(each.end_ns - sample.end_ns), default=None)
    return near if near is not None and abs(near.end_ns - sample.end_ns) <= _FAR_NS else None


def _slept_ns(look: Sample) -> int:
    length = look.end_ns - look.start_ns
    return length - _ran_ns(look, length)


def _sleeping_state(look: Sample, recording: Recording) -> tuple[State, str]:
    """Return what a thread slept for when it was looked at."""
    innermost = look.stack[0].file if look.stack else ""
    if _running_state(look, recording.switch_ns) is State.IO:
        return State.IO, ""
    if look.asleep is Asleep.INTERPRETER:
        return State.GIL, _holder(look, _slept_ns(look), recording) or ""
    if look.asleep is Asleep.CALL or any(part in innermost for part in _WAITS_FOR_OTHERS):
        return State.WAITING, ""
    native_ns = (look.process_ns or 0) - (look.cpu_ns or 0) - sum(ran for ran, _ in look.others)
    if native_ns < _RUNS * _slept_ns(look):
        return State.WAITING, ""
    # An operator's own threads compute, and this one waits for them; or they spin, and the lock is the user's own.
    return (State.COMPUTE, "") if recording.is_library(innermost) else (State.UNKNOWN, _UNTOLD)


def _holder(sample: Sample, kept_ns: int, recording: Recording) -> str | None:
    """Return where another Python thread was that held the interpreter; ``None`` where none did."""
    busiest = max(sample.others, key=lambda other: other[0], default=None)
    was_taken = _was_interrupted(sample, recording.switch_ns) or sample.late_ns >= _LATE * recording.switch_ns
    was_taken |= sample.asleep is Asleep.INTERPRETER
    if busiest is None or busiest[0] < _HOLDS * kept_ns or not was_taken:
        return None
    where = recording.user_site(busiest[1])
    return f"{where.file}:{where.line}" if where else ""


def _running_state(sample: Sample, switch_ns: int) -> State:
    innermost = sample.stack[0].file if sample.stack else ""
    if any(part in site.file for site in sample.stack[:12] for part in _IO_FILES):
        return State.IO
    was_interrupted = _was_interrupted(sample, switch_ns)
    # Python within torch is part of an operator's cost, and no code that the user could write otherwise.
    return State.PYTHON if was_interrupted and not any(part in innermost for part in _TORCH) else State.COMPUTE


def _was_interrupted(sample: Sample, switch_ns: int) -> bool:
    """Return whether somebody had to have the interpreter taken away for the sampler to get it."""
    return sample.late_ns >= _LATE * switch_ns if sample.in_bytecode is None else sample.in_bytecode


def _kept_state(sample: Sample, kept_ns: int, running: State, recording: Recording) -> tuple[State, str]:
    """Return what kept a thread from running for ``kept_ns``."""
    length = sample.end_ns - sample.start_ns
    innermost = sample.stack[0].file if sample.stack else ""
    if running is State.IO:
        return State.IO, ""
    waits = any(part in innermost for part in _WAITS_FOR_OTHERS)
    other = None if waits else _holder(sample, kept_ns, recording)
    if other is not None:
        return State.GIL, other
    if waits:
        return State.WAITING, ""
    if sample.ready_ns is not None and sample.ready_ns >= _RUNS * kept_ns:
        return State.DESCHEDULED, str(State.PYTHON) if running is State.PYTHON else ""
    native_ns = (sample.process_ns or 0) - (sample.cpu_ns or 0) - sum(other[0] for other in sample.others)
    if native_ns >= _RUNS * length:
        return State.COMPUTE, ""  # an operator's own threads compute, and this one waits for them
    # Between two instructions a thread does not wait: it had no processor, which the system did not say.
    return (running if _was_interrupted(sample, recording.switch_ns) else State.WAITING), ""


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
            if is_outside and sample.held_ns[0] >= _HELD_NS and not _others_held(sample):
                held.append(planned)
            continue
        looks.append((sample, free, [each for each in pending if sample.end_ns - each[1] <= _FAR_NS]))
        pending.clear()
    if looks:  # what comes after the last look is as that was
        sample, free, near = looks[-1]
        over = complement(seen, latest, max(recording.end_ns, latest))
        looks[-1] = sample, free, near + [each for each in pending + over if each[1] - sample.end_ns <= _FAR_NS]
    evidence = _Evidence([sample for sample, _, _ in looks], recording)
    found: list[Doing] = []
    for sample, free, near in looks:
        if evidence.is_asleep(sample):
            state, stack, detail = evidence.sleep(sample)
        else:
            state, stack, detail = _running_state(sample, recording.switch_ns), sample.stack, ""
        found += (Doing(start, end, state, stack, detail) for start, end in near if end <= sample.end_ns)
        found += split_sample(sample, free, recording) if sample.asleep is None else evidence.split(sample, free)
        found += (Doing(start, end, state, stack, detail) for start, end in near if end > sample.end_ns)
    known = union([*seen, *((each.start_ns, each.end_ns) for each in found)])
    for start, end in complement(known, recording.start_ns, latest) if held else ():
        near = bisect.bisect_left(held, start - _FAR_NS)
        if near < len(held) and held[near] <= end + _FAR_NS:
            found.append(Doing(start, end, State.COMPUTE, ()))
    found.sort(key=lambda each: each.start_ns)
    return list(_with_late_launches(found, recording))


def _others_held(look: Sample) -> bool:
    """Return whether other threads of Python's ran enough to have held the interpreter."""
    return sum(ran for ran, _ in look.others) >= _HOLDS * (look.end_ns - look.start_ns)


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
        if not each.in_bytecode
        and not _others_held(each)
        and _running_state(each, recording.switch_ns) is State.COMPUTE
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
        elif key in latest and abs(latest[key][0] - start) <= _FAR_NS:
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
