"""Each time the host waited for the device, copied, or had a graph broken: which lines, how often, how long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from millstream.insight.records import Note, Site


class SyncKind(StrEnum):
    """The kind of a synchronization. The value is what reports print."""

    READ = "read of a value"  #: .item(), float(t), if t:, torch.equal
    TO_LIST = "read of a tensor"  #: .tolist(), .cpu(), copies from the device
    SIZE = "size from values"  #: masks as indices, nonzero, unique: the host needs the result's size
    TO_DEVICE = "copy to the device"
    PINNED = "pinned memory taken"
    SYNCHRONIZE = "synchronize"
    EMPTY_CACHE = "empty_cache"
    GRAPH_BREAK = "graph break"
    RECOMPILE = "recompilation"


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """One of them.

    Attributes:
        kind: What happened.
        site: The user's line; ``None`` if there is none.
        inside: The innermost library line below it.
        took_ns: How long the call took.
        detail: The operator, or the reason.
        is_pageable: Of a copy: from or to memory that is not pinned, which makes it wait.
    """

    kind: SyncKind
    site: Site | None
    inside: Site | None = None
    took_ns: int = 0
    detail: str = ""
    is_pageable: bool = False


@dataclass(frozen=True, slots=True)
class SyncRow:
    """All events of one kind at one line."""

    kind: SyncKind
    site: Site | None
    inside: Site | None
    count: int
    total_ns: int
    detail: str
    is_pageable: bool


@dataclass(frozen=True)
class SyncFindings:
    """The synchronizations of a run.

    Attributes:
        rows: The most frequent first.
        num_steps: Optimizer steps in it.
        would_wait: There is no GPU: these are the calls that would wait for one.
    """

    rows: tuple[SyncRow, ...]
    num_steps: int
    would_wait: bool


def group(events: Iterable[SyncEvent], notes: Sequence[Note], num_steps: int, *, would_wait: bool) -> SyncFindings:
    """Put events of one kind at one line together; graph breaks and recompilations come from notes."""
    found: dict[tuple[SyncKind, Site | None], list[SyncEvent]] = defaultdict(list)
    for event in events:
        found[event.kind, event.site].append(event)
    for note in notes:
        kind = SyncKind.GRAPH_BREAK if note.cause == "graph break" else SyncKind.RECOMPILE
        found[kind, note.site].append(SyncEvent(kind, note.site, detail=note.text))
    rows = [
        SyncRow(
            kind,
            site,
            group[0].inside,
            len(group),
            sum(event.took_ns for event in group),
            group[-1].detail,
            any(event.is_pageable for event in group),
        )
        for (kind, site), group in found.items()
    ]
    rows.sort(key=lambda row: (-row.count, -row.total_ns, str(row.site)))
    return SyncFindings(tuple(rows), num_steps, would_wait)
