"""From a recording to the diagnosis: which cause matters, and what its remedy would give."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from millstream.insight.aside import find_aside
from millstream.insight.causes import EXPOSED, REMEDY_FREE, Cause
from millstream.insight.findings import DATA, HIGH, MODERATE, RECEIVE_NS, UNSURE, Findings, Row, Severity
from millstream.insight.gaps import Slice, attribute, exposed_ns
from millstream.insight.host import compute_activities, spans_of, unseen_python
from millstream.insight.intervals import intersect, total
from millstream.insight.profiler.looking import without_looking
from millstream.insight.records import (
    HOOKS,
    ActivityKind,
    ProfiledStep,
    Recording,
    Site,
)
from millstream.insight.replay import recoverable_ns

RARE = 1 / 8
"""A cause in fewer of the steps is counted per time of the whole run, and not scaled up from a window that may have
caught one of them by chance."""
WHOLE_RUN = frozenset((Cause.PASS, Cause.IO, Cause.GC, Cause.COMPILE, Cause.ALLOCATOR, Cause.COMMUNICATION))
"""Causes that hooks see in the whole run, whatever window the device's profiler had."""
LEAST_LOOKS_AT_RUN = 50
"""Into a run without steps: then it is judged as a whole."""
LEAST_STEPS = 3
LEAST_LOOKS = 5
"""Into the steps, on a CPU: what takes half of the time is missed by so many once in thirty runs."""
MAX_WARM_UP = 10


def analyse(recording: Recording) -> Findings:
    """Find out why the device idled.

    Args:
        recording: What was seen. Where the host is the device, its activities are derived from samples.
    """
    if recording.is_synchronous:
        recording = replace(recording, activities=compute_activities(recording))
    recording = without_looking(recording)
    steps = steady_steps(recording)
    why = _why_unreliable(recording, steps)
    if not steps:
        rare = tuple(_rare_rows(recording, frozenset(), {}))
        return Findings(
            recording, Severity.UNRELIABLE, None, rare, (), 0.0, 0, {}, {}, (), {}, 0.0, why, recording.notes
        )
    start, end = steps[0].start_ns, steps[-1].end_ns
    slices = attribute(recording, start, end)
    idle_by_cause: dict[Cause, int] = defaultdict(int)
    for each in slices:
        idle_by_cause[each.cause] += each.end_ns - each.start_ns
    exposed = {
        Cause.COPY: exposed_ns(recording.activities, ActivityKind.COPY, start, end),
        Cause.COMMUNICATION: exposed_ns(recording.activities, ActivityKind.COMMUNICATION, start, end),
    }
    causes = [*idle_by_cause, *(cause for cause in EXPOSED if exposed[cause])]
    rare = _rare_causes(recording, steps, slices)
    gains = recoverable_ns(recording, slices, exposed, causes, start, end, apart=rare)
    gains = {cause: round(gain * _saved_share(recording, cause)) for cause, gain in gains.items()}
    rows = _rows(recording, steps, [each for each in slices if each.cause not in rare], gains)
    common = frozenset(row.cause for row in rows)
    rows += _exposed_rows(recording, exposed, gains, end - start)
    rows += _rare_rows(recording, common, _share_that_idles(recording, slices, start, end))
    rows.sort(key=lambda row: (-max(row.recoverable_share, row.share * row.is_rare), -row.idle_ns))
    located = sum(row.idle_ns for row in rows if row.site is not None and not row.is_rare)
    charged = sum(idle_by_cause.values()) - idle_by_cause.get(Cause.UNKNOWN, 0)
    found = Findings(
        recording,
        Severity.HEALTHY,
        None,
        tuple(rows),
        steps,
        (end - start) / len(steps),
        sum(idle_by_cause.values()),
        dict(sorted(idle_by_cause.items(), key=lambda item: -item[1])),
        exposed,
        tuple(slices),
        gains,
        min(located / charged, 1.0) if charged else 1.0,
        why,
        recording.notes,
        *unseen_python(recording, start, end),
        aside=find_aside(recording, steps, slices) if recording.has_steps else None,
    )
    found = _with_bounded_data_gain(found)
    severity, leading = _judge(found)
    return replace(found, severity=severity, leading=leading)


