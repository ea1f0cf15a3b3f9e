"""Suite ``training``: a whole step (forward, backward, optimizer), called as in a user's loop and as a bare replay."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from benchmarks.cases.models import TRAINING, Training, TrainingCase
from benchmarks.measuring import ours
from benchmarks.measuring.baselines import FUSED_LOOPS, Call, Trainee, TrainingJudge, build_training, trainee
from benchmarks.measuring.equality import Move, Results, hear_neighbours
from benchmarks.measuring.harness import Run, sound_pools
from benchmarks.measuring.results import Row
from benchmarks.measuring.sides import build_each, compare
from benchmarks.measuring.suite import Settings, run_suite

BASELINES = ("eager", "compile loop", *FUSED_LOOPS, "step graph", "cudnn")


class SampledTrainingJudge(TrainingJudge):
    """Knows eager's error from several runs: the plain one, and those on neighbouring batches."""

    def __init__(self, problem: Training) -> None:
        super().__init__(problem)
        hear_neighbours(self._hear, problem.batches[0], problem.dtype, problem.device)

    def results(self, side: Trainee, step: Call, replay: Run | None = None, losses: tuple[Tensor, ...] = ()) -> Results:
        """As of any judge; but all runs of eager's begin with the same random numbers, and use none up."""
        if losses:  # a side that has begun already
            return super().results(side, step, replay, losses)
        device = self._problem.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return super().results(side, step, replay)

    def _hear(self, move: Move) -> None:
        problem = self._problem
        side = trainee(problem)
        step = problem.make_step(side.model, side.optimizer)
        with sound_pools():
            results = self.results(side, lambda *batch: step(*map(move, batch)))
        self._judge.hear(results)
        self._losses.hear(results)


def run_case(case: TrainingCase, settings: Settings, baselines: tuple[str, ...] = BASELINES) -> list[Row]:
    """Build, judge and time all sides of a case."""
    problem = case.make(settings.device, tiny=settings.tiny)
    judge = SampledTrainingJudge(problem)
    mine = ours.build_training(problem, judge)
    asked = [
        name
        for name in baselines
        if settings.wants(name)
        and (name != "cudnn" or hasattr(problem.model, "library_twin"))
        and (name not in FUSED_LOOPS or problem.has_fused_optimizer)
    ]
    peers = build_each(asked, lambda name: build_training(problem, name, judge, plan_memory=settings.plan_memory))
    return compare(case.name, mine, peers, settings)


if __name__ == "__main__":
    sys.exit(run_suite("training", TRAINING, run_case))
