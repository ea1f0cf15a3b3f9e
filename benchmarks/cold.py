"""Compile seconds with cold caches: each side in a process of its own, with an empty cache folder.

The clock runs from the uncompiled model to the first result. What is the same for every compilation is paid before:
imports, the compiler's worker processes, the device's start, eager's first run.
"""

from __future__ import annotations

import argparse
import json
import tempfile

import torch

from benchmarks import baselines, ours
from benchmarks.harness import prepare_torch
from benchmarks.models import (
    CPU_BRANCHING,
    CPU_INFERENCE,
    CPU_TRAINING,
    HOST_INFERENCE,
    HOST_TRAINING,
    INFERENCE,
    TRAINING,
    InferenceCase,
    TrainingCase,
)
from benchmarks.results import Row, ratio
from benchmarks.suite import Settings
from benchmarks.worker import answer_of

CASES: dict[str, InferenceCase | TrainingCase] = {
    case.name: case
    for case in (
        *INFERENCE,
        *TRAINING,
        *CPU_INFERENCE,
        *CPU_BRANCHING,
        *CPU_TRAINING,
        *HOST_INFERENCE,
        *HOST_TRAINING,
    )
}
LIMIT_S = 900.0  # a compilation that takes longer has failed


def cold_seconds(case: str, side: str, settings: Settings) -> float:
    """Compile a case once in a new process.

    Args:
        case: Name of a case of any suite.
        side: ``ours`` or the name of a baseline.
        settings: Where, and whether tiny.

    Raises:
        RuntimeError: The process failed; the message ends with its last line.
    """
    arguments = [case, side, "--device", str(settings.device), *(["--tiny"] if settings.tiny else [])]
    with tempfile.TemporaryDirectory() as cache:
        names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MILLSTREAM_CACHE_DIR")
        folders = {name: f"{cache}/{name.lower()}" for name in names}
        try:
            return float(answer_of("benchmarks.cold", arguments, LIMIT_S, folders)["seconds"])
        except RuntimeError as error:
            raise RuntimeError(f"compiling {case} for {side} failed: {error}") from error


def compare_cold(case: str, settings: Settings) -> list[Row]:
    """Return rows with the cold compile seconds of ours and their ratio to those of torch.compile.

    A step of ours compiles the optimizer, too, so it is compared with a loop that does not and with one that does.
    """
    training = isinstance(CASES[case], TrainingCase)
    peers = ("compile loop", "compile loop compiled optimizer") if training else ("compile",)
    mine = cold_seconds(case, "ours", settings)
    rows = []
    for peer in peers:
        theirs = cold_seconds(case, peer, settings)
        note = f"{peer} compiles in {theirs:.1f} s"
        rows.append(Row(case, "cold compile", peer, compile_s=mine, compile_ratio=ratio(mine, theirs), note=note))
    return rows


@torch.enable_grad()
def warm_compiler(device: torch.device) -> None:
    """Compile something trivial, forward and backward."""
    x = torch.randn(64, device=device, requires_grad=True)
    torch.compile(lambda t: torch.relu(t * 2).sum())(x).backward()
    torch._dynamo.reset()


def build(case: InferenceCase | TrainingCase, side: str, device: torch.device, *, tiny: bool) -> float | None:
    """Build a side, and return the seconds it took to the first result."""
    if isinstance(case, InferenceCase):
        with torch.no_grad():
            problem = case.make(device, tiny=tiny)
            problem.model(*problem.first)
            warm_compiler(device)
            if side == "ours":
                return ours.build_inference(problem).build_s
            return baselines.build_inference(problem, side, plan_memory=False).build_s
    training = case.make(device, tiny=tiny)
    eager = baselines.trainee(training)
    training.make_step(eager.model, eager.optimizer)(*training.batches[0])
    warm_compiler(device)
    if side == "ours":
        return ours.build_training(training).build_s
    return baselines.build_training(training, side).build_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("side")
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    prepare_torch()
    seconds = build(CASES[options.case], options.side, options.device, tiny=options.tiny)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
