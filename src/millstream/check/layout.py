"""Overlaps: buffers that share bytes of an arena while both may be in use."""

from __future__ import annotations

from bisect import bisect_right

from millstream.check.accesses import USES, Accesses
from millstream.check.reports import Overlap
from millstream.errors import PlanError
from millstream.graph import HappensBefore, MemoryLayout, Plan


def find_overlaps(plan: Plan, layout: MemoryLayout) -> list[Overlap]:
    """Find buffers on the same bytes of ``layout`` of which one is not over before the other is first used.

    Each range of bytes is followed through its owners, in the order in which the host issues their first uses; it is
    enough to compare each owner with the one before it, since happens-before is transitive.

    Args:
        plan: A plan without races.
        layout: Where its temporaries stand.

    Returns:
        One entry per buffer that takes bytes too early and range taken, in host order of the taking.

    Raises:
        PlanError: The layout names an unknown buffer or a view, or puts a buffer outside its arena.
    """
    _check_bounds(plan, layout)
    order = HappensBefore(plan)
    accesses = Accesses(plan)
    uses = {
        buffer: [use for use in touched if use[1] in USES]
        for buffer, touched in accesses.by_buffer.items()
        if buffer in layout.offset_of
    }
    owners = _Ranges()
    overlaps = []
    for buffer in sorted((buffer for buffer in uses if uses[buffer]), key=lambda buffer: uses[buffer][0]):
        first_use = uses[buffer][0]
        start = layout.offset_of[buffer]
        for low, high, owner in owners.take(start, start + plan.graph.buffer_of[buffer].num_bytes, buffer):
            unfinished = [use for use in uses[owner] if not order.before(use[0], first_use[0])]
            if unfinished:
                access = accesses.describe(*unfinished[-1])
                overlaps.append(Overlap(owner, buffer, low, high, access, accesses.describe(*first_use)))
    return overlaps


def _check_bounds(plan: Plan, layout: MemoryLayout) -> None:
    for buffer_id, offset in layout.offset_of.items():
        buffer = plan.graph.buffer_of.get(buffer_id)
        if buffer is None or buffer.alias_of is not None:
            what = "unknown buffer" if buffer is None else "view"
            raise PlanError(f"the layout names {what} {buffer_id!r}: lay out buffers that own memory", buffer=buffer_id)
        if offset < 0 or offset + buffer.num_bytes > layout.arena_bytes:
            place = f"bytes {offset} to {offset + buffer.num_bytes}"
            message = (
                f"the layout puts buffer {buffer_id!r} at {place}, outside its arena of {layout.arena_bytes} bytes"
            )
            raise PlanError(message, buffer=buffer_id)


class _Ranges:
    """Ranges of bytes and their present owners, sorted and apart."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._owners: list[str] = []

    def take(self, start: int, end: int, owner: str) -> list[tuple[int, int, str]]:
        """Make ``owner`` the owner of a range, and return the parts of it that others owned."""
        if start >= end:
            return []
        low = bisect_right(self._ends, start)
        high = low
        taken, kept = [], [(start, end, owner)]
        while high < len(self._starts) and self._starts[high] < end:
            old_start, old_end, old_owner = self._starts[high], self._ends[high], self._owners[high]
            taken.append((max(start, old_start), min(end, old_end), old_owner))
            if old_start < start:
                kept.insert(0, (old_start, start, old_owner))
            if old_end > end:
                kept.append((end, old_end, old_owner))
            high += 1
        self._starts[low:high] = [entry[0] for entry in kept]
        self._ends[low:high] = [entry[1] for entry in kept]
        self._owners[low:high] = [entry[2] for entry in kept]
        return taken
