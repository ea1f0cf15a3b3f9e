"""Half-open intervals of integers: union, complement, and which of several that overlap is innermost."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeVar

Interval = tuple[int, int]


class Timed(Protocol):
    """Anything with a begin and an end."""

    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, in order, that cover the same; those that touch become one, empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(each for each in intervals if each[0] < each[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def complement(covered: Sequence[Interval], start: int, end: int) -> list[Interval]:
    """Return what of ``start`` to ``end`` is not covered by disjoint intervals that are in order."""
    gaps, latest = [], start
    for first, last in covered:
        if first >= end:
            break
        if first > latest:
            gaps.append((latest, first))
        latest = max(latest, last)
    if latest < end:
        gaps.append((latest, end))
    return gaps


def total(intervals: Iterable[Interval]) -> int:
    """Length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def intersect(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return what two lists of disjoint intervals in order have in common."""
    found, i, k = [], 0, 0
    while i < len(one) and k < len(other):
        start, end = max(one[i][0], other[k][0]), min(one[i][1], other[k][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[k][1]:
            i += 1
        else:
            k += 1
    return found


T = TypeVar("T", bound=Timed)


def flatten(spans: Sequence[T]) -> list[tuple[int, int, T]]:
    """Cut overlapping spans into disjoint pieces, each of the innermost span there.

    Innermost is the one that began last; of those that began together, the one that ends first; then the first in
    ``spans``.
    """
    order = sorted(
        ((span.start_ns, span.end_ns, -number) for number, span in enumerate(spans) if span.start_ns < span.end_ns),
    )
    edges = sorted({edge for start, end, _ in order for edge in (start, end)})
    active: list[tuple[int, int, int]] = []
    pieces: list[tuple[int, int, T]] = []
    position = 0
    for start, end in pairwise(edges):
        while position < len(order) and order[position][0] <= start:
            first, last, negative = order[position]
            heapq.heappush(active, (-first, last, -negative))
            position += 1
        while active and active[0][1] <= start:
            heapq.heappop(active)
        if not active:
            continue
        span = spans[active[0][2]]
        if pieces and pieces[-1][1] == start and pieces[-1][2] is span:
            pieces[-1] = pieces[-1][0], end, span
        else:
            pieces.append((start, end, span))
    return pieces


def overlay(
    pieces: Sequence[tuple[int, int, Any]], start: int, end: int, first: int = 0
) -> Iterator[tuple[int, int, Any]]:
    """Pieces within ``start`` to ``end``, and ``None`` for what lies between them; from piece ``first`` on."""
    if start >= end:
        return
    latest = start
    for number in range(first, len(pieces)):
        begin, over, value = pieces[number]
        if over <= latest:
            continue
        if begin >= end:
            break
        if begin > latest:
            yield latest, begin, None
        yield max(begin, latest), min(over, end), value
        latest = min(over, end)
    if latest < end:
        yield latest, end, None
