"""The plan on one stream: the reference for every other, and always a candidate."""

from __future__ import annotations

from dataclasses import replace

from millstream.graph import PLANNED_ROLES, Allocate, Free, KernelGraph, Launch, Plan, Role, Step
from millstream.schedule.memory.packing import assign_offsets


def plan_serial(graph: KernelGraph) -> Plan:
    """Plan a graph on one stream, in program order.

    Contract:
        - Every kernel is launched once, in program order, on stream 0.
        - A temporary or output is allocated right before the kernel that writes it first, unless that kernel takes the
          memory itself (``kernel.allocates``).
        - A temporary is freed right after its last use, however its memory was taken. Outputs are never freed; the
          memory of inputs, states and constants is neither allocated nor freed.

    Linear in the number of reads and writes.

    Args:
        graph: A valid graph; see ``validate_graph``.
    """
    touched = [graph.touched_by[kernel.id] for kernel in graph.kernels]
    last_use = {storage: kernel for kernel, pair in enumerate(touched) for part in pair for storage in part}
    role_of = {buffer.id: buffer.role for buffer in graph.buffers}
    steps: list[Step] = []
    exists: set[str] = set()
    for kernel, (reads, writes) in zip(graph.kernels, touched, strict=True):
        exists.update(kernel.allocates)
        for storage in writes:
            if role_of[storage] in PLANNED_ROLES and storage not in exists:
                steps.append(Allocate(storage, 0))
                exists.add(storage)
        steps.append(Launch(kernel.id, 0))
        steps.extend(
            Free(storage, 0)
            for storage in dict.fromkeys((*reads, *writes))
            if role_of[storage] is Role.TEMPORARY and last_use[storage] == kernel.id
        )
    return Plan(graph, tuple(steps), 1, "serial")


def plan_alike(graph: KernelGraph, plan: Plan) -> Plan:
    """Plan a graph in the order and on the streams of a plan for another one, of which it differs in sizes alone.

    What is ordered, and why, does not depend on sizes; where buffers lie does, and is found again.

    Args:
        graph: With the kernels of the other one, their reads and writes.
        plan: For the other one, without races.
    """
    again = replace(plan, graph=graph, layout=None)
    return replace(again, layout=assign_offsets(again)) if plan.layout is not None else again
