"""Find which steps of a plan touch which memory."""

from __future__ import annotations

from functools import cached_property

from millstream.check.reports import Access, Action
from millstream.graph import Allocate, Free, HappensBefore, Launch, Plan, step_storages

USES = frozenset({Action.READ, Action.WRITE, Action.UPDATE, Action.PART})
"""What depends on a buffer's contents; the rest only takes its memory or gives it back."""

Touch = tuple[int, Action]
"""The position of a step, and what it does to the buffer at hand."""

_STORY_LENGTH = 6  # accesses: enough for a write, a few readers and the free


class Accesses:
    """The accesses to every buffer that owns memory, in the order of the host.

    Attributes:
        plan: Whose accesses these are.
        by_buffer: Positions of the steps and what they do, by buffer in the order of first access.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.by_buffer: dict[str, list[Touch]] = {}
        for position, step in enumerate(plan.steps):
            if isinstance(step, Launch):
                reads, writes = step_storages(plan.graph, step)
                for storage in reads:
                    self._add(storage, position, Action.UPDATE if storage in writes else Action.READ)
                for storage in writes:
                    if storage not in reads:
                        is_part = plan.graph.writes_part(step.kernel, storage)
                        self._add(storage, position, Action.PART if is_part else Action.WRITE)
            elif isinstance(step, (Allocate, Free)):
                action = Action.ALLOCATE if isinstance(step, Allocate) else Action.FREE
                self._add(plan.graph.storage_of[step.buffer], position, action)

    @cached_property
    def order(self) -> HappensBefore:
        """Which steps of the plan are ordered before which.

        Raises:
            PlanError: A ``Wait`` names an event that no earlier ``Record`` records.
        """
        return HappensBefore(self.plan)

    def _add(self, buffer: str, position: int, action: Action) -> None:
        self.by_buffer.setdefault(buffer, []).append((position, action))

    def describe(self, position: int, action: Action) -> Access:
        """Describe the access and its place, in the words of a report."""
        step = self.plan.steps[position]
        if isinstance(step, Launch):
            kernel = self.plan.graph.kernels[step.kernel]
            return Access(position, step.stream, action, kernel.id, kernel.name, kernel.source)
        return Access(position, step.stream, action)

    def story(self, buffer: str, until: int) -> tuple[Access, ...]:
        """Tell the last accesses to a buffer up to the step at position ``until``."""
        touched = [touch for touch in self.by_buffer[buffer] if touch[0] <= until]
        return tuple(self.describe(*touch) for touch in touched[-_STORY_LENGTH:])
