"""Suite ``training``: a whole step (forward, backward, optimizer), called as in a user's loop and as a bare replay."""

from __future__ import annotations

import sys

from benchmarks import ours
from benchmarks.baselines import TrainingJudge, build_training
from benchmarks.models import TRAINING, TrainingCase
from benchmarks.results import Row
from benchmarks.sides import build_each, compare
from benchmarks.suite import Settings, run_suite

BASELINES = ("eager", "compile loop", "compile loop fused", "step graph", "cudnn")


def run_case(case: TrainingCase, settings: Settings, baselines: tuple[str, ...] = BASELINES) -> list[Row]:
    """Build, judge and time all sides of a case."""
    problem = case.make(settings.device, tiny=settings.tiny)
    judge = TrainingJudge(problem)
    mine = ours.build_training(problem, judge)
    asked = [
        name
        for name in baselines
        if settings.wants(name)
        and (name != "cudnn" or hasattr(problem.model, "library_twin"))
        and (name != "compile loop fused" or problem.has_fused_optimizer)
    ]
    peers = build_each(asked, lambda name: build_training(problem, name, judge, plan_memory=settings.plan_memory))
    return compare(case.name, mine, peers, settings)


if __name__ == "__main__":
    sys.exit(run_suite("training", TRAINING, run_case))
