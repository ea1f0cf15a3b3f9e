"""Random steps, eager and captured, over twenty calls between which what they read changes: no result is ever stale.

``make test`` runs the same hundred programs each time; ``make fuzz`` (``MILLSTREAM_FUZZ=2000``) others each time, in
shards of a hundred that processes share. ``MILLSTREAM_FUZZ_SEED`` repeats a search: each failure names it.
"""

import os
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.capture.guards.programs import frozen, programs, run

FUZZ = int(os.environ.get("MILLSTREAM_FUZZ", "0"))
# Processes that share a run must collect the same tests.
RUN = int(os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid4().hex), 16) % 10**9
SEED = int(os.environ.get("MILLSTREAM_FUZZ_SEED", RUN)) if FUZZ else 0
SHARD = 100 if FUZZ else 50
CAPTURED = 0.7
"""Of the programs at least so many are captured and never fall back, or falling back would always win."""


@pytest.mark.parametrize("seed_of_shard", range(SEED, SEED + max(1, FUZZ // SHARD)))
def test_no_program_reads_what_is_stale(seed_of_shard, record_property):
    outcomes = []

    @seed(seed_of_shard)
    @settings(max_examples=SHARD, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(programs())
    def search(program):
        outcomes.append(run(program))

    with frozen():
        search()
    captured = sum(outcome.is_captured for outcome in outcomes)
    record_property("captured", f"{captured} of {len(outcomes)}")
    reasons = {reason for outcome in outcomes for reason in outcome.refusals}
    assert captured >= CAPTURED * len(outcomes), "\n".join(sorted(reasons))
