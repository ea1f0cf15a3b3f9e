"""Find which kernels of a plan the device ran in one replay of its graph, and why nothing ran in between."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from millstream.graph import Kernel, Launch, Plan, Span, Timeline
from millstream.insight.records import Activity, ActivityKind

_GENERATED = "triton_"
_PREPARING = ("nchwtonhwc", "converttensor", "init_device_workspace", "scal_kernel", "memset", "memcpy")
_FINISHING = ("nhwctonchw", "splitkreduce", "split_k_kernel", "epilogue", "reduce_kernel", "finalize")
"""Parts of names of what libraries launch beside the kernel that is asked for."""


def timeline_of_replay(plan: Plan, activities: Sequence[Activity]) -> Timeline:
    """Return what one replay was, on the clock of its begin.

    Generated kernels are known by their names. On one stream, what ran between two of them was launched by the
    operators between them; on several, an operator is known only where the numbers leave no doubt. What cannot be
    determined has no kernel.

    Args:
        plan: What was captured.
        activities: Of one replay.
    """
    ran = sorted(activities, key=lambda each: (each.start_ns, each.end_ns))
    if not ran:
        return Timeline((), plan.num_streams, 0)
    kernels = [plan.graph.kernels[step.kernel] for step in plan.steps if isinstance(step, Launch)]
    match = _match_in_order if plan.num_streams == 1 else _match_by_name
    found = match(kernels, ran)
    start = ran[0].start_ns
    numbers = {stream: number for number, stream in enumerate(dict.fromkeys(each.stream for each in ran))}
    spans = tuple(
        Span(each.name, numbers[each.stream], each.start_ns - start, each.end_ns - start, kernel)
        for each, kernel in zip(ran, found, strict=True)
    )
    return Timeline(spans, max(len(numbers), 1), max(span.end_ns for span in spans))


def is_of(activity: Activity, kernel: Kernel) -> bool:
    """Return whether a name on the device is that of a generated kernel."""
    return kernel.name.startswith(_GENERATED) and activity.name.startswith(kernel.name)


def _match_in_order(kernels: Sequence[Kernel], ran: Sequence[Activity]) -> list[int | None]:
    found: list[int | None] = [None] * len(ran)
    pending: list[Kernel] = []  # operators whose activities lie between the last generated kernel and the next
    first = 0
    for kernel in kernels:
        if not kernel.name.startswith(_GENERATED):
            pending.append(kernel)
            continue
        at = next((i for i in range(first, len(ran)) if is_of(ran[i], kernel)), None)
        if at is None:
            continue
        _share_out(pending, ran, first, at, found)
        found[at] = kernel.id
        pending, first = [], at + 1
    _share_out(pending, ran, first, len(ran), found)
    return found


def _share_out(
    kernels: Sequence[Kernel], ran: Sequence[Activity], first: int, over: int, found: list[int | None]
) -> None:
    """Give the activities from ``first`` to ``over`` to operators in order, where the numbers say to which."""
    own = [i for i in range(first, over) if not ran[i].name.startswith(_GENERATED)]  # others were not expected
    groups = _groups([ran[i] for i in own])
    if len(kernels) == 1:
        groups = [len(own)]
    elif len(own) == len(kernels):
        groups = [1] * len(own)
    if len(groups) != len(kernels) or sum(groups) != len(own):
        return
    owners = [kernel.id for kernel, number in zip(kernels, groups, strict=True) for _ in range(number)]
    for i, owner in zip(own, owners, strict=True):
        found[i] = owner


def _groups(ran: Sequence[Activity]) -> list[int]:
    """Cut what libraries launched into one group for each kernel that computes; return their lengths.

    What prepares comes before such a kernel, what finishes comes after it, and one that is launched again at once, as
    for the rest of a split sum, belongs to the first launch.
    """
    groups: list[int] = []
    pending, latest = 0, ""
    for each in ran:
        name = each.name.lower()
        if each.kind is not ActivityKind.KERNEL or any(part in name for part in _PREPARING):
            pending, latest = pending + 1, ""
        elif groups and not pending and (any(part in name for part in _FINISHING) or each.name == latest):
            groups[-1] += 1
        else:
            groups.append(pending + 1)
            pending, latest = 0, each.name
    if groups:
        groups[-1] += pending
    return groups


def _match_by_name(kernels: Sequence[Kernel], ran: Sequence[Activity]) -> list[int | None]:
    waiting: dict[str, deque[int]] = defaultdict(deque)
    for kernel in kernels:
        if kernel.name.startswith(_GENERATED):
            waiting[kernel.name].append(kernel.id)
    found: list[int | None] = [None] * len(ran)
    for i, activity in enumerate(ran):
        name = max((name for name in waiting if activity.name.startswith(name)), key=len, default="")
        if waiting.get(name):
            found[i] = waiting[name].popleft()
    rest = [i for i in range(len(ran)) if found[i] is None and not ran[i].name.startswith(_GENERATED)]
    others = [kernel for kernel in kernels if not kernel.name.startswith(_GENERATED)]
    if len(others) == 1:
        for i in rest:
            found[i] = others[0].id
    return found


def idle_in_graph(timeline: Timeline, plan: Plan) -> dict[str, int]:
    """Nanoseconds of a run in which nothing ran, by what comes after them; they sum to ``timeline.idle_ns``.

    ``dispatch``: the host is about to launch a kernel, as on a CPU. ``next kernel``: the device's own pause between two
    kernels of one stream. ``other stream``: the next kernel waited for one that ran on another stream. ``copies in and
    out``: before, between or after what no plan knows. ``end``: after the last kernel.
    """
    on_host = all(kernel.device == "cpu" for kernel in plan.graph.kernels)
    idle: dict[str, int] = defaultdict(int)
    latest = 0
    before: Span | None = None
    for span in timeline.spans:
        if span.start_ns > latest:
            idle[_why_idle(before, span, on_host)] += span.start_ns - latest
        if span.end_ns >= latest:
            latest, before = span.end_ns, span
    if timeline.end_ns > latest:
        idle["end"] += timeline.end_ns - latest
    return dict(sorted(idle.items(), key=lambda item: -item[1]))


def _why_idle(before: Span | None, after: Span, on_host: bool) -> str:
    if on_host:
        return "dispatch"
    if after.kernel is None or (before is not None and before.kernel is None):
        return "copies in and out"
    if before is not None and before.stream != after.stream:
        return "other stream"
    return "next kernel"


def time_of_kernels(timeline: Timeline) -> dict[int | None, int]:
    """Measured nanoseconds by kernel; ``None`` for what no plan knows."""
    spent: dict[int | None, int] = defaultdict(int)
    for span in timeline.spans:
        spent[span.kernel] += span.end_ns - span.start_ns
    return dict(spent)
