"""Suite ``families``: what each family of our kernels gains, and what steps gain by the pass that is there for speed.

Ours with all of them, beside ours without one, or without any (``own-kernels``). The first networks are such as no
kernel was tuned on. Seconds to compile are not compared: what a side compiles, later ones find.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.cases.models import INFERENCE, TRAINING, InferenceCase, TrainingCase, image_case
from benchmarks.inference import SampledInferenceJudge
from benchmarks.measuring import ours
from benchmarks.measuring.results import Row
from benchmarks.measuring.sides import Side, build_each, compare
from benchmarks.measuring.suite import Settings, run_suite
from benchmarks.training import SampledTrainingJudge
from millstream._torch.workarounds import without
from millstream.kernels.registry import FAMILIES, SWITCH
from millstream.passes import split_gradients

UNSEEN = ("efficientnet_b0", "mobilenetv3_large_100", "densenet121", "regnety_004", "convnext_tiny", "ghostnet_100")
"""Of timm."""

CASES = (*(image_case(name, 1, 224, 64, estimate_s=400) for name in UNSEEN), *INFERENCE, *TRAINING)


def run_case(case: InferenceCase | TrainingCase, settings: Settings) -> list[Row]:
    """Build, judge and time a network with all, and without each."""
    is_training = isinstance(case, TrainingCase)
    with torch.set_grad_enabled(is_training):
        names = [split_gradients.name] if is_training else [SWITCH, *(family.name for family in FAMILIES)]
        build = maker(case, settings)
        mine = build()
        others = build_each(filter(settings.wants, names), lambda name: less(name, build))
        return compare(case.name, mine, others, settings)


def maker(case: InferenceCase | TrainingCase, settings: Settings) -> Callable[..., Side]:
    """What builds and judges our side; with ``alternatives``, it has those that are known to be faster."""
    if isinstance(case, TrainingCase):
        step = case.make(settings.device, tiny=settings.tiny)
        judge = SampledTrainingJudge(step)
        return lambda **how: ours.build_training(step, judge, **how)
    problem = case.make(settings.device, tiny=settings.tiny, channels_last=settings.channels_last)
    sampled = SampledInferenceJudge(problem)
    return lambda **how: ours.build_inference(problem, sampled, freeze=settings.freeze, **how)


def less(name: str, build: Callable[[], Side]) -> Side:
    """Our side without something."""
    with without({name}):
        return replace(build(), name=name)


if __name__ == "__main__":
    sys.exit(run_suite("families", CASES, run_case))
