"""A virtual device and host with known causes, and an oracle that looks at every nanosecond."""

import bisect
import itertools
from dataclasses import replace

from hypothesis import strategies as st

from millstream.insight import (
    Activity,
    Asleep,
    Cause,
    HostSpan,
    LaunchCall,
    ProfiledStep,
    Recording,
    Sample,
    Site,
    StreamWait,
)
from millstream.insight.records import State
from millstream.trace.agenda import Agenda

THREAD = 7
USER = "/home/user/train.py"
LIBRARY = "/usr/lib/python3/"
SPAN_CAUSES = (Cause.DATA_WAIT, Cause.IN_PROCESS, Cause.SYNC, Cause.ALLOCATOR, Cause.COMPILE, Cause.GC, Cause.IO)


def line(number, file=USER):
    return (Site(file, number, "train"),)


@st.composite
def recordings(draw, end=240):
    """Small recordings of anything: overlapping streams, nested spans, launches with and without their kernels."""

    def interval(most=40):
        start = draw(st.integers(0, end - 1))
        return start, min(start + draw(st.integers(0, most)), end)

    spans = [
        HostSpan(
            draw(st.sampled_from((THREAD, THREAD, 8))), *interval(), draw(st.sampled_from(SPAN_CAUSES)), line(number)
        )
        for number in range(draw(st.integers(0, 6)))
    ]
    looks = sorted(draw(st.sets(st.integers(0, end), max_size=12)))
    samples = [
        Sample(
            THREAD,
            start,
            over,
            line(100 + number) if draw(st.booleans()) else (Site("/x/torch/nn/linear.py", 1, "forward"), *line(100)),
            draw(st.none() | st.integers(0, over - start)),
            draw(st.sampled_from((0, 5_000_000))),
            draw(st.sampled_from((None, True, False))),
            draw(st.integers(0, 2 * (over - start))),
            ((draw(st.integers(0, over - start)), line(900)),) if draw(st.booleans()) else (),
            draw(st.none() | st.integers(0, over - start)),
            draw(st.sampled_from((None, *Asleep))),
        )
        for number, (start, over) in enumerate(itertools.pairwise(looks))
    ]
    activities, launches = [], []
    for number in range(draw(st.integers(0, 8))):
        start, over = interval(12)
        launches.append(LaunchCall(number, draw(st.sampled_from((THREAD, 8))), start, over, stack=line(200 + number)))
        for _ in range(draw(st.integers(0, 2))):
            begin = min(start + draw(st.integers(0, 30)), end)
            graph = draw(st.sampled_from((None, None, 1, 2)))
            stop = min(begin + draw(st.integers(0, 25)), end)
            activities.append(Activity(begin, stop, draw(st.integers(0, 2)), launch=number, graph=graph))
    activities += [Activity(*interval(25), stream=0) for _ in range(draw(st.integers(0, 2)))]
    waits = [StreamWait(draw(st.integers(0, end)), draw(st.integers(0, 2)), 1) for _ in range(draw(st.integers(0, 2)))]
    return Recording(
        device="virtual",
        is_synchronous=False,
        start_ns=0,
        end_ns=end,
        thread=THREAD,
        steps=tuple(ProfiledStep(at, at + 20) for at in range(0, end, 20)),
        spans=tuple(spans),
        samples=tuple(samples),
        activities=tuple(sorted(activities, key=lambda each: each.start_ns)),
        launches=tuple(sorted(launches, key=lambda each: each.start_ns)),
        waits=tuple(waits),
        library_roots=(LIBRARY,),
    )


def is_busy(recording, at):
    return any(each.start_ns <= at < each.end_ns for each in recording.activities)


def span_at(recording, at, *, as_it_is=False):
    """The training thread's innermost span: began last, then ends first, then comes first.

    Unless ``as_it_is``, a collection that lies within compilations is theirs.
    """
    compiling = {
        now
        for span in recording.spans
        if span.thread == THREAD and span.cause is Cause.COMPILE
        for now in range(span.start_ns, span.end_ns)
    }
    here = [
        (-span.start_ns, span.end_ns, number)
        for number, span in enumerate(recording.spans)
        if span.thread == THREAD
        and span.start_ns <= at < span.end_ns
        and (as_it_is or span.cause is not Cause.GC or not compiling.issuperset(range(span.start_ns, span.end_ns)))
    ]
    return recording.spans[min(here)[2]] if here else None


def part_at(recording, at):
    """Of an idle moment: host, launch or device part, and the launch that ends the gap."""
    after = [each.start_ns for each in recording.activities if each.start_ns > at and each.start_ns < each.end_ns]
    if not after:
        return "host", None
    # At one moment several may begin: the one that runs longest ends the gap.
    ender = min((each for each in recording.activities if each.start_ns == min(after)), key=lambda each: -each.end_ns)
    launch = next((each for each in recording.launches if each.number == ender.launch), None)
    if launch is None or at < launch.start_ns:
        return "host", launch
    return ("launch" if at < launch.end_ns else "device"), launch


def with_stall(recording, span):
    """The same run with something that holds up host and device: all that begins later comes later by as much."""
    length = span.end_ns - span.start_ns

    def late(at):
        return at + length if at >= span.start_ns else at

    def moved(each):
        return replace(each, start_ns=late(each.start_ns), end_ns=late(each.start_ns) + each.end_ns - each.start_ns)

    return replace(
        recording,
        end_ns=recording.end_ns + length,
        steps=tuple(ProfiledStep(late(step.start_ns), late(step.end_ns)) for step in recording.steps),
        spans=(*map(moved, recording.spans), span),
        samples=tuple(map(moved, recording.samples)),
        activities=tuple(map(moved, recording.activities)),
        launches=tuple(map(moved, recording.launches)),
    )


