"""Policies: a graph, its costs and a number of streams become a plan."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from millstream.cost import Costs
from millstream.errors import ArgumentError
from millstream.graph import KernelGraph, Plan, derive_dependencies
from millstream.schedule.allocation import place_allocations
from millstream.schedule.assignment import Assign, assign_chains, assign_list, assign_slack
from millstream.schedule.lifetimes import peak_bytes
from millstream.schedule.serial import plan_serial
from millstream.schedule.waits import place_waits


class Policy(Protocol):
    """Makes a plan of a graph. The same arguments give the same plan, without races and lifetime errors."""

    def __call__(self, graph: KernelGraph, costs: Costs, num_streams: int) -> Plan:
        """Plan a graph on at most ``num_streams`` streams."""
        ...


def _plan_serial(graph: KernelGraph, costs: Costs, num_streams: int) -> Plan:  # noqa: ARG001  # a Policy's signature
    return plan_serial(graph)


def _plan_assigned(graph: KernelGraph, costs: Costs, num_streams: int, name: str, assign: Assign) -> Plan:
    """Go the way of every policy with streams: assign them, order the launches, place the waits, then the memory."""
    predecessors = [[found.kernel for found in each] for each in derive_dependencies(graph)]
    assignment = assign(predecessors, [cost.duration_ns for cost in costs.kernels], costs.wait_ns, num_streams)
    num_used = max(assignment.stream_of, default=0) + 1
    steps = place_waits(assignment.launch_order(), assignment.stream_of, predecessors, num_used)
    return place_allocations(Plan(graph, tuple(steps), num_used, name))


def _plan_chains(graph: KernelGraph, costs: Costs, num_streams: int) -> Plan:
    return _plan_assigned(graph, costs, num_streams, "chains", assign_chains)


def _plan_list(graph: KernelGraph, costs: Costs, num_streams: int) -> Plan:
    return _plan_assigned(graph, costs, num_streams, "list", assign_list)


def _plan_slack(graph: KernelGraph, costs: Costs, num_streams: int) -> Plan:
    return _plan_assigned(graph, costs, num_streams, "slack", assign_slack)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"serial": _plan_serial, "chains": _plan_chains, "slack": _plan_slack, "list": _plan_list}
)
"""Policies by name; see ``plan_serial`` and the functions ``assign_*`` for what they do."""


def plan_graph(
    graph: KernelGraph,
    costs: Costs,
    num_streams: int,
    policy: str = "list",
    *,
    memory_bytes: int | None = None,
) -> Plan:
    """Plan a graph by a policy, within a memory budget.

    Args:
        graph: A valid graph; see ``validate_graph``.
        costs: Of its kernels.
        num_streams: The most streams to use, at least one.
        policy: One of ``POLICIES``.
        memory_bytes: The most that temporaries and outputs may take, by ``peak_bytes``. Over it, fewer streams are
            taken, down to the serial plan.

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
    while num_streams > 1 and policy != "serial":
        plan = POLICIES[policy](graph, costs, num_streams)
        if memory_bytes is None or peak_bytes(plan) <= memory_bytes:
            return plan
        num_streams -= 1
    plan = plan_serial(graph)
    if memory_bytes is not None and peak_bytes(plan) > memory_bytes:
        least = f"graph {graph.name!r} needs {peak_bytes(plan)} bytes on one stream"
        raise ArgumentError(f"a budget of {memory_bytes} bytes is too small: {least}, so give it at least that")
    return plan
