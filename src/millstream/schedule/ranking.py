"""Rank kernels by urgency: how much work must follow each."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.cost import Costs
from millstream.graph import KernelGraph, derive_dependencies


def rank_kernels(predecessors: Sequence[Sequence[int]], durations_ns: Sequence[int]) -> tuple[int, ...]:
    """Return the rank of each kernel: the time from its start to the end of the longest chain that begins with it.

    Args:
        predecessors: Of each kernel, all with smaller ids.
        durations_ns: Of each kernel.
    """
    ranks = list(durations_ns)
    for kernel in reversed(range(len(ranks))):
        for predecessor in predecessors[kernel]:
            ranks[predecessor] = max(ranks[predecessor], durations_ns[predecessor] + ranks[kernel])
    return tuple(ranks)


def critical_path(graph: KernelGraph, durations_ns: Sequence[int]) -> tuple[int, ...]:
    """Return the longest chain of dependent kernels, by id; the first in the program where several are equally long."""
    predecessors = [[found.kernel for found in each] for each in derive_dependencies(graph)]
    ranks = rank_kernels(predecessors, durations_ns)
    successors: list[list[int]] = [[] for _ in ranks]
    for kernel, each in enumerate(predecessors):
        for predecessor in each:
            successors[predecessor].append(kernel)
    path: list[int] = []
    rest, choice = max(ranks, default=0), list(range(len(ranks)))
    while rest:
        path.append(next(kernel for kernel in choice if ranks[kernel] == rest))
        rest -= durations_ns[path[-1]]
        choice = successors[path[-1]]
    return tuple(path)


def critical_path_ns(graph: KernelGraph, costs: Costs) -> int:
    """Return the time of the longest chain of dependent kernels: no number of streams makes a run shorter."""
    durations_ns = [cost.duration_ns for cost in costs.kernels]
    return sum(durations_ns[kernel] for kernel in critical_path(graph, durations_ns))