def serial_recording(host, kernels, *, steps, **facts):
    """A virtual run: for each step, host segments in turn, then kernels that the host launches one after another.

    Args:
        host: Segments of a step: cause or ``None`` for launching, its length, and its line.
        kernels: Length of each kernel that a segment of ``None`` launches, in order.
        steps: How many.

    The device runs one kernel after another, each when it is launched and the one before is over.
    """
    now = device = number = 0
    spans, samples, activities, launches, marks = [], [], [], [], [0]
    for _ in range(steps):
        lengths = iter(kernels)
        for cause, length, place in host:
            start = now
            if cause is None:
                now += length
                launches.append(LaunchCall(number, THREAD, start, now, stack=line(place)))
                begin = max(device, now)
                device = begin + next(lengths)
                activities.append(Activity(begin, device, launch=number))
                number += 1
                continue
            if cause is Cause.SYNC:
                now = max(now, device) + length
            else:
                now += length
            if cause is Cause.PYTHON:
                samples.append(Sample(THREAD, start, now, line(place), now - start, 0, True))
            else:
                spans.append(HostSpan(THREAD, start, now, cause, line(place)))
        marks.append(now)
    return Recording(
        device="virtual",
        is_synchronous=False,
        start_ns=0,
        end_ns=max(now, device),
        thread=THREAD,
        steps=tuple(ProfiledStep(a, b) for a, b in itertools.pairwise(marks)),
        spans=tuple(spans),
        samples=tuple(samples),
        activities=tuple(activities),
        launches=tuple(launches),
        library_roots=(LIBRARY,),
        **facts,
    )


@st.composite
def short_loops(draw):
    """A loop of a few pieces, most shorter than the time between two looks: state, length in µs, line."""
    short = st.tuples(st.sampled_from((State.COMPUTE, State.WAITING, State.DESCHEDULED)), st.integers(40, 2000))
    kept = st.tuples(st.just(State.DESCHEDULED), st.integers(4000, 12_000))
    pieces = draw(st.lists(short | kept, min_size=1, max_size=6))
    return [(state, length, 10 + number) for number, (state, length) in enumerate(pieces)]


def looked_at(loop, dice, *, num_looks, mean_us, spins):
    """A thread that goes through a loop on the CPU, and is looked at now and then.

    Args:
        loop: Pieces as ``short_loops`` gives them.
        dice: When.
        num_looks: How often.
        mean_us: Time between two looks, on average.
        spins: Another thread of the process, which is not Python's, runs all the time.

    Returns:
        The recording, and by state and line the nanoseconds of it, which an oracle has counted piece by piece.
    """
    length = sum(each[1] for each in loop)
    edges = [0, *itertools.accumulate(each[1] for each in loop)]

    def spent(until):
        """By piece: microseconds of it since the begin."""
        rounds, rest = divmod(until, length)
        return [rounds * each[1] + min(max(rest - start, 0), each[1]) for start, each in zip(edges, loop, strict=False)]

    samples, latest, counted = [], 0, 0
    for _ in range(num_looks):
        now = latest + dice.randint(mean_us // 2, mean_us * 3 // 2)
        state, _, number = loop[bisect.bisect_right(edges, now % length) - 1]
        took = [b - a for a, b in zip(spent(latest), spent(now), strict=True)]
        ran = 1000 * sum(part for part, each in zip(took, loop, strict=True) if each[0] is State.COMPUTE)
        # The system counts time of being ready when it is over.
        since = now - now % length + max(edge for edge in edges if edge <= now % length)
        until = spent(since if state is State.DESCHEDULED else now)
        before, counted = counted, sum(p for p, each in zip(until, loop, strict=True) if each[0] is State.DESCHEDULED)
        ready = 1000 * (counted - before)
        stack = (Site("/x/torch/nn/linear.py", 1, "forward"), *line(number)) if state is State.COMPUTE else line(number)
        process = ran + 1000 * (now - latest) * spins
        asleep = Asleep.CALL if state is State.WAITING else Asleep.AWAKE
        samples.append(Sample(THREAD, 1000 * latest, 1000 * now, stack, ran, 0, None, process, (), ready, asleep))
        latest = now
    truth = {(each[0], each[2]): 1000 * part for each, part in zip(loop, spent(latest), strict=True)}
    steps = tuple(ProfiledStep(1000 * at, 1000 * (at + length)) for at in range(0, latest - length, length))
    return Recording(end_ns=1000 * latest, thread=THREAD, steps=steps, samples=tuple(samples)), truth


def interrupted(python, compute, dice, *, num_looks, interval_us=4000, look_us=50):
    """A loop of Python and then an operator, of so many µs: a look that is planned in Python comes when it is over."""
    length, samples, latest = python + compute, [], 0
    stack = (Site("/x/torch/nn/linear.py", 1, "forward"), *line(8))
    agenda = Agenda(0, 1000 * interval_us, dice)
    for _ in range(num_looks):
        agenda.skip_to(1000 * (latest + look_us))
        due = agenda.due_ns // 1000
        now = due + max(python - due % length, 0)
        held, ran = agenda.take(1000 * now), 1000 * (now - latest)
        samples.append(
            Sample(THREAD, 1000 * latest, 1000 * now, stack, ran, held[0], None, ran, (), 0, Asleep.AWAKE, held)
        )
        latest = now
    steps = tuple(ProfiledStep(1000 * at, 1000 * (at + length)) for at in range(0, latest - length, length))
    roots = ("/x/torch/",)
    return Recording(end_ns=1000 * latest, thread=THREAD, steps=steps, samples=tuple(samples), library_roots=roots)
