"""Kernels put off until they are needed.

A schedule that starts everything as early as it can fills memory with what is wanted much later: copies of weights in
another layout, for instance, depend on nothing and would all be made at the start.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence

from millstream.graph import KernelGraph, Role
from millstream.schedule.assignment import Assignment

_HEADROOM_WAITS = 8  # so many waits before it is needed a kernel should be over: times are not known exactly
_NEAR_WAITS = 80  # so many waits earlier it may run to be on the stream that needs it


def delay_kernels(
    assignment: Assignment,
    predecessors: Sequence[Sequence[int]],
    durations_ns: Sequence[int],
    wait_ns: int,
    movable: Collection[int],
    apart: Collection[int] = (),
) -> Assignment:
    """Move kernels to the latest gap of a stream in which they are still in time for what depends on them.

    Steps: go through the kernels from the last to the first, so that what depends on one has its final place; find the
    latest gap on every stream, and prefer the streams of the kernels that depend on it, which then need no wait.

    Args:
        assignment: In which no gap overlaps another kernel.
        predecessors: Of each kernel.
        durations_ns: Of each kernel.
        wait_ns: What a wait for another stream costs.
        movable: Kernels that may be moved; the others stay.
        apart: Kernels to whose streams none is moved.

    Returns:
        An assignment that ends no later.
    """
    start_ns, stream_of = list(assignment.start_ns), list(assignment.stream_of)
    busy: list[list[tuple[int, int]]] = [[] for _ in range(max(stream_of, default=0) + 1)]
    for kernel, start in enumerate(start_ns):
        insort(busy[stream_of[kernel]], (start, start + durations_ns[kernel]))
    successors: list[list[int]] = [[] for _ in start_ns]
    for kernel, each in enumerate(predecessors):
        for predecessor in each:
            successors[predecessor].append(kernel)
    open_to_all = [stream for stream in range(len(busy)) if stream not in {stream_of[kernel] for kernel in apart}]
    headroom_ns, near_ns = _HEADROOM_WAITS * wait_ns, _NEAR_WAITS * wait_ns
    for kernel in sorted(movable, key=lambda kernel: (-start_ns[kernel], -kernel)):
        if not successors[kernel]:
            continue
        duration = durations_ns[kernel]
        span = (start_ns[kernel], start_ns[kernel] + duration)
        busy[stream_of[kernel]].remove(span)
        needed_ns = min(start_ns[successor] for successor in successors[kernel]) - wait_ns - headroom_ns
        near = {stream_of[successor] for successor in successors[kernel]}
        over_ns = {
            predecessor: start_ns[predecessor] + durations_ns[predecessor] for predecessor in predecessors[kernel]
        }
        best = (span[0] + (near_ns if stream_of[kernel] in near else 0), span[0], -stream_of[kernel])
        for stream in open_to_all:
            start = _latest_start(busy[stream], needed_ns, duration, span[0])
            ready_ns = max((over_ns[p] + wait_ns * (stream_of[p] != stream) for p in predecessors[kernel]), default=0)
            if start > span[0] and start >= ready_ns:
                best = max(best, (start + (near_ns if stream in near else 0), start, -stream))
        _, start_ns[kernel], stream = best
        stream_of[kernel] = -stream
        insort(busy[-stream], (start_ns[kernel], start_ns[kernel] + duration))
    return Assignment.of(stream_of, start_ns, durations_ns)


def _latest_start(spans: Sequence[tuple[int, int]], end_ns: int, duration: int, least_ns: int) -> int:
    """Return the latest start after ``least_ns`` that leaves ``duration`` in a gap before ``end_ns``; else -1."""
    index, end = bisect_left(spans, (end_ns, 0)), end_ns
    while end - duration > least_ns:
        begin = spans[index - 1][1] if index else 0
        if end - begin >= duration:
            return end - duration
        index -= 1
        if index < 0:
            break
        end = spans[index][0]
    return -1


def sources(graph: KernelGraph) -> list[int]:
    """Return the kernels that read no temporary: put off, they hold no memory, and their results take it later."""
    found = []
    for kernel in graph.kernels:
        reads, writes = graph.touched_by[kernel.id]
        written = [graph.buffer_of[storage].role for storage in writes]
        reading = [graph.buffer_of[storage].role for storage in reads]
        if Role.TEMPORARY not in reading and all(role is Role.TEMPORARY for role in written):
            found.append(kernel.id)
    return found
