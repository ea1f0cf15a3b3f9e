"""Ownership of byte ranges."""

from __future__ import annotations

from bisect import bisect_right


class OwnedRanges:
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
