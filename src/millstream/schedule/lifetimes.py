"""How long buffers live under a plan, and how much memory that takes."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.graph import PLANNED_ROLES, Allocate, Free, HappensBefore, Launch, Plan, step_storages


@dataclass(frozen=True, slots=True)
class Lifetime:
    """From when to when a plan needs a buffer's memory. Positions are those in ``plan.steps``.

    Attributes:
        buffer: Id of a temporary or output that owns its memory.
        first: Position of its first write.
        last: Position of its last use in the order of the host.
        stream: Stream of the first write.
        reusable_from: For each stream, the position of the first step there that happens after every use, so that it
            and what follows on that stream may overwrite the memory; the number of steps where there is none.
    """

    buffer: str
    first: int
    last: int
    stream: int
    reusable_from: tuple[int, ...]

    def overlaps(self, other: Lifetime) -> bool:
        """Tell whether both may be in use at one time, so that they cannot share memory."""
        return self.reusable_from[other.stream] > other.first and other.reusable_from[self.stream] > self.first


def derive_lifetimes(plan: Plan) -> dict[str, Lifetime]:
    """Derive when each temporary and output that a plan writes is in use.

    The plan's own ``Allocate`` and ``Free`` steps are not looked at: this tells where they may stand.
    O(accesses + buffers * streams² * log steps) time.

    Args:
        plan: A plan without races, so that a buffer's first write happens before its other uses.

    Returns:
        Lifetimes by buffer, in the order of first writes.
    """
    planned = {buffer.id for buffer in plan.graph.buffers if buffer.role in PLANNED_ROLES}
    first: dict[str, int] = {}
    last_on: dict[str, dict[int, int]] = {}  # by buffer and stream: what a stream did last is behind what it did before
    for position, step in enumerate(plan.steps):
        reads, writes = step_storages(plan.graph, step)
        for storage in (*reads, *writes):
            if storage in planned:
                first.setdefault(storage, position)
                last_on.setdefault(storage, {})[step.stream] = position
    order = HappensBefore(plan)
    lifetimes = {}
    for buffer, start in first.items():
        uses = last_on[buffer].values()
        reusable = tuple(max(order.first_behind(stream, use) for use in uses) for stream in range(plan.num_streams))
        lifetimes[buffer] = Lifetime(buffer, start, max(uses), plan.steps[start].stream, reusable)
    return lifetimes


def peak_bytes(plan: Plan, device: str | None = None) -> int:
    """Return the most bytes that a plan's temporaries and outputs hold at one time, on the host's clock.

    Memory that operators allocate counts from their launch. Inputs, states and constants, which exist before, do not
    count. Linear in the number of steps.

    Args:
        plan: What will be run.
        device: Count only what lives there; by default everything.
    """
    size_of = {
        buffer.id: buffer.num_bytes
        for buffer in plan.graph.buffers
        if buffer.role in PLANNED_ROLES and device in (None, buffer.device)
    }
    held = peak = 0
    for step in plan.steps:
        if isinstance(step, Allocate):
            held += size_of.get(step.buffer, 0)
        elif isinstance(step, Launch):
            held += sum(size_of.get(buffer, 0) for buffer in plan.graph.kernels[step.kernel].allocates)
        elif isinstance(step, Free):
            held -= size_of.get(step.buffer, 0)
        peak = max(peak, held)
    return peak
