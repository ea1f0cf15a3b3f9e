"""Prove that each kernel reads the values that are meant, without running it.

A program that updates its inputs in place has several values in one piece of memory, one after another. What reads that
memory means one of them: the value before all updates, mostly, which must not have been overwritten by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import NamedTuple

from millstream.check.loop_accesses import Places

Version = tuple[int, int]
"""Which write to a piece of memory: later ones are greater. ``OLD`` is what is there before all of them."""
OLD: Version = (0, 0)


@dataclass(frozen=True, slots=True)
class MemoryRead:
    """A use of memory.

    Attributes:
        memory: What is read.
        places: Where in it.
        meant: The version that must be there, if it lies at these places; one of them where several are possible.
    """

    memory: str
    places: Places
    meant: frozenset[Version] = frozenset({OLD})


@dataclass(frozen=True, slots=True)
class MemoryWrite:
    """A change of memory, to some version."""

    memory: str
    places: Places
    version: Version


@dataclass(frozen=True, slots=True)
class Operation:
    """Some operators of the user's, computed together at each iteration of a loop.

    Attributes:
        name: Its name in the program.
        reads: What it reads, before it writes anything in the same iteration.
        writes: What it writes.
        part: Of a nest of several parts that run at once, which one.
        is_opaque: It reads and writes in an order of its own, and is to see what it has written where it is given the
            same memory twice, as an operator of the user's.
    """

    name: str
    reads: tuple[MemoryRead, ...] = ()
    writes: tuple[MemoryWrite, ...] = ()
    part: int = 0
    is_opaque: bool = False


Nest = tuple[Operation, ...]
"""Operations of one loop: each iteration does them in turn. Nests run one after another."""


class Fault(StrEnum):
    """A fault of a read, or of a write."""

    OVERWRITTEN = "has been overwritten by then"
    TOO_EARLY = "has not been written by then"
    RACE = "is written meanwhile, by other iterations of the same loop"
    OUT_OF_ORDER = "is written over by an earlier one"


@dataclass(frozen=True, slots=True)
class Misread:
    """A read of another value than the one that is meant, or a value that is left in place of a later one.

    Attributes:
        memory: Where it is.
        reader: The name of the operation that reads it, or wrote the later one.
        writer: That of the one which writes it at the wrong time.
        fault: In what way.
    """

    memory: str
    reader: str
    writer: str
    fault: Fault

    def __str__(self) -> str:
        use = "writes" if self.fault is Fault.OUT_OF_ORDER else "reads"
        return f"{self.reader} {use} a value of {self.memory!r} that {self.fault} ({self.writer})"


def find_misreads(nests: Sequence[Nest]) -> list[Misread]:
    """Find reads that find another value than the one that is meant, and writes out of order.

    A read needs all writes up to the version that it means to be done at its places, and no later one. Within a nest,
    iterations run in any order, or at once: a write by another iteration comes at no known time.

    Args:
        nests: In the order in which they run.

    Returns:
        One entry per read and write at odds, in the order of the reads; then those of writes.
    """
    written: dict[str, list[_Written]] = {}
    for nest, operations in enumerate(nests):
        for position, operation in enumerate(operations):
            for write in operation.writes:
                written.setdefault(write.memory, []).append((write, _Place(nest, position, operation)))
    found = []
    for nest, operations in enumerate(nests):
        for position, operation in enumerate(operations):
            for read in operation.reads:
                if read.memory in written:
                    found += _misreads(read, _Place(nest, position, operation), written[read.memory])
    return found + [each for writes in written.values() for each in _misordered(writes)]


class _Place(NamedTuple):
    """A position in the program."""

    nest: int
    position: int
    operation: Operation


_Written = tuple[MemoryWrite, _Place]


def _misreads(read: MemoryRead, at: _Place, writes: Sequence[_Written]) -> list[Misread]:
    """Return what is wrong with a read of some memory: nothing if one of the versions that it may mean is there."""
    faults: list[Misread] = []
    for meant in sorted(read.meant):  # of the last one is told
        faults = [
            Misread(read.memory, at.operation.name, other.operation.name, fault)
            for write, other in writes
            if (fault := _fault(read.places, at, write.places, other, is_meant=write.version <= meant)) is not None
        ]
        if not faults:
            return []
    return faults


def _misordered(writes: Sequence[_Written]) -> Iterator[Misread]:
    for (first, there), (second, here) in combinations(writes, 2):
        if there.operation is here.operation:
            continue
        is_swapped = first.version > second.version
        fault = _fault(second.places, here, first.places, there, is_meant=not is_swapped)
        if fault is not None:
            fault = Fault.OUT_OF_ORDER if is_swapped else fault
            yield Misread(first.memory, there.operation.name, here.operation.name, fault)


def _fault(ours: Places, here: _Place, theirs: Places, there: _Place, *, is_meant: bool) -> Fault | None:
    """Return what is wrong with an access where an operation writes, given whether what that writes is meant."""
    if here.operation is there.operation and here.operation.is_opaque:
        return None
    if here.nest == there.nest and here.operation.part != there.operation.part:
        return Fault.RACE if ours.meets(theirs) else None
    is_done = there[:2] < here[:2]
    if is_done != is_meant:
        return (Fault.OVERWRITTEN if is_done else Fault.TOO_EARLY) if ours.meets(theirs) else None
    return Fault.RACE if here.nest == there.nest and not ours.stays_apart(theirs) else None
