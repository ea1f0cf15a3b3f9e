"""Decide which kernel continues which stream, and when it is expected to start."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from millstream.schedule.ranking import rank_kernels

_NEVER = 1 << 62  # ns: after any schedule


@dataclass(frozen=True)
class Assignment:
    """A stream and an expected start for each kernel, by kernel id.

    The expectation leaves out that kernels share the device: it orders the launches, and is no prediction.

    Attributes:
        stream_of: Streams are numbered from 0.
        start_ns: From the begin of the run; no kernel starts before its predecessors are over.
        end_ns: When the last kernel is over.
    """

    stream_of: tuple[int, ...]
    start_ns: tuple[int, ...]
    end_ns: int

    @classmethod
    def of(
        cls,
        stream_of: Sequence[int],
        start_ns: Sequence[int],
        durations_ns: Sequence[int],
        callers: Collection[int] = (),
    ) -> Assignment:
        """Renumber the streams: unused ones fall away, and stream 0 is the one that ends last.

        The caller's work continues after stream 0, so the longest stream needs no wait at the end. With ``callers`` it
        is the longest of these, as far as one of them is used: those of the caller's device.
        """
        ends = [start + duration for start, duration in zip(start_ns, durations_ns, strict=True)]
        last_on: dict[int, int] = {}
        for stream, end in zip(stream_of, ends, strict=True):
            last_on[stream] = max(last_on.get(stream, 0), end)
        used = sorted(last_on, key=lambda stream: (stream not in callers, -last_on[stream], stream))
        number_of = {stream: number for number, stream in enumerate(used)}
        return cls(tuple(number_of[stream] for stream in stream_of), tuple(start_ns), max(ends, default=0))

    def launch_order(self) -> list[int]:
        """Return the kernels in the order in which they start; of equals, the one that comes first in the program.

        Issuing launches in this order rather than the program's is worth as much as the streams: a device takes work
        from its queues in the order in which they were filled.
        """
        return sorted(range(len(self.start_ns)), key=lambda kernel: (self.start_ns[kernel], kernel))


def assign_list(
    predecessors: Sequence[Sequence[int]],
    durations_ns: Sequence[int],
    wait_ns: int,
    num_streams: int,
    lookahead: int | None = None,
    apart: Collection[int] = (),
) -> Assignment:
    """Assign kernels to streams one by one, the most urgent first, each where it can start earliest.

    Source: HEFT, with insertion (Topcuoglu, Hariri and Wu, "Performance-effective and low-complexity task scheduling
    for heterogeneous computing", IEEE TPDS 13(3), 2002), for streams of equal speed.

    Steps:
        1. Take the kernels by rank, the longest chain of work after them; predecessors come before their successors.
        2. For each stream find the first gap that holds the kernel: after its predecessors, and ``wait_ns`` after
           those on other streams.
        3. Take the stream with the earliest start, where every other stream that has to be waited for counts as
           ``wait_ns`` more: a kernel leaves its predecessor's stream only for a gain that exceeds the cost of the
           waits.

    Args:
        predecessors: Of each kernel, all with smaller ids.
        durations_ns: Of each kernel.
        wait_ns: How much later a kernel starts that waits for another stream.
        num_streams: How many streams there are.
        lookahead: How far kernels may leave the order of the program; see ``by_urgency``.
        apart: Kernels that have one of the streams for themselves, where there are two or more: they start as soon as
            they can, whatever else would fill the gap. Collectives, which leave the device to others for the most part.
    """
    ranks = rank_kernels(predecessors, durations_ns)
    builder = _Builder(predecessors, durations_ns, wait_ns, num_streams, apart)
    for kernel in by_urgency(predecessors, ranks, lookahead):
        builder.place(kernel)
    return builder.finish()


def assign_slack(
    predecessors: Sequence[Sequence[int]],
    durations_ns: Sequence[int],
    wait_ns: int,
    num_streams: int,
    lookahead: int | None = None,
    apart: Collection[int] = (),
) -> Assignment:
    """Assign kernels as ``assign_list`` does, but move only those that have no time to lose.

    A kernel that starts so early that the longest chain after it can still end by the lower bound of the makespan (the
    critical path, or all work divided among the streams) goes where the fewest other streams have to be waited for.
    That saves many waits on wide graphs, but leaves less room for what comes later.
    """
    ranks = rank_kernels(predecessors, durations_ns)
    bound_ns = max(max(ranks, default=0), sum(durations_ns) // num_streams)
    builder = _Builder(predecessors, durations_ns, wait_ns, num_streams, apart)
    for kernel in by_urgency(predecessors, ranks, lookahead):
        builder.place(kernel, early_ns=bound_ns - ranks[kernel])
    return builder.finish()


def assign_given(
    chosen: Sequence[int],
    predecessors: Sequence[Sequence[int]],
    durations_ns: Sequence[int],
    wait_ns: int,
    num_streams: int,
    lookahead: int | None = None,  # noqa: ARG001  # an Assign's signature
    apart: Collection[int] = (),  # noqa: ARG001
) -> Assignment:
    """Put each kernel on the stream that somebody has chosen for it, in the order of the program.

    Args:
        chosen: By kernel.
        predecessors: As for the others, and so on.
        durations_ns: Likewise.
        wait_ns: Likewise.
        num_streams: Likewise.
        lookahead: Without meaning here.
        apart: Likewise.
    """
    free_ns = [0] * num_streams
    starts: list[int] = []
    for kernel, stream in enumerate(chosen):
        ends = [
            starts[other] + durations_ns[other] + (wait_ns if chosen[other] != stream else 0)
            for other in predecessors[kernel]
        ]
        starts.append(max([free_ns[stream], *ends]))
        free_ns[stream] = starts[kernel] + durations_ns[kernel]
    return Assignment.of(chosen, starts, durations_ns)


def assign_among(
    choices: Sequence[Sequence[int]],
    predecessors: Sequence[Sequence[int]],
    durations_ns: Sequence[int],
    wait_ns: int,
    callers: Collection[int],
    lookahead: int | None = None,
) -> Assignment:
    """Assign kernels as ``assign_list`` does, each to one of the streams that it may have.

    Args:
        choices: By kernel: the streams of its device, or of the link that it crosses.
        predecessors: As for the others, and so on.
        durations_ns: Likewise.
        wait_ns: Likewise.
        callers: Streams of the caller's device; see ``Assignment.of``.
        lookahead: As for the others.
    """
    num_streams = 1 + max((stream for each in choices for stream in each), default=0)
    builder = _Builder(predecessors, durations_ns, wait_ns, num_streams, ())
    for kernel in by_urgency(predecessors, rank_kernels(predecessors, durations_ns), lookahead):
        builder.place(kernel, choices[kernel])
    return Assignment.of(builder.stream_of, builder.start_ns, durations_ns, callers)


def assign_chains(
    predecessors: Sequence[Sequence[int]],
    durations_ns: Sequence[int],
    wait_ns: int,
    num_streams: int,
    lookahead: int | None = None,
    apart: Collection[int] = (),
) -> Assignment:
    """Assign whole chains of kernels to streams: fewer waits than ``assign_list``, and less to gain.

    Steps:
        1. Cut the graph into chains: the most urgent first, each kernel is continued by its most urgent successor that
           no other chain has taken.
        2. The first kernel of a chain chooses a stream as in ``assign_list``; the others follow it.
    """
    ranks = rank_kernels(predecessors, durations_ns)
    successors: list[list[int]] = [[] for _ in durations_ns]
    for kernel, each in enumerate(predecessors):
        for predecessor in each:
            successors[predecessor].append(kernel)
    continues: dict[int, int] = {}
    for kernel in by_urgency(predecessors, ranks):
        if kernel in apart:
            continue
        free = [successor for successor in successors[kernel] if successor not in continues and successor not in apart]
        if free:
            continues[max(free, key=lambda successor: (ranks[successor], -successor))] = kernel
    builder = _Builder(predecessors, durations_ns, wait_ns, num_streams, apart)
    for kernel in by_urgency(predecessors, ranks, lookahead):
        builder.place(kernel, [builder.stream_of[continues[kernel]]] if kernel in continues else None)
    return builder.finish()


def by_urgency(
    predecessors: Sequence[Sequence[int]], ranks: Sequence[int], lookahead: int | None = None
) -> Iterator[int]:
    """Go through the kernels by rank, predecessors before successors; of equals, the first in the program first.

    With a lookahead, a kernel has to wait until fewer than so many kernels stand between it and the first one in the
    program that is still to come. Otherwise what nothing urgent depends on (a weight's gradient, say) would be put off
    to the end, and all that it reads would have to be kept until then.
    """
    lookahead = lookahead or len(ranks)
    successors: list[list[int]] = [[] for _ in ranks]
    for kernel, each in enumerate(predecessors):
        for predecessor in each:
            successors[predecessor].append(kernel)
    missing = [len(each) for each in predecessors]
    oldest = 0  # the first kernel in the program that is still to come
    gone = [False] * len(ranks)
    within: list[tuple[int, int]] = []  # ready kernels, by rank
    beyond = [kernel for kernel, count in enumerate(missing) if count == 0]  # ready kernels, by place in the program
    while within or beyond:
        while beyond and beyond[0] < oldest + lookahead:
            kernel = heappop(beyond)
            heappush(within, (-ranks[kernel], kernel))
        _, kernel = heappop(within)
        yield kernel
        gone[kernel] = True
        while oldest < len(gone) and gone[oldest]:
            oldest += 1
        for successor in successors[kernel]:
            missing[successor] -= 1
            if missing[successor] == 0:
                heappush(beyond, successor)


class Assign(Protocol):
    """Assigns kernels to streams; see ``assign_list``."""

    def __call__(
        self,
        predecessors: Sequence[Sequence[int]],
        durations_ns: Sequence[int],
        wait_ns: int,
        num_streams: int,
        lookahead: int | None = None,
        apart: Collection[int] = (),
    ) -> Assignment:
        """Give each kernel a stream and an expected start."""
        ...


class Gaps:
    """The idle times of a stream: rising, and the last gap has no end.

    Args:
        shortest_ns: Of its kernels: shorter gaps are forgotten.
    """

    def __init__(self, shortest_ns: int) -> None:
        self.starts, self.ends = [0], [_NEVER]
        self.shortest_ns = max(shortest_ns, 1)

    def find(self, ready: int, duration: int) -> tuple[int, int]:
        """Return the index of the first gap that holds a kernel from some time on, and when that starts."""
        index = bisect_left(self.ends, ready + duration)
        while max(self.starts[index], ready) + duration > self.ends[index]:
            index += 1
        return index, max(self.starts[index], ready)

    def fill(self, index: int, start: int, end: int) -> None:
        """Cut a placed kernel out of a gap. Rests too short for any kernel are dropped, to keep the search short."""
        rests = [(self.starts[index], start), (end, self.ends[index])]
        kept = [(low, high) for low, high in rests if high - low >= self.shortest_ns]
        self.starts[index : index + 1] = [low for low, _ in kept]
        self.ends[index : index + 1] = [high for _, high in kept]


class _Builder:
    """An assignment in the making: where each stream still has gaps."""

    def __init__(
        self,
        predecessors: Sequence[Sequence[int]],
        durations_ns: Sequence[int],
        wait_ns: int,
        num_streams: int,
        apart: Collection[int],
    ) -> None:
        self.predecessors = predecessors
        self.durations_ns = durations_ns
        self.wait_ns = wait_ns
        self.stream_of = [0] * len(durations_ns)
        self.start_ns = [0] * len(durations_ns)
        self.end_ns = [0] * len(durations_ns)
        shortest_ns = min(durations_ns, default=0)
        self.gaps = [Gaps(shortest_ns) for _ in range(num_streams)]
        self.apart = frozenset(apart if num_streams > 1 else ())
        self.num_shared = num_streams - bool(self.apart)  # the last one is theirs

    def place(self, kernel: int, choice: Sequence[int] | None = None, *, early_ns: int = -1) -> None:
        """Put a kernel, whose predecessors are placed, on the best of some streams, or of all that it may have.

        Starts up to ``early_ns`` are early enough: of those the one with the fewest waits is best.
        """
        latest_on: dict[int, int] = {}  # when the predecessors on each stream are over
        for predecessor in self.predecessors[kernel]:
            stream = self.stream_of[predecessor]
            latest_on[stream] = max(latest_on.get(stream, 0), self.end_ns[predecessor])
        best: tuple[int, ...] | None = None
        for stream in choice or ([self.num_shared] if kernel in self.apart else range(self.num_shared)):
            others = [end for other, end in latest_on.items() if other != stream]
            ready = max(latest_on.get(stream, 0), max(others, default=-self.wait_ns) + self.wait_ns)
            gap, start = self.gaps[stream].find(ready, self.durations_ns[kernel])
            merit = (-1, len(others)) if start <= early_ns else (start + len(others) * self.wait_ns, 0)
            candidate = (*merit, start, stream, gap)
            best = candidate if best is None else min(best, candidate)
        assert best is not None, "a kernel needs at least one stream to choose from"
        start, stream, gap = best[2:]
        self.stream_of[kernel] = stream
        self.start_ns[kernel] = start
        self.end_ns[kernel] = start + self.durations_ns[kernel]
        self.gaps[stream].fill(gap, start, self.end_ns[kernel])

    def finish(self) -> Assignment:
        """Return what has been assigned."""
        return Assignment.of(self.stream_of, self.start_ns, self.durations_ns)
