"""Allocations and frees for launches that have their streams."""

from __future__ import annotations

from dataclasses import replace

from millstream.graph import Allocate, Free, Plan, Role, Step
from millstream.graph.order import HappensBefore
from millstream.schedule.memory.lifetimes import Lifetime, derive_lifetimes


def place_allocations(plan: Plan) -> Plan:
    """Put the ``Allocate`` and ``Free`` steps into a plan that has none.

    Contract:
        - Temporaries and outputs are allocated on the stream of their first write, right before it, unless the operator
          that writes takes the memory itself.
        - A temporary is freed on that stream as soon as it has come after every use. No wait is added for that: a
          temporary whose stream never learns of the last use elsewhere is kept until the end of the run.

    Args:
        plan: Launches, records and waits without races.
    """
    role_of = {buffer.id: buffer.role for buffer in plan.graph.buffers}
    allocated_inside = {buffer for kernel in plan.graph.kernels for buffer in kernel.allocates}
    order = HappensBefore(plan)
    allocated_at: dict[int, list[Step]] = {}
    freed_behind: dict[int, list[Step]] = {}
    for buffer, lifetime in derive_lifetimes(plan).items():
        if buffer not in allocated_inside:
            allocated_at.setdefault(lifetime.first, []).append(Allocate(buffer, lifetime.stream))
        position = _last_use_known(plan, order, lifetime)
        if role_of[buffer] is Role.TEMPORARY and position < len(plan.steps):
            freed_behind.setdefault(position, []).append(Free(buffer, lifetime.stream))
    steps: list[Step] = []
    for position, step in enumerate(plan.steps):
        steps += [*allocated_at.get(position, ()), step, *freed_behind.get(position, ())]
    return replace(plan, steps=tuple(steps))


def _last_use_known(plan: Plan, order: HappensBefore, lifetime: Lifetime) -> int:
    """Return the position of the use, or of the wait for one, after which a buffer's own stream knows of them all."""
    return max(
        use if plan.steps[use].stream == lifetime.stream else order.first_behind(lifetime.stream, use)
        for use in lifetime.last_uses
    )
