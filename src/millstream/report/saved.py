"""Data-parallel steps as data: what ``.save("step.json")`` writes and ``millstream simulate`` reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millstream.cost import Costs, KernelCost
from millstream.errors import ArgumentError
from millstream.graph import KernelKind, Plan, format_plan, parse_plan, validate_graph
from millstream.report.traffic import CommunicationReport

KEY, FORMAT = "millstream_steps", 1
_MOST_NS = 1 << 42  # 73 minutes: more is a spoiled file


@dataclass(frozen=True)
class SavedStep:
    """A captured step that exchanges something.

    Attributes:
        plan: Of its kernels and collectives.
        costs: Of both.
        is_one_graph: Whether the plan is one that ran with its collectives in it.
        is_calculated: No kernel was measured.
        num_processes: With which it was captured.
    """

    plan: Plan
    costs: Costs
    is_one_graph: bool
    is_calculated: bool
    num_processes: int


def saved_steps(reports: Iterable[CommunicationReport]) -> dict[str, Any]:
    """An entry for a file of JSON; empty where nothing is exchanged."""
    steps = [
        {
            "plan": format_plan(each.plan),
            "costs": [[cost.duration_ns, cost.compute_share, cost.memory_share] for cost in each.costs.kernels],
            "wait_ns": each.costs.wait_ns,
            "start_ns": each.costs.start_ns,
            "crowding": each.costs.crowding,
            "one_graph": each.is_one_graph,
            "calculated": each.is_calculated,
            "processes": each.num_processes,
        }
        for each in reports
    ]
    return {KEY: {"format": FORMAT, "steps": steps}} if steps else {}


def read_steps(text: str) -> list[SavedStep]:
    """Read what ``saved_steps`` gave.

    Raises:
        ArgumentError: The text is no such file, or one of a step that exchanges nothing.
    """
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or KEY not in content:
            raise ArgumentError(
                "there is no data-parallel step in it: write it with ms.explain(step).save('step.json'), where step "
                "has a DistributedDataParallel model or is made by @ms.step(data_parallel=True), in processes that "
                "torchrun has started"
            )
        if content[KEY]["format"] != FORMAT:
            raise ArgumentError(f"its format is {content[KEY]['format']!r}, expected {FORMAT}: write it again")
        return [_read(each) for each in content[KEY]["steps"]]
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"it is not what ms.explain(step).save wrote: {error!r}") from error


def _read(step: dict[str, Any]) -> SavedStep:
    plan = parse_plan(step["plan"])
    validate_graph(plan.graph)
    kernels = tuple(KernelCost(int(ns), float(c), float(m)) for ns, c, m in step["costs"])
    if len(kernels) != len(plan.graph.kernels):
        raise ValueError(f"{len(kernels)} costs of {len(plan.graph.kernels)} kernels")
    if not any(kernel.kind is KernelKind.COLLECTIVE for kernel in plan.graph.kernels):
        raise ValueError("no kernel is a collective")
    for kernel in kernels:
        shares = kernel.compute_share, kernel.memory_share
        if not (0 <= kernel.duration_ns < _MOST_NS and all(0 <= share <= 1 for share in shares)):
            raise ValueError(f"a kernel takes {kernel.duration_ns} ns and the shares {shares}")
    wait_ns, start_ns, crowding = int(step["wait_ns"]), int(step["start_ns"]), float(step["crowding"])
    if not (0 <= wait_ns < _MOST_NS and 0 <= start_ns < _MOST_NS and 0 <= crowding < 100):
        raise ValueError(f"waits take {wait_ns} ns, starts {start_ns} ns, crowding {crowding}")
    costs = Costs(kernels, wait_ns, start_ns, crowding)
    return SavedStep(plan, costs, bool(step["one_graph"]), bool(step["calculated"]), int(step["processes"]))
