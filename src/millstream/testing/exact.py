"""The best assignment of small graphs, by search: a yardstick for the policies."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.errors import ArgumentError
from millstream.schedule.assignment import Assignment, assign_list
from millstream.schedule.ranking import rank_kernels

_MOST_KERNELS = 30  # no search ends for more, and the recursion is as deep


def assign_exact(
    predecessors: Sequence[Sequence[int]],
    durations_ns: Sequence[int],
    wait_ns: int,
    num_streams: int,
    *,
    max_nodes: int = 200_000,
) -> Assignment:
    """Find the assignment with the earliest end, by branch and bound; exponential, so for a dozen kernels.

    Steps:
        1. Begin with ``assign_list``: nothing that ends later is of interest.
        2. Add one kernel at a time, in the order of starts, on each stream that differs from the others.
        3. Leave a branch when the longest chain behind its latest kernel, or the work left divided among the streams,
           says that it cannot end earlier than the best so far.

    Args:
        predecessors: Of each kernel, all with smaller ids.
        durations_ns: Of each kernel.
        wait_ns: How much later than on its own stream a kernel starts when it waits for another stream.
        num_streams: How many streams there are.
        max_nodes: Where to stop; what was found by then is returned, and is never worse than ``assign_list``.

    Raises:
        ArgumentError: There are more than 30 kernels.
    """
    if len(durations_ns) > _MOST_KERNELS:
        raise ArgumentError(
            f"{len(durations_ns)} kernels are too many to search: {_MOST_KERNELS} at most, or assign_list"
        )
    search = _ExactSearch(predecessors, durations_ns, wait_ns, num_streams, max_nodes)
    search.extend(frozenset(), [0] * num_streams, 0)
    return search.best


class _ExactSearch:
    """A depth-first search, and the best that it has found."""

    def __init__(
        self,
        predecessors: Sequence[Sequence[int]],
        durations_ns: Sequence[int],
        wait_ns: int,
        num_streams: int,
        max_nodes: int,
    ) -> None:
        self.predecessors = predecessors
        self.durations_ns = durations_ns
        self.wait_ns = wait_ns
        self.ranks = rank_kernels(predecessors, durations_ns)
        self.best = assign_list(predecessors, durations_ns, wait_ns, num_streams)
        self.nodes_left = max_nodes
        self.stream_of = [0] * len(durations_ns)
        self.start_ns = [0] * len(durations_ns)

    def extend(self, placed: frozenset[int], free_at: list[int], latest_start: int) -> None:
        """Try every next kernel and stream."""
        if self.nodes_left <= 0:
            return
        self.nodes_left -= 1
        if len(placed) == len(self.durations_ns):
            end_ns = max(free_at, default=0)
            if end_ns < self.best.end_ns:
                self.best = Assignment.of(self.stream_of, self.start_ns, self.durations_ns)
            return
        left = [kernel for kernel in range(len(self.durations_ns)) if kernel not in placed]
        work_left = sum(self.durations_ns[kernel] for kernel in left)
        if (sum(free_at) + work_left) / len(free_at) >= self.best.end_ns:
            return
        for kernel in sorted(left, key=lambda kernel: -self.ranks[kernel]):
            if placed.issuperset(self.predecessors[kernel]):
                self.try_kernel(kernel, placed, free_at, latest_start)

    def try_kernel(self, kernel: int, placed: frozenset[int], free_at: list[int], latest_start: int) -> None:
        """Try a kernel on every stream; of those that are still empty, on one."""
        tried_empty = False
        for stream, free in enumerate(free_at):
            if free == 0:
                if tried_empty:
                    continue
                tried_empty = True
            start = free
            for predecessor in self.predecessors[kernel]:
                end = self.start_ns[predecessor] + self.durations_ns[predecessor]
                start = max(start, end + (self.wait_ns if self.stream_of[predecessor] != stream else 0))
            # Any schedule can be built in the order of its starts: others are the same again.
            if start < latest_start or start + self.ranks[kernel] >= self.best.end_ns:
                continue
            self.stream_of[kernel], self.start_ns[kernel] = stream, start
            following = [*free_at[:stream], start + self.durations_ns[kernel], *free_at[stream + 1 :]]
            self.extend(placed | {kernel}, following, start)