def steady_steps(recording: Recording) -> tuple[ProfiledStep, ...]:
    """The steps after the first few, which allocate, compile and start workers; without any, all of the run."""
    steps = recording.steps
    if not recording.has_steps:
        return steps
    if len(steps) < LEAST_STEPS:
        return ()
    return steps[min(max(len(steps) // 5, 1), MAX_WARM_UP) :]


def _why_unreliable(recording: Recording, steps: Sequence[ProfiledStep]) -> str:
    if not recording.steps:
        return "no step was seen: neither an optimizer stepped nor a DataLoader gave batches"
    if not recording.has_steps and (not recording.is_synchronous or _num_looks(recording, steps) < LEAST_LOOKS_AT_RUN):
        return recording.caveats[0] if recording.caveats else "no step was seen"
    if not steps:
        return f"{len(recording.steps)} steps are too few to tell them from their warm-up"
    if not recording.is_complete:
        return recording.caveats[0] if recording.caveats else "the recording is not complete"
    return _why_too_few_looks(recording, steps) if recording.is_synchronous else _why_launches_do_not_match(recording)


def _num_looks(recording: Recording, steps: Sequence[ProfiledStep]) -> int:
    start, end = steps[0].start_ns, steps[-1].end_ns
    return sum(each.thread == recording.thread and start < each.end_ns <= end for each in recording.samples)


def _why_too_few_looks(recording: Recording, steps: Sequence[ProfiledStep]) -> str:
    """Return whether looks are to tell of more than hooks do, and are too few for that."""
    start, end = steps[0].start_ns, steps[-1].end_ns
    looks = _num_looks(recording, steps)
    hooked = total(intersect([(begin, over) for begin, over, _ in spans_of(recording)], [(start, end)]))
    if looks >= LEAST_LOOKS or 2 * hooked >= end - start:
        return ""
    length = f"{len(steps)} steps in {(end - start) / 1e6:.3g} ms"
    return f"{length} are too short to be looked into ({looks} looks): let it run for a second or more"


def _why_launches_do_not_match(recording: Recording) -> str:
    """Return whether a device's profiler lost records: every launch needs an activity, every graph all its nodes."""
    if not recording.activities:
        return "no kernel was recorded: the device's profiler was not there, or another one had it"
    done = {each.launch for each in recording.activities}
    lost = sum(each.number not in done for each in recording.launches)
    if lost > 0.005 * len(recording.launches):
        return f"{lost} of {len(recording.launches)} launches have no kernel: the device's profiler lost records"
    start_of = {launch.number: launch.start_ns for launch in recording.launches}
    early = sum(each.start_ns < start_of.get(each.launch, 0) - 10_000 for each in recording.activities if each.launch)
    if early > 0.005 * len(recording.activities):
        return f"{early} kernels begin before they are launched: the clocks of host and device do not agree"
    sizes: dict[int, set[int]] = defaultdict(set)
    nodes: dict[tuple[int, int | None], int] = defaultdict(int)
    for each in recording.activities:
        if each.graph is not None and each.launch in start_of:  # launched before the window, it may be cut
            nodes[each.graph, each.launch] += 1
    for (graph, _), number in nodes.items():
        sizes[graph].add(number)
    uneven = [sorted(each) for each in sizes.values() if len(each) > 1]
    if uneven:
        return f"replays of one CUDA graph show {uneven[0][0]} to {uneven[0][-1]} kernels: records were lost"
    return ""


def _rare_causes(recording: Recording, steps: Sequence[ProfiledStep], slices: Sequence[Slice]) -> frozenset[Cause]:
    """Causes that hooks see in the whole run, and that happen in too few of a window's steps to be judged by them."""
    starts = [step.start_ns for step in steps]
    seen: dict[Cause, set[int]] = defaultdict(set)
    for each in slices:
        seen[each.cause].add(bisect.bisect_right(starts, each.start_ns) - 1)
    hooked = WHOLE_RUN & {span.cause for span in recording.spans}
    few = max(RARE * len(steps), 2 if len(steps) > 2 else 1)  # one step may have it by chance
    return frozenset(cause for cause in hooked & seen.keys() if len(seen[cause]) < few)


def _rows(
    recording: Recording, steps: Sequence[ProfiledStep], slices: Sequence[Slice], gains: dict[Cause, int]
) -> list[Row]:
    """Slices of one cause at one line of the user's, put together."""
    window = steps[-1].end_ns - steps[0].start_ns
    idle: dict[tuple[Cause, Site | None], int] = defaultdict(int)
    inside: dict[tuple[Cause, Site | None], dict[Site, int]] = defaultdict(lambda: defaultdict(int))
    seen: dict[tuple[Cause, Site | None], set[int]] = defaultdict(set)
    details: dict[tuple[Cause, Site | None], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    number = 0
    for each in slices:
        key = each.cause, recording.user_site(each.stack)
        idle[key] += each.end_ns - each.start_ns
        while number + 1 < len(steps) and each.start_ns >= steps[number].end_ns:
            number += 1
        seen[key].add(number)
        if key[1] is not None and each.cause is not Cause.COMPILE:  # Dynamo's own code
            innermost = next(site for site in each.stack if HOOKS not in site.file)
            if innermost != key[1]:
                inside[key][innermost] += each.end_ns - each.start_ns
        if each.detail:
            details[key][each.detail] += each.end_ns - each.start_ns
    total_of: dict[Cause, int] = defaultdict(int)
    for (cause, _), spent in idle.items():
        total_of[cause] += spent
    rows = []
    for (cause, site), spent in idle.items():
        gain = gains.get(cause, 0) * spent / total_of[cause] / window if total_of[cause] else 0.0
        where = max(inside[cause, site], key=inside[cause, site].__getitem__, default=None)
        detail = max(details[cause, site], key=details[cause, site].__getitem__, default="")
        rows.append(Row(cause, site, where, len(seen[cause, site]), spent, spent / window, gain, detail=detail))
    return rows


def _exposed_rows(recording: Recording, exposed: dict[Cause, int], gains: dict[Cause, int], window: int) -> list[Row]:
    """Exposed time at the lines that asked for copies and collectives, by the time that those take."""
    kinds = {Cause.COPY: ActivityKind.COPY, Cause.COMMUNICATION: ActivityKind.COMMUNICATION}
    launches = {launch.number: launch for launch in recording.launches}
    rows = []
    for cause, spent in exposed.items():
        took: dict[Site | None, int] = defaultdict(int)
        for each in recording.activities:
            if each.kind is kinds[cause]:
                launch = launches.get(each.launch) if each.launch is not None else None
                took[recording.user_site(launch.stack) if launch is not None else None] += each.end_ns - each.start_ns
        for site, part in took.items():
            share = part / max(sum(took.values()), 1)
            own = round(spent * share)
            if own:
                rows.append(Row(cause, site, None, 0, own, own / window, gains.get(cause, 0) * share / window))
    return rows


def _share_that_idles(recording: Recording, slices: Sequence[Slice], start: int, end: int) -> dict[Cause, float]:
    """In how much of a cause's time within a window the device idled: a checkpoint waits for queued kernels first."""
    lasted: dict[Cause, int] = defaultdict(int)
    for span in recording.spans:
        if span.thread == recording.thread:
            lasted[span.cause] += max(min(span.end_ns, end) - max(span.start_ns, start), 0)
    idle: dict[Cause, int] = defaultdict(int)
    for each in slices:
        idle[each.cause] += each.end_ns - each.start_ns
    return {cause: min(idle[cause] / spent, 1.0) for cause, spent in lasted.items() if spent}


def _saved_share(recording: Recording, cause: Cause) -> float:
    """Return what part of a cause's time its remedy saves, where that is not all of it."""
    spans = [span for span in recording.spans if span.cause is cause and span.thread == recording.thread]
    lasted = sum(span.end_ns - span.start_ns for span in spans)
    return 1 - sum(span.stays_ns for span in spans) / lasted if lasted else 1.0


def _rare_rows(recording: Recording, common: frozenset[Cause], idles: Mapping[Cause, float]) -> list[Row]:
    """Spans that happen too seldom to be judged by the step, per time of the whole run.

    Args:
        recording: What was seen.
        common: Causes that have their rows.
        idles: In how much of a cause's time the device idles, where a window tells; else in all of it.
    """
    begin = recording.steps[0].end_ns if recording.steps else recording.end_ns
    idle: dict[tuple[Cause, Site | None], int] = defaultdict(int)
    times: dict[tuple[Cause, Site | None], set[int]] = defaultdict(set)  # another span within it cuts one into pieces
    whole = recording.end_ns - begin
    for start, end, span in spans_of(recording):
        if not begin <= span.start_ns < recording.end_ns:
            continue
        if span.cause is Cause.PROFILER:
            whole -= end - start
        elif span.cause in WHOLE_RUN - common:
            key = span.cause, recording.user_site(span.stack)
            idle[key] += round((end - start) * idles.get(span.cause, 1.0))
            times[key].add(span.start_ns)
    return [
        Row(
            cause,
            site,
            None,
            len(times[cause, site]),
            spent,
            share,
            share * _saved_share(recording, cause),
            is_rare=True,
        )
        for (cause, site), spent in idle.items()
        for share in [spent / max(whole, 1)]
    ]


def _with_bounded_data_gain(found: Findings) -> Findings:
    """Return what enough workers make is limited by processors, and has to be received: no more is promised."""
    gain = sum(found.recoverable.get(cause, 0) for cause in DATA)
    if not gain or not found.batch_ns or found.is_too_quick_for_workers:
        return found
    is_new = found.loader is not None and not found.loader.num_workers  # and batches will have to be received
    receiving = RECEIVE_NS * found.batches_per_step if is_new else 0.0
    per_step = max(found.free_step_ns + receiving, found.supplied_ns)
    share = min(max(found.step_ns - per_step, 0) * len(found.steps) / gain, 1.0)
    rows = (
        replace(row, recoverable_share=row.recoverable_share * share) if row.cause in DATA else row
        for row in found.rows
    )
    gains = {cause: round(each * share) if cause in DATA else each for cause, each in found.recoverable.items()}
    return replace(found, rows=tuple(rows), recoverable=gains)


def _judge(found: Findings) -> tuple[Severity, Row | None]:
    """The diagnosis, and the row it is about."""
    if found.why_unreliable:
        return Severity.UNRELIABLE, None
    window = found.window_ns
    gain_of = {
        cause: gain / window
        for cause, gain in found.recoverable.items()
        if cause not in REMEDY_FREE and any(row.cause is cause and not row.is_rare for row in found.rows)
    }
    rare_of: dict[Cause, float] = defaultdict(float)
    for row in found.rows:
        if row.is_rare:
            rare_of[row.cause] += row.recoverable_share
    if not any(note.cause is Cause.COMPILE for note in found.notes):
        rare_of.pop(Cause.COMPILE, None)  # compiled once, which is what it takes
    for cause, share in rare_of.items():
        gain_of[cause] = max(gain_of.get(cause, 0.0), share)
    cause = max(gain_of, key=gain_of.__getitem__, default=None)
    gain = gain_of[cause] if cause is not None else 0.0
    unknown = found.idle_by_cause.get(Cause.UNKNOWN, 0) / window
    if unknown > UNSURE and unknown >= gain:
        return Severity.NOT_SURE, None
    if cause is None or gain < MODERATE:
        is_seen = not found.recording.is_synchronous or found.unseen_python < UNSURE
        return (Severity.HEALTHY if is_seen else Severity.NOT_SURE), None
    leading = max((row for row in found.rows if row.cause is cause), key=lambda row: row.idle_ns)
    return (Severity.HIGH if gain >= HIGH else Severity.MODERATE), leading
