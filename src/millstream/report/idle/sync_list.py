"""The list of reads, copies and waits for people: which line, how often, and what to write instead."""

from __future__ import annotations

from typing import Any

from millstream.insight.syncs import SyncFindings, SyncKind, SyncRow
from millstream.report.idle.source_lines import code, place
from millstream.report.words import count, duration, table

_REMEDIES = {
    SyncKind.READ: "read it later: ms.fetch(t), or every 100 steps; torch.where instead of if",
    SyncKind.TO_LIST: "ms.fetch(t), or .to('cpu', non_blocking=True) and an event",
    SyncKind.SIZE: "keep the size: torch.where(mask, t, 0), or sums weighted by the mask",
    SyncKind.TO_DEVICE: "pin_memory=True and non_blocking=True, or ms.feed(loader, device); make constants there",
    SyncKind.PINNED: "take it once and use it again, as ms.feed does",
    SyncKind.SYNCHRONIZE: "leave it out, or wait for one event",
    SyncKind.EMPTY_CACHE: "leave it out",
    SyncKind.GRAPH_BREAK: "move it out of the compiled function",
    SyncKind.RECOMPILE: "torch.compile(..., dynamic=True), or inputs of few sizes",
}


def to_text(found: SyncFindings, limit: int = 40) -> str:
    """The list for a terminal."""
    total = sum(row.count for row in found.rows)
    would = f"{count(total, 'call')} that would wait on a GPU"
    what = would if found.would_wait else f"{total} reads, copies and waits"
    lines = [f"{what}, on {count(len(found.rows), 'line')}, in {count(found.num_steps, 'optimizer step')}."]
    if not found.rows:
        return lines[0]
    cells = [_cells(row, found) for row in found.rows[:limit]]
    head = ("count", "a step", *(() if found.would_wait else ("time",)), "what", "line", "instead")
    lines += table(head, cells, right={0, 1} if found.would_wait else {0, 1, 2})
    if len(found.rows) > limit:
        lines.append(f"  … and {count(len(found.rows) - limit, 'more line')}")
    return "\n".join(lines)


def _cells(row: SyncRow, found: SyncFindings) -> tuple[str, ...]:
    inside = f" in {place(row.inside)}" if row.inside is not None else ""
    each = f"{row.count / found.num_steps:.3g}" if found.num_steps else "–"
    what = f"{row.kind}, pageable" if row.is_pageable else str(row.kind)
    where = f"{place(row.site)}{inside}  {code(row.site)}"
    reason = f" ({row.detail})" if row.kind in (SyncKind.GRAPH_BREAK, SyncKind.RECOMPILE) else ""
    time = () if found.would_wait else (duration(row.total_ns),)
    return (str(row.count), each, *time, what, where, _REMEDIES[row.kind] + reason[:100])


def to_dict(found: SyncFindings) -> dict[str, Any]:
    """Plain data, fit for JSON."""
    return {
        "num_steps": found.num_steps,
        "would_wait": found.would_wait,
        "rows": [
            {
                "kind": str(row.kind),
                "file": row.site.file if row.site is not None else None,
                "line": row.site.line if row.site is not None else None,
                "count": row.count,
                "total_ns": row.total_ns,
                "detail": row.detail,
                "remedy": _REMEDIES[row.kind],
            }
            for row in found.rows
        ],
    }
