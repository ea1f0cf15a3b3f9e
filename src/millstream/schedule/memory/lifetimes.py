"""Lifetimes of buffers under a plan, and how much memory that takes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from millstream.graph import PLANNED_ROLES, Allocate, Free, HappensBefore, Launch, MemoryLayout, Plan, step_storages


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The first and last step of a plan that need a buffer's memory. Positions are those in ``plan.steps``.

    Attributes:
        buffer: Id of a temporary or output that owns its memory.
        first: Position of its first write.
        stream: Stream of the first write.
        last_uses: Position of its last use on each stream that uses it, in the order of the host.
        reusable_from: For each stream, the position of the first step there that happens after every use, so that it
            and what follows on that stream may overwrite the memory; the number of steps where there is none.
    """

    buffer: str
    first: int
    stream: int
    last_uses: tuple[int, ...]
    reusable_from: tuple[int, ...]

    @property
    def last(self) -> int:
        """Position of its last use in the order of the host."""
        return self.last_uses[-1]

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
    last_on: dict[str, dict[int, int]] = {}  # by buffer and stream: what a stream did last is after what it did before
    for position, step in enumerate(plan.steps):
        reads, writes = step_storages(plan.graph, step)
        for storage in (*reads, *writes):
            if storage in planned:
                first.setdefault(storage, position)
                last_on.setdefault(storage, {})[step.stream] = position
    order = HappensBefore(plan)

    @functools.cache  # a kernel is the last to use several buffers
    def behind(use: int) -> tuple[int, ...]:
        return tuple([order.first_behind(stream, use) for stream in range(plan.num_streams)])

    lifetimes = {}
    for buffer, start in first.items():
        uses = tuple(sorted(last_on[buffer].values()))
        reusable = behind(uses[0]) if len(uses) == 1 else tuple(map(max, *map(behind, uses)))
        lifetimes[buffer] = Lifetime(buffer, start, plan.steps[start].stream, uses, reusable)
    return lifetimes


def peak_bytes(plan: Plan, device: str | None = None, layout: MemoryLayout | None = None) -> int:
    """Return how much memory a plan's temporaries and outputs take at most, known before it runs.

    Freed memory can be used again only on the stream that allocated it, as in PyTorch's allocator: each stream has a
    pool as large as the most it holds at one time, on the host's clock, and the pools add up. Memory that operators
    allocate belongs to the stream of their launch. Inputs, states and constants, which exist before, do not count.
    Linear in the number of steps.

    Args:
        plan: What will be run.
        device: Count only what lives there; by default everything.
        layout: The buffers in it take the bytes of its arena instead of their own; by default the plan's own.
    """
    layout = layout or plan.layout
    packed = layout.offset_of if layout else {}
    size_of = {
        buffer.id: buffer.num_bytes
        for buffer in plan.graph.buffers
        if buffer.role in PLANNED_ROLES and device in (None, buffer.device) and buffer.id not in packed
    }
    held = [0] * plan.num_streams
    peak = [0] * plan.num_streams
    for step in plan.steps:
        if isinstance(step, Allocate):
            held[step.stream] += size_of.get(step.buffer, 0)
        elif isinstance(step, Launch):
            held[step.stream] += sum(size_of.get(buffer, 0) for buffer in plan.graph.kernels[step.kernel].allocates)
        elif isinstance(step, Free):
            held[step.stream] -= size_of.get(step.buffer, 0)
        peak[step.stream] = max(peak[step.stream], held[step.stream])
    arena_bytes = layout.arena_bytes if layout and device in (None, layout.device) else 0
    return sum(peak) + arena_bytes
