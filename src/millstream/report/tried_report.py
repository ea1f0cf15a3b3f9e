"""What was tried beside the plan that runs: other plans, and other ways to compute some kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from millstream.graph import Candidate, Spread
from millstream.report.words import count, duration, shorten, size, table
from millstream.schedule.improve import Tried

_GROUPS = 56  # characters that name groups of sites


def alternative_lines(alternatives: Sequence[Tried]) -> list[str]:
    """Return what was tried in place of the usual kernels, at which sites, and what the whole program took."""
    rows = [
        (
            each.alternative,
            shorten("; ".join(each.groups), _GROUPS),
            str(each.sites),
            duration(each.usual_ns),
            duration(each.own_ns),
            each.outcome,
        )
        for each in alternatives
    ]
    return table(("alternative", "at", "sites", "without", "with", "outcome"), rows, right={2, 3, 4}) if rows else []


def candidate_lines(candidates: Sequence[Candidate]) -> list[str]:
    """The plans that were measured, and why the others were not; nothing where there was no choice."""
    if len(candidates) < 2:
        return []
    rows = [
        (
            each.policy if each.spread is Spread.PACKED else f"{each.policy}, {each.spread}",
            str(each.streams),
            str(each.waits),
            size(each.peak_bytes),
            duration(each.predicted_ns),
            duration(each.measured_ns),
            each.outcome,
        )
        for each in candidates
        if each.is_chosen or each.measured_ns is not None
    ]
    head = ("plan", "streams", "waits", "peak memory", "predicted", "measured", "outcome")
    lines = table(head, rows, right={1, 2, 3, 4, 5})
    dropped = Counter(each.outcome for each in candidates if not each.is_chosen and each.measured_ns is None)
    if dropped:
        others = (f"{count(number, 'plan')} ({outcome})" for outcome, number in dropped.items())
        lines.append(f"  not measured: {', '.join(others)}")
    return lines
