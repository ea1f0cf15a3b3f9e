"""Suite ``inference``: compiled models without gradients, outputs not copied, BatchNorm folded for every side."""

from __future__ import annotations

import sys

import torch

from benchmarks import ours
from benchmarks.baselines import InferenceJudge, build_inference
from benchmarks.models import INFERENCE, InferenceCase
from benchmarks.results import Row
from benchmarks.sides import build_each, compare
from benchmarks.suite import Settings, run_suite

BASELINES = ("eager", "eager graph", "compile", "compile reduce-overhead", "inductor graph", "cudnn")
LONG_BASELINES = ("max-autotune graph",)


@torch.no_grad()
def run_case(case: InferenceCase, settings: Settings, baselines: tuple[str, ...] = BASELINES) -> list[Row]:
    """Build, judge and time all sides of a case."""
    problem = case.make(settings.device, tiny=settings.tiny, channels_last=settings.channels_last)
    judge = InferenceJudge(problem)
    mine = ours.build_inference(problem, judge)
    asked = [
        name
        for name in baselines + (LONG_BASELINES if settings.long else ())
        if settings.wants(name) and (name != "cudnn" or hasattr(problem.model, "library_twin"))
    ]
    peers = build_each(asked, lambda name: build_inference(problem, name, judge, plan_memory=settings.plan_memory))
    return compare(case.name, mine, peers, settings)


if __name__ == "__main__":
    sys.exit(run_suite("inference", INFERENCE, run_case))
