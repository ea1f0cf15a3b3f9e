"""Suite ``large``: steps at the size people train at, where the GPU is full; ``--long`` adds searched kernels."""

from __future__ import annotations

import sys

from benchmarks.cases.models import LARGE, TrainingCase
from benchmarks.measuring.baselines import FUSED_LOOPS
from benchmarks.measuring.results import Row
from benchmarks.measuring.suite import Settings, run_suite
from benchmarks.training import run_case

BASELINES = ("step graph", *FUSED_LOOPS)
LONG = ("max-autotune step graph",)


def run_large(case: TrainingCase, settings: Settings) -> list[Row]:
    """Build, judge and time all sides of a case."""
    wanted = BASELINES + (LONG if settings.long or settings.baselines else ())
    return run_case(case, settings, wanted)


if __name__ == "__main__":
    sys.exit(run_suite("large", LARGE, run_large))
