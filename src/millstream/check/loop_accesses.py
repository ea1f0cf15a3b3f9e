"""Find which places of memory a loop touches, and in which of its iterations."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

MOST_ELEMENTS = 2**24
"""More are not listed, which would take seconds and 128 MiB: they count as all between the first and the last."""

FAR = 2**62
"""Beyond the end of any memory."""


@dataclass(frozen=True)
class Extent:
    """The elements that a loop touches.

    Attributes:
        iterations: How many the loop has.
        summed: Each of them takes so many elements, as for a sum; else one.
        first: A number that no element is before, counted from the start of the memory.
        last: One that none is after.
        offset: The first iteration's element, where elements are as far apart as ``strides`` say.
        strides: Sizes and strides of the loop, outermost first, with what is summed last; ``None`` where elements are
            anywhere else.
        compute: All elements, in the order of iterations; ``None`` where nobody knows them before the loop runs.
    """

    iterations: int
    summed: int
    first: int
    last: int
    offset: int = 0
    strides: tuple[tuple[int, int], ...] | None = None
    compute: Callable[[], np.ndarray | None] = field(default=lambda: None, compare=False)

    @property
    def num_elements(self) -> int:
        return self.iterations * self.summed

    @cached_property
    def elements(self) -> np.ndarray | None:
        """The elements, a row for each iteration."""
        if self.num_elements > MOST_ELEMENTS:
            return None
        found = self.compute() if self.strides is None else _list_elements(self.offset, self.strides)
        return None if found is None else found.reshape(self.iterations, self.summed)


def affine(iterations: Iterable[tuple[int, int]], summed: Iterable[tuple[int, int]] = (), offset: int = 0) -> Extent:
    """Elements at equal distances.

    Args:
        iterations: Size and stride of each loop, outermost first.
        summed: Likewise of what each iteration takes.
        offset: The element of the first iteration.
    """
    outer, inner = [*iterations], [*summed]
    reach = [(size - 1) * stride for size, stride in (*outer, *inner)]
    first, last = offset + sum(min(0, each) for each in reach), offset + sum(max(0, each) for each in reach)
    num_iterations, num_summed = (math.prod(size for size, _ in each) for each in (outer, inner))
    return Extent(num_iterations, num_summed, first, last, offset, _merged([*outer, *inner]))


def anywhere() -> Extent:
    """Elements that nobody knows but the loop itself."""
    return Extent(1, 1, -FAR, FAR)


@dataclass(frozen=True)
class Places:
    """The places in memory of a loop at each of its points. Which elements these are is found when it matters.

    Attributes:
        key: Two loops with equal keys touch the same element at every point.
        find: Finds the elements.
    """

    key: Hashable
    find: Callable[[], Extent] = field(compare=False)

    @cached_property
    def extent(self) -> Extent:
        return self.find()

    def is_same(self, other: Places) -> bool:
        """Return whether both are known to touch the same element at every point of one loop."""
        if self.key == other.key:
            return True
        ours, theirs = self.extent, other.extent
        return ours.strides is not None and (ours.num_elements, ours.offset, ours.strides) == (
            theirs.num_elements,
            theirs.offset,
            theirs.strides,
        )

    def meets(self, other: Places) -> bool:
        """Return whether there may be an element in both."""
        ours, theirs = self.extent, other.extent
        if ours.last < theirs.first or theirs.last < ours.first or not ours.num_elements or not theirs.num_elements:
            return False
        if self.is_same(other) or ours.elements is None or theirs.elements is None:
            return True
        return bool(np.intersect1d(ours.elements, theirs.elements).size)

    def stays_apart(self, other: Places) -> bool:
        """Return whether no element of an iteration is one of ``other``'s in another iteration of the same loop.

        Where one has several iterations for each of the other's, as for the items of a sum, those go together.
        """
        if self.is_same(other) or not self.meets(other):
            return True
        ours, theirs = self.extent, other.extent
        rows = min(ours.iterations, theirs.iterations)
        if ours.elements is None or theirs.elements is None or ours.iterations % rows or theirs.iterations % rows:
            return False
        return not _crosses_rows(ours.elements.reshape(rows, -1), theirs.elements.reshape(rows, -1))


def _list_elements(offset: int, strides: Iterable[tuple[int, int]]) -> np.ndarray:
    found = np.array([offset])
    for size, stride in strides:
        found = np.add.outer(found, np.arange(size) * stride).reshape(-1)
    return found


def _merged(loops: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same loops, as few as possible: one that goes on where its inner one ends is one with it."""
    found: list[tuple[int, int]] = []
    for size, stride in loops:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return tuple(found)


def _crosses_rows(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Return whether an element of one table is in another row of the other one."""
    rows = np.repeat(np.arange(len(theirs)), theirs.shape[1])
    elements = theirs.reshape(-1)
    order = np.lexsort((rows, elements))
    elements, rows = elements[order], rows[order]
    wanted, wanted_rows = ours.reshape(-1), np.repeat(np.arange(len(ours)), ours.shape[1])
    left, right = (np.searchsorted(elements, wanted, side=side) for side in ("left", "right"))
    is_there = left < right
    left, right, wanted_rows = left[is_there], right[is_there], wanted_rows[is_there]
    # The rows of each element are sorted: all are one if the first and the last are.
    return bool(((rows[left] != wanted_rows) | (rows[right - 1] != wanted_rows)).any())
