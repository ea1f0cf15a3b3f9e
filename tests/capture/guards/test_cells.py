"""Wherever a step finds a value, and whatever it reads of it, it notices another one: one test for each cell."""

import pytest

from tests.capture.guards.cells import CELLS
from tests.capture.guards.programs import alone, frozen, run


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    with frozen():
        yield


def test_the_table_is_large_enough():
    assert len({str(cell) for cell in CELLS}) == len(CELLS) >= 116


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_change_is_noticed(cell):
    outcome = run(alone(cell))
    assert outcome.is_captured, outcome.refusals
