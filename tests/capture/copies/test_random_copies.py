"""Random programs that copy, swap and update pieces of state and arguments: values are eager's, to the bit.

``make test`` runs a few, the same each time; ``MILLSTREAM_FUZZ=200`` so many, in shards that processes share, from
``MILLSTREAM_FUZZ_SEED`` on. ``python -m benchmarks.sweeps.copies`` runs all 20,000, and keeps what became of each.
"""

import os

import pytest

from tests.capture.copies.programs import make_program
from tests.capture.copies.running import run

FUZZ = int(os.environ.get("MILLSTREAM_FUZZ", "0"))
FIRST = int(os.environ.get("MILLSTREAM_FUZZ_SEED", "0"))
SHARD = 10
FEW = (14, 15, 17)
"""Each was wrong once."""
CAPTURED = 0.9
"""So many at least are captured; an assignment by a mask of another shape, say, is not."""

SHARDS = [range(first, first + SHARD) for first in range(FIRST, FIRST + FUZZ, SHARD)] or [FEW]


@pytest.mark.parametrize("seeds", SHARDS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_random_copies_are_eagers(seeds, record_property):
    outcomes = [outcome for seed in seeds if (outcome := run(make_program(seed))).is_valid]
    captured = sum(outcome.is_captured for outcome in outcomes)
    record_property("captured", f"{captured} of {len(outcomes)}")
    assert captured >= CAPTURED * len(outcomes), [outcome.refusals for outcome in outcomes]
