"""Wherever a step finds a value, and whatever it reads of it, it notices another one: one test for each cell.

In every run are the first of each holder, of each way to read and of each way to change; the slow tests have all.
"""

import pytest

from tests.capture.guards.cells import CELLS
from tests.capture.guards.programs import alone, frozen, run


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    with frozen():
        yield


def test_the_table_is_large_enough():
    assert len({str(cell) for cell in CELLS}) == len(CELLS) >= 116


def others_slow(cells):
    seen = set()
    for cell in cells:
        ways = {("holder", cell.holder), ("read", cell.read), ("change", cell.change)}
        yield pytest.param(cell, marks=pytest.mark.slow if ways <= seen else ())
        seen |= ways


@pytest.mark.parametrize("cell", [*others_slow(CELLS)], ids=str)
def test_a_change_is_noticed(cell):
    outcome = run(alone(cell))
    assert outcome.is_captured, outcome.refusals
