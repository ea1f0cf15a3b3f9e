"""Suite ``inference``: compiled models without gradients, outputs not copied, BatchNorm folded for every side."""

from __future__ import annotations

import sys

import torch

from benchmarks.cases.models import INFERENCE, Inference, InferenceCase
from benchmarks.measuring import ours
from benchmarks.measuring.baselines import InferenceJudge, build_inference
from benchmarks.measuring.equality import Move, check_dependence, hear_neighbours
from benchmarks.measuring.results import Row
from benchmarks.measuring.sides import build_each, compare
from benchmarks.measuring.suite import Settings, run_suite

BASELINES = ("eager", "eager graph", "compile", "compile reduce-overhead", "inductor graph", "cudnn")
LONG_BASELINES = ("max-autotune graph",)


class SampledInferenceJudge(InferenceJudge):
    """Knows eager's error from several runs: the plain one, and those on neighbouring inputs."""

    def __init__(self, problem: Inference) -> None:
        super().__init__(problem)
        hear_neighbours(self._hear, problem.second, problem.dtype, problem.device)
        second, first = ({"output": problem.model(*batch)} for batch in (problem.second, problem.first))
        check_dependence(second, first, self._judge.allowed)

    def _hear(self, move: Move) -> None:
        problem = self._problem
        self._judge.hear({"outputs": {"output": problem.model(*map(move, problem.second))}})


@torch.no_grad()
def run_case(case: InferenceCase, settings: Settings, baselines: tuple[str, ...] = BASELINES) -> list[Row]:
    """Build, judge and time all sides of a case."""
    problem = case.make(settings.device, tiny=settings.tiny, channels_last=settings.channels_last)
    judge = SampledInferenceJudge(problem)
    mine = ours.build_inference(problem, judge, freeze=settings.freeze)
    asked = [
        name
        for name in baselines + (LONG_BASELINES if settings.long else ())
        if settings.wants(name) and (name != "cudnn" or hasattr(problem.model, "library_twin"))
    ]
    options = {"plan_memory": settings.plan_memory, "freeze": settings.freeze}
    peers = build_each(asked, lambda name: build_inference(problem, name, judge, **options))
    return compare(case.name, mine, peers, settings)


if __name__ == "__main__":
    sys.exit(run_suite("inference", INFERENCE, run_case))
