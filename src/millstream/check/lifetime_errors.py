"""Lifetime errors: memory used when it does not belong to the buffer."""

from __future__ import annotations

from millstream.check.reports import Action, LifetimeError, LifetimeFault
from millstream.check.touches import USES, Accesses
from millstream.graph import PLANNED_ROLES, HappensBefore, Launch, Plan, Role


def find_lifetime_errors(plan: Plan, accesses: Accesses | None = None) -> list[LifetimeError]:
    """Find uses of memory in ``plan`` outside its life, and streams that are not joined, without running it.

    The life of a temporary or output begins where it is allocated: by an ``Allocate``, or by the launch of the operator
    that takes its memory. Every use must happen after that. It ends with its ``Free``, which gives the memory back to
    the pool of the stream that allocated it, so every use must happen before the ``Free`` on that stream: then whatever
    gets the memory next from that pool comes after them, and no reuse can be too early. Never freeing a buffer is no
    error: its memory goes with the plan.

    At the end, all work on other streams must happen before the end of stream 0, where the caller continues: else the
    caller could read outputs and states too early, overwrite inputs that are still read, or run the plan again over its
    own temporaries. Nothing joins the streams by itself (see ``HappensBefore``).

    O(accesses + waits * streams) time.

    Args:
        plan: Steps in the order the host issues them, valid by ``validate_plan``.
        accesses: Of the plan, where they are known already.

    Returns:
        One entry per offending pair of steps and buffer, in host order of the later step, then one per stream that is
        not joined; empty exactly when there is no error.

    Raises:
        PlanError: A ``Wait`` names an event that no earlier ``Record`` records.
    """
    accesses = accesses or Accesses(plan)
    order = accesses.order
    allocated_by = {buffer: kernel.id for kernel in plan.graph.kernels for buffer in kernel.allocates}
    launch_of = {step.kernel: position for position, step in enumerate(plan.steps) if isinstance(step, Launch)}
    errors: list[LifetimeError] = []
    for buffer in accesses.by_buffer:
        if plan.graph.buffer_of[buffer].role in PLANNED_ROLES:
            born = launch_of.get(allocated_by[buffer]) if buffer in allocated_by else None
            errors += _Life(accesses, order, buffer, born).find_errors()
    errors.sort(key=lambda error: max(access.step for access in (error.first, error.second) if access is not None))
    return errors + _find_missing_joins(accesses, order)


class _Life:
    """One buffer's allocations, uses and frees, by position."""

    def __init__(self, accesses: Accesses, order: HappensBefore, buffer: str, born: int | None) -> None:
        self.accesses = accesses
        self.order = order
        self.buffer = buffer
        touched = accesses.by_buffer[buffer]
        self.action_at = dict(touched)
        self.allocations = [position for position, action in touched if action is Action.ALLOCATE]
        if born is not None:
            self.allocations.append(born)
            self.allocations.sort()
        self.frees = [position for position, action in touched if action is Action.FREE]
        self.uses = [position for position, action in touched if action in USES]

    def find_errors(self) -> list[LifetimeError]:
        return [*self._find_birth_errors(), *self._find_death_errors()]

    def _find_birth_errors(self) -> list[LifetimeError]:
        if not self.allocations:
            return [self._error(LifetimeFault.NEVER_ALLOCATED, use) for use in self.uses[:1]]
        born, *again = self.allocations
        errors = [self._error(LifetimeFault.ALLOCATED_TWICE, born, other) for other in again]
        unborn = [use for use in self.uses if use != born and not self.order.before(born, use)]
        return errors + [self._error(LifetimeFault.USE_BEFORE_ALLOCATE, use, born) for use in unborn]

    def _find_death_errors(self) -> list[LifetimeError]:
        if not self.frees:
            return []
        died, *again = self.frees
        errors = [self._error(LifetimeFault.FREED_TWICE, died, other) for other in again]
        steps = self.accesses.plan.steps
        born = self.allocations[0] if self.allocations else None
        if born is None or born > died:
            errors.append(self._error(LifetimeFault.FREE_BEFORE_ALLOCATE, died, born))
        elif steps[born].stream != steps[died].stream:
            errors.append(self._error(LifetimeFault.FREED_ELSEWHERE, born, died))
        for use in self.uses:
            if use > died:
                errors.append(self._error(LifetimeFault.USE_AFTER_FREE, died, use))
            elif not self.order.before(use, died):
                errors.append(self._error(LifetimeFault.EARLY_FREE, use, died))
        return errors

    def _error(self, fault: LifetimeFault, first: int, second: int | None = None) -> LifetimeError:
        describe = self.accesses.describe
        return LifetimeError(
            self.buffer,
            fault,
            describe(first, self.action_at[first]),
            None if second is None else describe(second, self.action_at[second]),
            self.accesses.story(self.buffer, max(first, second if second is not None else first)),
        )


def _find_missing_joins(accesses: Accesses, order: HappensBefore) -> list[LifetimeError]:
    """Report each stream whose last work is not ordered before the end of stream 0."""
    plan = accesses.plan
    unjoined: dict[int, list[int]] = {}
    for position, step in enumerate(plan.steps):
        if isinstance(step, Launch) and not order.joined(position):
            unjoined.setdefault(step.stream, []).append(position)
    if not unjoined:
        return []
    touched_at: dict[int, list[tuple[str, Action]]] = {}
    for buffer, touched in accesses.by_buffer.items():
        for position, action in touched:
            touched_at.setdefault(position, []).append((buffer, action))
    errors = []
    for stream in sorted(unjoined):
        # What the caller sees first: a result that is not ready, rather than an input or temporary still in use.
        candidates = [(p, *touch) for p in reversed(unjoined[stream]) for touch in touched_at.get(p, [])]
        results = [entry for entry in candidates if _is_result(plan, *entry[1:])]
        if not candidates:
            first = accesses.describe(unjoined[stream][-1], Action.WRITE)
            errors.append(LifetimeError(None, LifetimeFault.MISSING_JOIN, first, None, ()))
            continue
        position, buffer, action = (results or candidates)[0]
        story = accesses.story(buffer, len(plan.steps))
        first = accesses.describe(position, action)
        errors.append(LifetimeError(buffer, LifetimeFault.MISSING_JOIN, first, None, story))
    return errors


def _is_result(plan: Plan, buffer: str, action: Action) -> bool:
    return action is not Action.READ and plan.graph.buffer_of[buffer].role in (Role.OUTPUT, Role.STATE, Role.INPUT)
