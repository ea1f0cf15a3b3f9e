"""Our own kernels that are alike and wait for nothing of each other become one launch.

On streams of their own they take each other's multiprocessors by chance, and each pair of streams costs waits. In one
launch they fill the device together, and whatever comes after them starts once. ``docs/decisions/own-kernels.md`` has
the figures.

**Contract**
- The program computes what it did, up to the order in which a convolution sums: a larger launch has larger tiles.
- No kernel comes after more kernels in a row than before: those that are joined lie equally deep in the graph.
- Weights are converted in the order in which they are needed, the first ones by themselves.
- Program order stays, as far as that allows.

**Steps**: find how deep each kernel lies; put together those of one kind and depth, and weights that are needed one
after the other; order what results.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

from millstream.graph import Kernel, KernelGraph, derive_dependencies
from millstream.kernels.family import Grouping
from millstream.kernels.launches import TritonLaunch
from millstream.program import KernelCall, Program

MOST_TOGETHER = 8
"""Convolutions or weights in a launch: each is some arguments more, among which every block chooses."""

MOST_CONVERTED_BYTES = 4 << 20
"""Of several weights in one launch: none can be read before all are there, and until then all of them take memory."""


def fuse_horizontally(program: Program, groupings: Iterable[Grouping]) -> Program:
    """Let one launch compute what is alike and independent."""
    grouping_of = {each.alone: each for each in groupings}
    old, groups = program.graph, _find_groups(program, grouping_of)
    if not groups:
        return program
    groups += [[i] for i in {kernel.id for kernel in old.kernels}.difference(*groups)]
    launches = [_join(program, groups[index], grouping_of) for index in _order(old, groups)]
    kernels = tuple(replace(kernel, id=position) for position, (kernel, _) in enumerate(launches))
    return replace(program, graph=replace(old, kernels=kernels), calls=tuple(call for _, call in launches))


def find_joint_launches(program: Program, groupings: Iterable[Grouping]) -> Iterator[TritonLaunch]:
    """The launches that compute several at once, for tensors that are not there yet."""
    grouping_of = {each.together: each for each in groupings}
    for call in program.calls:
        if (grouping := grouping_of.get(call.target)) is not None:
            yield from grouping.launches([grouping.task(*program.described(each)) for each in call.args])


class Own(NamedTuple):
    """One of our kernels, and when it can and must run.

    Attributes:
        grouping: How several of it become one.
        task: What it computes.
        depth: The longest chain in front of it.
        need: The shortest chain in front of anything that reads its result.
    """

    grouping: Grouping
    task: Any
    depth: int
    need: int


def divide(kernels: Sequence[Own]) -> Iterator[list[int]]:
    """Divide kernels into launches, by their positions."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for i, (grouping, task, depth, _) in enumerate(kernels):
        alike[grouping, task.out.device, task.kind, None if grouping.is_by_need else depth].append(i)
    for members in alike.values():
        grouping = kernels[members[0]].grouping
        if grouping.is_by_need:
            in_order = sorted(members, key=lambda i: kernels[i].need)
            yield from _divide_by_need([(i, kernels[i].task.out.nbytes) for i in in_order])
        else:
            yield from _divide_evenly([(i, kernels[i].task.window) for i in members], grouping.most_windows)


def _find_groups(program: Program, grouping_of: Mapping[Callable[..., Any], Grouping]) -> list[list[int]]:
    """Kernels to be joined, each group in program order."""
    own = [i for i, call in enumerate(program.calls) if call.target in grouping_of]
    own = [i for i in own if _may_move(program, i) or not grouping_of[program.calls[i].target].is_by_need]
    depths, needs = _depths(program.graph) if own else ([], [])
    kernels = []
    for i in own:
        call, grouping = program.calls[i], grouping_of[program.calls[i].target]
        task = grouping.task(*program.described((*call.args, call.kwargs["out"])))
        kernels.append(Own(grouping, task, depths[i], needs[i]))
    return [sorted(own[position] for position in group) for group in divide(kernels) if len(group) > 1]


def _may_move(program: Program, kernel: int) -> bool:
    """Return whether it may run in front of kernels that it came after: weights must be there from the beginning."""
    return program.mutated.isdisjoint(program.graph.kernels[kernel].reads)


def _divide_evenly(members: Sequence[tuple[int, tuple[int, ...]]], most_windows: int) -> Iterator[list[int]]:
    """Divide what is alike but for its window into launches, as evenly as may be."""
    windows = sorted({window for _, window in members}, reverse=True)
    for first in range(0, len(windows), most_windows):
        taken = windows[first : first + most_windows]
        ids = [i for window in taken for i, own in members if own == window]
        num_launches = -(-len(ids) // MOST_TOGETHER)
        for k in range(num_launches):
            yield ids[len(ids) * k // num_launches : len(ids) * (k + 1) // num_launches]


def _divide_by_need(members: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """Divide weights, of so many bytes each, into launches, of which none is larger than those in front together."""
    group: list[int] = []
    num_bytes = num_before = 0
    for i, own in members:
        if group and (len(group) >= min(num_before, MOST_TOGETHER) or num_bytes + own > MOST_CONVERTED_BYTES):
            yield group
            num_before += len(group)
            group, num_bytes = [], 0
        group.append(i)
        num_bytes += own
    if group:
        yield group


def _depths(graph: KernelGraph) -> tuple[list[int], list[int]]:
    """The longest chain of kernels in front of each, and of those that need something of it the shortest such chain."""
    depths: list[int] = []
    needs = [len(graph.kernels)] * len(graph.kernels)
    for found in derive_dependencies(graph):
        depths.append(max((depths[each.kernel] + 1 for each in found), default=0))
        for each in found:
            needs[each.kernel] = min(needs[each.kernel], depths[-1])
    return depths, needs


def _join(
    program: Program, group: Sequence[int], grouping_of: Mapping[Callable[..., Any], Grouping]
) -> tuple[Kernel, KernelCall]:
    kernels, calls = [program.graph.kernels[i] for i in group], [program.calls[i] for i in group]
    if len(group) == 1:
        return kernels[0], calls[0]
    names = Counter(kernel.name for kernel in kernels)

    def union(attribute: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for kernel in kernels for name in getattr(kernel, attribute)))

    kernel = replace(
        kernels[0],
        name=", ".join(f"{number} × {name}" for name, number in names.items()),
        reads=union("reads"),
        writes=union("writes"),
        parts=union("parts"),
        ops=union("ops"),
        num_bytes=sum(kernel.num_bytes for kernel in kernels),
        flops=sum(kernel.flops for kernel in kernels),
    )
    arguments = tuple((*call.args, call.kwargs["out"]) for call in calls)
    return kernel, KernelCall(grouping_of[calls[0].target].together, arguments, {})


def _order(graph: KernelGraph, groups: Sequence[Sequence[int]]) -> list[int]:
    """Order groups of kernels by what depends on what, and else by program order; return their positions."""
    group_of = {kernel: index for index, group in enumerate(groups) for kernel in group}
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for kernel, found in enumerate(derive_dependencies(graph)):
        sorter.add(group_of[kernel], *(group_of[each.kernel] for each in found))
    sorter.prepare()
    ready: list[tuple[int, int]] = []
    order: list[int] = []
    while sorter.is_active():
        for index in sorter.get_ready():
            heapq.heappush(ready, (groups[index][0], index))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return order
