"""Random copies of state on a GPU, where a tensor is more than one block. ``MILLSTREAM_FUZZ=500`` runs so many."""

import os

import pytest

from tests.capture.copies.programs import make_program
from tests.capture.copies.running import run

pytestmark = pytest.mark.gpu

FIRST = int(os.environ.get("MILLSTREAM_FUZZ_SEED", "0"))
FUZZ = int(os.environ.get("MILLSTREAM_FUZZ", "10"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + FUZZ))
def test_random_copies_are_eagers(seed, record_property):
    outcome = run(make_program(seed, large=True), "cuda")
    record_property("captured", outcome.is_captured)
    record_property("refusals", outcome.refusals)
