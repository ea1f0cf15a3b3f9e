"""Policies: a graph, its costs and a number of streams become a plan."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Protocol

from millstream.cost import Costs
from millstream.errors import ArgumentError
from millstream.graph import KernelGraph, KernelKind, Plan, derive_dependencies
from millstream.schedule.assignment import Assign, assign_chains, assign_given, assign_list, assign_slack
from millstream.schedule.delay import delay_kernels, sources
from millstream.schedule.memory.allocation import place_allocations
from millstream.schedule.memory.lifetimes import peak_bytes
from millstream.schedule.memory.reuse import share_memory
from millstream.schedule.serial import plan_serial
from millstream.schedule.waits import place_waits


class Policy(Protocol):
    """Makes a plan of a graph. The same arguments give the same plan, without races and lifetime errors."""

    def __call__(
        self, graph: KernelGraph, costs: Costs, num_streams: int, lookahead: int | None = None, packed: bool = False
    ) -> Plan:
        """Plan a graph on at most ``num_streams`` streams; see ``assign_list`` and ``share_memory``."""
        ...


@dataclass(frozen=True)
class _Assigned:
    """Every policy with streams: assign them, order the launches, place the waits, then the memory."""

    name: str
    assign: Assign

    def __call__(
        self, graph: KernelGraph, costs: Costs, num_streams: int, lookahead: int | None = None, packed: bool = False
    ) -> Plan:
        predecessors = [[found.kernel for found in each] for each in derive_dependencies(graph)]
        durations_ns = [cost.duration_ns for cost in costs.kernels]
        apart = [kernel.id for kernel in graph.kernels if kernel.kind is KernelKind.COLLECTIVE]
        assignment = self.assign(predecessors, durations_ns, costs.wait_ns, num_streams, lookahead, apart)
        assignment = delay_kernels(assignment, predecessors, durations_ns, costs.wait_ns, sources(graph), apart)
        num_used = max(assignment.stream_of, default=0) + 1
        layout = None
        if packed:
            layout, more = share_memory(graph, assignment, durations_ns, costs.wait_ns)
            predecessors = [[*each, *more.get(kernel, ())] for kernel, each in enumerate(predecessors)]
        steps = place_waits(assignment.launch_order(), assignment.stream_of, predecessors, num_used)
        return place_allocations(Plan(graph, tuple(steps), num_used, self.name, layout))


def _plan_serial(
    graph: KernelGraph,
    costs: Costs,  # noqa: ARG001  # a Policy's signature
    num_streams: int,  # noqa: ARG001
    lookahead: int | None = None,  # noqa: ARG001
    packed: bool = False,  # noqa: ARG001
) -> Plan:
    return plan_serial(graph)


def _plan_by_hand(
    graph: KernelGraph,
    costs: Costs,
    num_streams: int,
    lookahead: int | None = None,  # noqa: ARG001  # the author has said what may run beside what
    packed: bool = False,
) -> Plan:
    if not graph.has_hints:
        return replace(plan_serial(graph), policy="manual")
    hints = list(dict.fromkeys(["", *(kernel.hint or "" for kernel in graph.kernels)]))
    chosen = [hints.index(kernel.hint or "") % num_streams for kernel in graph.kernels]
    return _Assigned("manual", functools.partial(assign_given, chosen))(graph, costs, num_streams, None, packed)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "serial": _plan_serial,
        "chains": _Assigned("chains", assign_chains),
        "slack": _Assigned("slack", assign_slack),
        "list": _Assigned("list", assign_list),
        "manual": _plan_by_hand,
    }
)
"""Policies by name; see ``plan_serial`` and the functions ``assign_*`` for what they do."""

_LOOKAHEADS = (None, 256, 64, 16)  # kernels: each step down saves memory, and costs little time on a few streams


def plan_graph(
    graph: KernelGraph,
    costs: Costs,
    num_streams: int,
    policy: str = "list",
    *,
    memory_bytes: int | None = None,
    packed: bool = False,
    fewer: bool = True,
) -> Plan:
    """Plan a graph by a policy, within a memory budget.

    Args:
        graph: A valid graph; see ``validate_graph``.
        costs: Of its kernels.
        num_streams: The most streams to use, at least one.
        policy: One of ``POLICIES``.
        memory_bytes: The most that temporaries and outputs may take, by ``peak_bytes``. Over it, kernels keep closer to
            the program's order, and then fewer streams are taken, down to the serial plan.
        packed: Whether temporaries are packed into one arena, with waits that let memory be used again; see
            ``share_memory``. The serial plan is never packed: an allocator does as well for it.
        fewer: Whether numbers of streams between ``num_streams`` and one are tried over the budget.

    Raises:
        ArgumentError: There is no such policy, no stream, costs of another graph, or a budget that even the serial plan
            exceeds; the message names the value and the choice.
    """
    if policy not in POLICIES:
        raise ArgumentError(f"there is no policy {policy!r}: choose one of {', '.join(map(repr, POLICIES))}")
    if num_streams < 1:
        raise ArgumentError(f"cannot plan on {num_streams} streams: choose at least one")
    if len(costs.kernels) != len(graph.kernels):
        sizes = f"{len(costs.kernels)} kernels, graph {graph.name!r} has {len(graph.kernels)}"
        raise ArgumentError(f"the costs are those of {sizes}: estimate them for this graph")
    if memory_bytes is None:
        return POLICIES[policy](graph, costs, num_streams, None, packed) if num_streams > 1 else plan_serial(graph)
    if policy != "serial":
        for streams, lookahead in product(range(num_streams, 1 if fewer else num_streams - 1, -1), _LOOKAHEADS):
            plan = POLICIES[policy](graph, costs, streams, lookahead, packed)
            if peak_bytes(plan) <= memory_bytes:
                return plan
    plan = plan_serial(graph)
    if peak_bytes(plan) > memory_bytes:
        least = f"graph {graph.name!r} needs {peak_bytes(plan)} bytes on one stream"
        raise ArgumentError(f"a budget of {memory_bytes} bytes is too small: {least}, so give it at least that")
    return plan
