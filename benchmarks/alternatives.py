"""Suite ``alternatives``: what each alternative to the usual kernels gains where it stands, and all that are kept.

- Ours, with what a program has tried and kept, beside ours with the usual kernels: ``usual kernels``.
- A row for each trial, as the program itself timed it: its variant is the alternative and where it was tried, its
  baseline the program as it was until then; the note says what came of it. In one run, on one device, in turn.

What is tried is tried by a copy that is thrown away (``tune="now"``); ours finds the choice on disk, and is judged and
timed as in any other suite.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.cases.models import LARGE, InferenceCase, TrainingCase, gpt2, image_case, tokens
from benchmarks.decode import ONE_TOKEN
from benchmarks.families import maker
from benchmarks.inference import build_each, build_inference
from benchmarks.measuring import ours
from benchmarks.measuring.baselines import InferenceJudge, trainee
from benchmarks.measuring.results import Row, ratio
from benchmarks.measuring.sides import compare
from benchmarks.measuring.suite import Settings, run_suite

CALLS = 8  # until a program is captured, has tried everything, and is captured once more
RIVALS = ("compile reduce-overhead", "max-autotune graph")

CASES = (
    ONE_TOKEN,
    InferenceCase("gpt2 small b1 T128", gpt2, tokens(128, 1, 128, tiny=(1, 16)), torch.bfloat16, estimate_s=200),
    image_case("vit_small_patch16_224", 1, 224, 224, estimate_s=200),
    *(replace(case, estimate_s=4 * case.estimate_s) for case in LARGE),
)


def run_case(case: InferenceCase | TrainingCase, settings: Settings) -> list[Row]:
    """Build, judge and time a network with the usual kernels and with those that it chooses."""
    is_training = isinstance(case, TrainingCase)
    with torch.set_grad_enabled(is_training):
        build = judged_token(settings) if case is ONE_TOKEN else maker(case, settings)
        usual = replace(build(), name="usual kernels")
        tried = try_all(case, settings)
        mine = build(alternatives=True)
        peers = [] if is_training else rivals(case, settings)
        return [*compare(case.name, mine, [usual, *peers], settings), *(row_of(case.name, each) for each in tried)]


def judged_token(settings: Settings) -> Any:
    """What builds our side of one token, whose cache has no neighbouring inputs to judge by."""
    problem = ONE_TOKEN.make(settings.device, tiny=settings.tiny)
    judge = InferenceJudge(problem)
    return lambda **how: ours.build_inference(problem, judge, **how)


def rivals(case: InferenceCase, settings: Settings) -> list[Any]:
    """What TorchInductor makes of it, and with ``--long`` what that chooses by timing kernels alone."""
    problem = case.make(settings.device, tiny=settings.tiny)
    judge = InferenceJudge(problem)
    wanted = [name for name in RIVALS[: 2 if settings.long else 1] if settings.wants(name)]
    return build_each(wanted, lambda name: build_inference(problem, name, judge, plan_memory=False))


def try_all(case: InferenceCase | TrainingCase, settings: Settings) -> list[Any]:
    """Let a copy try everything; the choice is kept on disk."""
    import millstream as ms

    problem: Any = case.make(settings.device, tiny=settings.tiny)
    with patch.dict(os.environ, {"MILLSTREAM_TUNE": "now"}):  # suites say otherwise, so that nothing is tried meanwhile
        if isinstance(case, TrainingCase):
            side = trainee(problem)
            run = ms.step(problem.make_step(side.model, side.optimizer), strict=True)
            batches = [problem.batches[0], *[problem.batches[1]] * CALLS]
        else:
            run = ms.compile(problem.model, strict=True, copy_outputs=False, freeze=settings.freeze)
            batches = [problem.first] * CALLS
    for batch in batches:
        run(*batch)
    tried = [each for program in ms.explain(run).programs for each in program.alternatives]
    if not tried and settings.device.type == "cuda":  # where every program has something to try
        raise RuntimeError(f"nothing was tried: {ms.explain(run)}")
    return tried


def row_of(case: str, tried: Any) -> Row:
    """What came of one trial, in milliseconds of the whole program."""
    usual, own = (None if ns is None else ns / 1e6 for ns in (tried.usual_ns, tried.own_ns))
    where = tried.groups[0] if len(tried.groups) == 1 else f"all {len(tried.groups)} groups"
    note = f"{tried.outcome}, at {tried.sites} sites"
    return Row(case, f"{tried.alternative}, {where}", "until then", usual, own, ratio(usual, own), note=note)


if __name__ == "__main__":
    sys.exit(run_suite("alternatives", CASES, run_case))
