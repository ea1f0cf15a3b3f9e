"""Costs of a run's collectives: how long each travels, and how much of that nothing else hides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from millstream.graph import (
    DependencyKind,
    Kernel,
    KernelGraph,
    KernelKind,
    Launch,
    Plan,
    Record,
    Step,
    Timeline,
    Wait,
    derive_dependencies,
)

REDUCING = ("all_reduce", "reduce_scatter")
"""Operations that make gradients whole: what depends on one is the update."""


@dataclass(frozen=True, slots=True)
class CollectiveTransfer:
    """One collective in a run.

    Attributes:
        kernel: Its id.
        operation: Such as ``all_reduce``.
        label: What travels, for people.
        num_bytes: Of its bucket.
        ready_ns: When the last of what it sends was there.
        sent_ns: When it began.
        done_ns: When it was over.
        exposed_ns: For how long, between these, no kernel computed anything.
    """

    kernel: int
    operation: str
    label: str
    num_bytes: int
    ready_ns: int
    sent_ns: int
    done_ns: int
    exposed_ns: int

    @property
    def took_ns(self) -> int:
        """From begin to end."""
        return self.done_ns - self.sent_ns

    @property
    def hidden_ns(self) -> int:
        """For how long something was computed meanwhile."""
        return self.took_ns - self.exposed_ns


_OPERATIONS = {"broadcast": "broadcast", "scatter": "reduce_scatter", "gather": "all_gather"}


def operation_of(kernel: Kernel) -> str:
    """Return what a collective does, by the name of its first operator; an all-reduce where that says nothing else."""
    name = kernel.ops[0] if kernel.ops else ""
    return next((operation for part, operation in _OPERATIONS.items() if part in name), "all_reduce")


def bucket_bytes(graph: KernelGraph, kernel: Kernel) -> int:
    """Return what travels in a collective."""
    given = kernel.reads[:1]  # of a scatter the whole, of which it writes a part
    return max(graph.buffer_of[name].num_bytes for name in (*given, *kernel.writes))


def find_transfers(graph: KernelGraph, timeline: Timeline) -> tuple[CollectiveTransfer, ...]:
    """The collectives of a run, predicted or traced, in the order in which they began."""
    collectives = {kernel.id for kernel in graph.kernels if kernel.kind is KernelKind.COLLECTIVE}
    if not collectives:
        return ()
    needs = derive_dependencies(graph)
    end_of: dict[int, int] = {}
    for span in timeline.spans:
        if span.kernel is not None:
            end_of[span.kernel] = max(end_of.get(span.kernel, 0), span.end_ns)
    computing = _union((each.start_ns, each.end_ns) for each in timeline.spans if each.kernel not in collectives)
    found = []
    for span in timeline.spans:
        if span.kernel not in collectives or span.kernel is None:
            continue
        kernel = graph.kernels[span.kernel]
        makers = (each.kernel for each in needs[kernel.id] if each.kernel not in collectives)
        ready_ns = max((end_of.get(maker, 0) for maker in makers), default=0)
        hidden_ns = sum(max(0, min(span.end_ns, end) - max(span.start_ns, start)) for start, end in computing)
        found.append(
            CollectiveTransfer(
                kernel.id,
                operation_of(kernel),
                kernel.name.removeprefix("exchange "),
                bucket_bytes(graph, kernel),
                min(ready_ns, span.start_ns),
                span.start_ns,
                span.end_ns,
                span.end_ns - span.start_ns - hidden_ns,
            )
        )
    return tuple(found)


def with_collectives(graph: KernelGraph, timeline: Timeline, prefix: str = "nccl") -> Timeline:
    """A traced run whose collectives are told by the names of what ran, in the order of the program.

    Args:
        graph: What ran.
        timeline: Its run; collectives may have no kernel, or a wrong one.
        prefix: With which names of collectives begin on the device.

    Returns:
        The run as it was where it has another number of collectives.
    """
    collectives = [kernel.id for kernel in graph.kernels if kernel.kind is KernelKind.COLLECTIVE]
    ran = [number for number, span in enumerate(timeline.spans) if span.name.lower().startswith(prefix)]
    if len(ran) != len(collectives):
        return timeline
    spans = [
        span if span.kernel is None or span.kernel not in collectives else replace(span, kernel=None)
        for span in timeline.spans
    ]
    for number, kernel in zip(ran, collectives, strict=True):
        spans[number] = replace(spans[number], kernel=kernel)
    return replace(timeline, spans=tuple(spans))


def find_updates(graph: KernelGraph) -> frozenset[int]:
    """Kernels that work on what was reduced: optimizer, clipping, averages of parameters; those before are not."""
    needs = derive_dependencies(graph)
    found: set[int] = set()
    sources: set[int] = set()
    for kernel in graph.kernels:
        if kernel.kind is KernelKind.COLLECTIVE:
            if operation_of(kernel) in REDUCING:
                sources.add(kernel.id)
            continue
        after = {each.kernel for each in needs[kernel.id] if each.kind is DependencyKind.RAW}
        if after & (sources | found):
            found.add(kernel.id)
    return frozenset(found)


def plan_beside(graph: KernelGraph, *, eager: bool = False) -> Plan:
    """Kernels in program order on stream 0 and collectives in theirs on stream 1, beside them.

    Args:
        graph: With collectives.
        eager: As a host does that issues collectives between segments: each where it stands in the program, and what
            needs one waits for all before it. Otherwise each is sent as soon as what it sends is there.
    """
    needs = derive_dependencies(graph)
    collectives = [kernel.id for kernel in graph.kernels if kernel.kind is KernelKind.COLLECTIVE]
    ready_after = {
        each: each - 1 if eager else max((n.kernel for n in needs[each] if n.kernel not in collectives), default=-1)
        for each in collectives
    }
    latest = -1
    due: dict[int, list[int]] = {}  # after which kernel on stream 0 they are issued
    for each in collectives:  # in their own order: one waits for the ones before
        latest = max(latest, ready_after[each])
        due.setdefault(latest, []).append(each)
    steps: list[Step] = []
    issued: set[int] = set()
    awaited: set[int] = set()

    def issue(position: int) -> None:
        for each in due.get(position, ()):
            steps.extend((Record(2 * each, 0), Wait(2 * each, 1), Launch(each, 1), Record(2 * each + 1, 1)))
            issued.add(each)

    issue(-1)
    for kernel in graph.kernels:
        if kernel.kind is not KernelKind.COLLECTIVE:
            needed = {need.kernel for need in needs[kernel.id] if need.kernel in issued} - awaited
            if eager and needed:
                needed = issued - awaited
            steps.extend(Wait(2 * need + 1, 0) for need in sorted(needed))
            awaited |= needed
            steps.append(Launch(kernel.id, 0))
        issue(kernel.id)
    steps.extend(Wait(2 * each + 1, 0) for each in collectives if each not in awaited)
    return Plan(graph, tuple(steps), 2, "collectives beside" if not eager else "collectives between")


def leave_out(plan: Plan, left_out: Iterable[int]) -> Plan:
    """The plan without some kernels' launches, and without waits for streams on which nothing is left to run."""
    left_out = set(left_out)
    busy = {0, *(step.stream for step in plan.steps if isinstance(step, Launch) and step.kernel not in left_out)}
    pending: dict[int, dict[int, None]] = {}  # of a stream that is empty now: the events it waits for
    stands_for: dict[int, tuple[int, ...]] = {}
    steps: list[Step] = []
    for step in plan.steps:
        if isinstance(step, Launch) and step.kernel in left_out:
            continue
        if isinstance(step, Wait):
            events = stands_for.get(step.event, (step.event,))
            if step.stream in busy:
                steps.extend(Wait(event, step.stream) for event in events)
            else:
                pending.setdefault(step.stream, {}).update(dict.fromkeys(events))
        elif isinstance(step, Record) and step.stream not in busy:
            stands_for[step.event] = tuple(pending.get(step.stream, ()))
        elif step.stream in busy:
            steps.append(step)
    return Plan(plan.graph, tuple(steps), plan.num_streams, plan.policy, plan.layout, plan.spread)


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
