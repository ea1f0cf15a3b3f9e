"""Random steps between whose calls what they read changes, on a GPU. ``MILLSTREAM_FUZZ=500`` runs so many."""

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import millstream as ms
from tests.capture.guards.programs import frozen, programs, run

pytestmark = pytest.mark.gpu

FIRST = int(os.environ.get("MILLSTREAM_FUZZ_SEED", "0"))
FUZZ = int(os.environ.get("MILLSTREAM_FUZZ", "10"))
SHARD = 10
CAPTURED = 0.7
"""Of a shard's programs at least so many are captured and never fall back, or falling back would always win."""


@pytest.mark.parametrize("seed_of_shard", range(FIRST, FIRST + max(1, FUZZ // SHARD)))
def test_no_program_reads_what_is_stale(seed_of_shard, record_property):
    outcomes = []

    @seed(seed_of_shard)
    @settings(
        max_examples=SHARD,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(programs())
    def search(program):
        torch._dynamo.reset()
        outcomes.append(run(program, ms.step))

    with frozen(), torch.device("cuda"):
        search()
    captured = sum(outcome.is_captured for outcome in outcomes)
    record_property("captured", f"{captured} of {len(outcomes)}")
    reasons = {reason for outcome in outcomes for reason in outcome.refusals}
    assert captured >= CAPTURED * len(outcomes), "\n".join(sorted(reasons))
