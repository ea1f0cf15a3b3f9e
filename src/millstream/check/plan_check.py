"""Every plan is checked before it runs."""

from __future__ import annotations

from millstream.check.lifetime_errors import find_lifetime_errors
from millstream.check.overlaps import check_alignment, find_overlaps
from millstream.check.races import find_races
from millstream.check.reports import LifetimeError, Overlap, Race
from millstream.check.touches import Accesses
from millstream.errors import PlanError
from millstream.graph import MemoryLayout, Plan, validate_plan

_MOST_TOLD = 3  # faults in one message: the others are often consequences of the first


def check_plan(plan: Plan, layout: MemoryLayout | None = None) -> None:
    """Prove that a plan is safe to run, or raise.

    Args:
        plan: What is to be run.
        layout: Where its temporaries stand, if they share an arena; by default as the plan itself says.

    Raises:
        GraphError: The plan's graph is not valid; see ``validate_graph``.
        PlanError: The plan is not valid (see ``validate_plan``), or has races, lifetime errors or overlaps; the message
            tells the story of the first ones. Or the layout does not fit it; see ``find_overlaps`` and
            ``check_alignment``.
    """
    validate_plan(plan)
    accesses = Accesses(plan)
    faults: list[Race | LifetimeError | Overlap] = [*find_races(plan, accesses), *find_lifetime_errors(plan, accesses)]
    layout = layout or plan.layout
    if layout is not None:
        faults += find_overlaps(plan, layout, accesses)
        check_alignment(plan, layout)
    if not faults:
        return
    count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
    message = f"plan {plan.policy!r} of graph {plan.graph.name!r} is not safe to run, {count} found"
    told = "\n\n".join(map(str, faults[:_MOST_TOLD]))
    more = f"\n\n... and {len(faults) - _MOST_TOLD} more" if len(faults) > _MOST_TOLD else ""
    first = faults[0].first
    raise PlanError(f"{message}:\n\n{told}{more}", kernel=first.name or None, buffer=faults[0].buffer, step=first.step)
