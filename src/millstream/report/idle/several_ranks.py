"""The joint report of several ranks, for a terminal."""

from __future__ import annotations

from millstream.insight import Cause, Severity, Site
from millstream.insight.ranks import MergedFindings, RankShare
from millstream.report.idle.remedies import TITLES
from millstream.report.idle.source_lines import code, place
from millstream.report.words import count, duration, percent, table


def to_text(found: MergedFindings) -> str:
    """The diagnosis across ranks, and a row for each of them."""
    step = found.step_ns
    head = f"{count(len(found.ranks), 'rank')}, {duration(step)} a step, "
    if found.severity is Severity.UNRELIABLE:
        return f"{head}no collective in common: who waits for whom cannot be determined.\n" + "\n".join(_rows(found))
    waits = f"{duration(found.waited_ns)} a step waiting for others ({percent(found.waited_ns, step)})"
    head += f"{count(found.num_collectives, 'collective')}: "
    head += f"a rank spends {waits}, {duration(found.transfer_ns)} in transfer."
    return "\n".join([head, *_diagnosis(found), *_rows(found)])


def _diagnosis(found: MergedFindings) -> list[str]:
    late = found.straggler
    if late is not None:
        lines = [
            f"{found.severity:<8}  The others wait for rank {late.rank}: {duration(late.caused_ns)} a step "
            f"({percent(late.caused_ns, found.step_ns)})."
        ]
        why = "It computes for longer than the others: give it less to do, or a quicker device."
        if late.cause is not None and late.cause_ns >= late.caused_ns / 4:
            site = Site(*late.site) if late.site is not None else None
            why = f"{TITLES[Cause(late.cause)]} there, {duration(late.cause_ns)} a step: {place(site)}  {code(site)}"
        return [*lines, f"{'':10}{why}"]
    if found.severity is Severity.HEALTHY:
        return [f"{found.severity}  Ranks come to their collectives together."]
    if found.transfer_ns >= found.waited_ns:
        share = percent(found.transfer_ns, found.step_ns)
        return [
            f"{found.severity:<8}  Transfer takes {duration(found.transfer_ns)} a step ({share}), and no rank is late.",
            f"{'':10}Overlap it with the backward pass, send fewer or smaller tensors, or take larger batches.",
        ]
    return [f"{found.severity:<8}  Ranks are late in turn: steps differ, and each time all wait for the slowest."]


def _rows(found: MergedFindings) -> list[str]:
    return table(
        ("rank", "step", "waited", "waited for", "idles most for", "line"), list(map(_cells, found.ranks)), {1, 2, 3}
    )


def _cells(share: RankShare) -> tuple[str, ...]:
    site = place(Site(*share.site)) if share.site is not None else ""
    cause = f"{share.cause} {duration(share.cause_ns)}" if share.cause is not None else ""
    times = duration(share.step_ns), duration(share.waited_ns), duration(share.caused_ns)
    return str(share.rank), *times, cause, site
