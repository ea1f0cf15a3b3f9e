"""Races: conflicting uses that nothing orders."""

from __future__ import annotations

from itertools import combinations

from millstream.check.reports import Action, Race
from millstream.check.touches import USES, Accesses, Touch
from millstream.graph import HappensBefore, Launch, Plan

_CONFLICTS = {
    Action.READ: USES - {Action.READ},
    Action.PART: USES - {Action.PART},
    Action.WRITE: USES,
    Action.UPDATE: USES,
}
"""By what a step does to a buffer: what other steps must not do to it without order."""


def find_races(plan: Plan, accesses: Accesses | None = None) -> list[Race]:
    """Find conflicting uses in ``plan`` that are not ordered as the program orders them, without running it.

    Two launches or copies *conflict* when they touch the same memory and at least one writes it, unless both write
    parts of their own. They must be ordered
    as in the program, or, where a copy is involved, which the program does not know, as the host issues them. A
    conflict is a *race* unless the order within one stream, or a chain of ``Record`` and ``Wait`` steps, does so. Every
    stream starts after the start of stream 0 (see ``HappensBefore``), so what the caller issued before the plan races
    with nothing.

    O(accesses + waits * streams) time for a plan without races; for each buffer that has one, all pairs of its uses are
    looked at.

    Args:
        plan: Steps in the order the host issues them, valid by ``validate_plan``.
        accesses: Of the plan, where they are known already.

    Returns:
        One entry per racing pair and buffer, in host order of the later use; empty exactly when the plan has no race.

    Raises:
        PlanError: A ``Wait`` names an event that no earlier ``Record`` records.
    """
    accesses = accesses or Accesses(plan)
    order = accesses.order
    races = []
    for buffer, touched in accesses.by_buffer.items():
        uses = [use for use in touched if use[1] in USES]
        if not _is_ordered(plan, order, uses):
            races += _list_races(accesses, order, buffer, uses)
    races.sort(key=lambda race: max((race.first.step, race.second.step), (race.second.step, race.first.step)))
    return races


def _is_ordered(plan: Plan, order: HappensBefore, uses: list[Touch]) -> bool:
    """Tell whether a buffer has no race, from neighbouring uses only: happens-before is transitive."""
    last_writes: list[int] = []  # the last one; or those of parts, if they came last
    before_parts: list[int] | None = None  # what must be before each of the latter
    reads_since: list[int] = []
    newest = dict.fromkeys(_CONFLICTS, -1)  # by action, the newest kernel: the program's order
    for position, action in uses:
        step = plan.steps[position]
        if isinstance(step, Launch):
            if step.kernel < max(newest[other] for other in _CONFLICTS[action]):
                return False
            newest[action] = max(newest[action], step.kernel)
        if action is Action.READ:
            if not all(order.before(write, position) for write in last_writes):
                return False
            reads_since.append(position)
            continue
        is_one_more = action is Action.PART and not reads_since and before_parts is not None
        needed = before_parts if is_one_more else [*last_writes, *reads_since]
        if not all(order.before(other, position) for other in needed or ()):
            return False
        last_writes = [*last_writes, position] if is_one_more else [position]
        before_parts = needed if action is Action.PART else None
        reads_since = []
    return True


def _list_races(accesses: Accesses, order: HappensBefore, buffer: str, uses: list[Touch]) -> list[Race]:
    steps = accesses.plan.steps
    races = []
    for earlier, later in combinations(uses, 2):
        if later[1] not in _CONFLICTS[earlier[1]]:
            continue
        one, other = steps[earlier[0]], steps[later[0]]
        swapped = isinstance(one, Launch) and isinstance(other, Launch) and one.kernel > other.kernel
        ordered = order.before(earlier[0], later[0])
        if ordered and not swapped:
            continue
        first, second = (later, earlier) if swapped else (earlier, later)
        story = accesses.story(buffer, later[0])
        races.append(Race(buffer, accesses.describe(*first), accesses.describe(*second), swapped and ordered, story))
    return races
