"""Which value of some memory each operation reads: planted faults, and places against what loops touch one by one."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.check.loop_accesses import Extent, Places, affine, anywhere
from millstream.check.values import Fault, MemoryRead, MemoryWrite, Operation, find_misreads

OLD, FIRST, SECOND = (0, 0), (0, 1), (0, 2)


def at(*loops, summed=(), offset=0):
    return Places((loops, summed, offset), lambda: affine(loops, summed, offset))


WHOLE, FLIPPED, UNKNOWN = at((8, 1)), at((8, -1), offset=7), Places("?", anywhere)
LEFT, RIGHT, EVEN, ODD = at((4, 1)), at((4, 1), offset=4), at((4, 2)), at((4, 2), offset=1)


def read(name, places=WHOLE, meant=OLD, **rest):
    return Operation(name, reads=(MemoryRead("m", places, frozenset([meant])),), **rest)


def write(name, places=WHOLE, version=FIRST, **rest):
    return Operation(name, writes=(MemoryWrite("m", places, version),), **rest)


def update(name, read_places, written=WHOLE, **rest):
    return Operation(name, (MemoryRead("m", read_places),), (MemoryWrite("m", written, FIRST),), **rest)


def faults(*nests):
    return [(each.reader, each.fault) for each in find_misreads(nests)]


@pytest.mark.parametrize(
    ("nests", "expected"),
    {
        "before": ([(read("r"),), (write("w"),)], None),
        "after": ([(write("w"),), (read("r"),)], Fault.OVERWRITTEN),
        "the new value": ([(write("w"),), (read("r", meant=FIRST),)], None),
        "the new value, before": ([(read("r", meant=FIRST),), (write("w"),)], Fault.TOO_EARLY),
        "another part": ([(write("w", LEFT),), (read("r", RIGHT),)], None),
        "every second": ([(write("w", EVEN),), (read("r", ODD),)], None),
        "who knows where": ([(write("w", UNKNOWN),), (read("r", RIGHT),)], Fault.OVERWRITTEN),
        "in turn, the same place": ([(read("r"), write("w"))], None),
        "in turn, another place": ([(read("r", FLIPPED), write("w"))], Fault.RACE),
        "at once, the same place": ([(update("r", WHOLE),)], None),
        "at once, another place": ([(update("r", FLIPPED),)], Fault.RACE),
        "at once, another part": ([(update("r", RIGHT, LEFT),)], None),
        "at once, a shift": ([(update("r", at((7, 1)), at((7, 1), offset=1)),)], Fault.RACE),
        "at once, in an order of its own": ([(update("r", LEFT, is_opaque=True),)], None),
        "overwritten, before an order of its own": (
            [(write("w"),), (update("r", LEFT, is_opaque=True),)],
            Fault.OVERWRITTEN,
        ),
        "too late in turn": ([(write("w"), read("r"))], Fault.OVERWRITTEN),
        "the new value in turn": ([(write("w"), read("r", meant=FIRST))], None),
        "the new value of another place": ([(write("w"), read("r", FLIPPED, FIRST))], Fault.RACE),
        "own row of a sum": ([(read("r", at((4, 2), summed=[(2, 1)])), write("w", at((4, 2), (2, 1))))], None),
        "row of a sum, a column": (
            [(read("r", at((4, 1), summed=[(2, 4)])), write("w", at((4, 2), (2, 1))))],
            Fault.RACE,
        ),
        "column of a sum into its first row": ([(update("r", at((4, 1), summed=[(2, 4)]), LEFT),)], None),
        "beside it": ([(read("r", part=0), write("w", part=1))], Fault.RACE),
        "beside it, another part": ([(read("r", LEFT, part=0), write("w", RIGHT, part=1))], None),
        "between two writes": ([(write("v"),), (read("r", meant=FIRST),), (write("w", version=SECOND),)], None),
        "after two writes": (
            [(write("v"),), (write("w", version=SECOND),), (read("r", meant=FIRST),)],
            Fault.OVERWRITTEN,
        ),
        "writes in the wrong order": ([(write("r", version=SECOND),), (write("w"),)], Fault.OUT_OF_ORDER),
        "writes of two parts": ([(write("r", LEFT, SECOND),), (write("w", RIGHT),)], None),
        "no element": ([(write("w", at((0, 1))),), (read("r"),)], None),
    }.values(),
)
def test_reads_need_what_is_meant(nests, expected):
    assert faults(*nests) == ([] if expected is None else [("r", expected)])


def test_one_of_several_meanings_is_enough():
    either = Operation("r", reads=(MemoryRead("m", WHOLE, frozenset([OLD, FIRST])),))
    assert faults((write("w"),), (either,)) == []
    assert faults((write("w"),), (write("v", version=SECOND),), (either,)) == [("r", Fault.OVERWRITTEN)]


LOOPS = st.lists(st.tuples(st.integers(1, 3), st.integers(-3, 6)), max_size=3)
EXTENTS = st.builds(lambda *args: affine(*args), LOOPS, LOOPS, st.integers(-4, 12))


def points(extent):
    """What each iteration touches, one by one, without NumPy."""
    sizes = [range(size) for size, _ in extent.strides]
    steps = [stride for _, stride in extent.strides]
    all_points = [extent.offset + sum(i * s for i, s in zip(at, steps, strict=True)) for at in product(*sizes)]
    return [all_points[n : n + extent.summed] for n in range(0, len(all_points), extent.summed)]


@given(EXTENTS, EXTENTS, st.booleans(), st.booleans())
def test_places_meet_and_stay_apart_as_single_elements_do(ours, theirs, computed, other_computed):
    ours_points, theirs_points = points(ours), points(theirs)
    one, other = (
        Places(number, lambda each=each, is_computed=is_computed: as_computed(each) if is_computed else each)
        for number, (each, is_computed) in enumerate(((ours, computed), (theirs, other_computed)))
    )
    touched = [{element for row in rows for element in row} for rows in (ours_points, theirs_points)]
    assert one.meets(other) == (not touched[0].isdisjoint(touched[1]))
    rows = min(len(ours_points), len(theirs_points))
    if len(ours_points) % rows or len(theirs_points) % rows:
        return
    mine, yours = (
        [
            {e for part in all_rows[n * len(all_rows) // rows : (n + 1) * len(all_rows) // rows] for e in part}
            for n in range(rows)
        ]
        for all_rows in (ours_points, theirs_points)
    )
    crosses = any(mine[i] & yours[j] for i in range(rows) for j in range(rows) if i != j)
    if one.is_same(other):
        assert ours_points == theirs_points or [*np.ravel(ours_points)] == [*np.ravel(theirs_points)]
    else:
        assert one.stays_apart(other) == (not crosses)


def as_computed(extent):
    elements = np.array(points(extent)).reshape(-1)
    return Extent(extent.iterations, extent.summed, -100, 100, compute=lambda: elements)
