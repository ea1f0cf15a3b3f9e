"""Random steps, eager and captured, over twenty calls between which what they read changes: no result is ever stale.

``make test`` runs the same hundred programs each time; ``make fuzz`` (``MILLSTREAM_FUZZ=2000``) others each time.
"""

import os

from hypothesis import HealthCheck, given, settings

from tests.capture.programs import frozen, programs, run

FUZZ = int(os.environ.get("MILLSTREAM_FUZZ", "0"))
CAPTURED = 0.7
"""Of the programs at least so many are captured and never fall back, or falling back would always win."""


def test_no_program_reads_what_is_stale(record_property):
    outcomes = []

    @settings(
        max_examples=FUZZ or 100,
        derandomize=not FUZZ,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(programs())
    def search(program):
        outcomes.append(run(program))

    with frozen():
        search()
    captured = sum(outcome.is_captured for outcome in outcomes)
    record_property("captured", f"{captured} of {len(outcomes)}")
    reasons = {reason for outcome in outcomes for reason in outcome.refusals}
    assert captured >= CAPTURED * len(outcomes), "\n".join(sorted(reasons))
