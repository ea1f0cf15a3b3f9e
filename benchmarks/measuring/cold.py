"""Compile seconds with cold caches, and with warm ones: each side in processes of its own, with its own cache folder.

The clock runs from the uncompiled model to the first result. What is the same for every compilation is paid before:
imports, the compiler's worker processes, the device's start, eager's first run.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from typing import Any

import torch

from benchmarks.cases.models import (
    CPU_BRANCHING,
    CPU_INFERENCE,
    CPU_START,
    CPU_TRAINING,
    HOST_INFERENCE,
    HOST_TRAINING,
    INFERENCE,
    LARGE,
    TRAINING,
    InferenceCase,
    TrainingCase,
)
from benchmarks.measuring import baselines, ours
from benchmarks.measuring.harness import prepare_torch
from benchmarks.measuring.results import Row, ratio
from benchmarks.measuring.suite import Settings
from benchmarks.measuring.worker import answer_of

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
        *CPU_START,
        *LARGE,
    )
}
LIMIT_S = 900.0  # a compilation that takes longer has failed


def cold_seconds(case: str, side: str, settings: Settings) -> float:
    """Compile a case once in a new process, with empty caches.

    Args:
        case: Name of a case of any suite.
        side: ``ours`` or the name of a baseline.
        settings: Where, and whether tiny.

    Raises:
        RuntimeError: The process failed; the message ends with its last line.
    """
    with tempfile.TemporaryDirectory() as cache:
        return float(start(case, side, settings, cache)["seconds"])


def start(case: str, side: str, settings: Settings, cache: str) -> dict[str, Any]:
    """Compile a case once in a new process, with the caches in a folder; arguments as before.

    Returns:
        ``seconds``, and ``phases`` of our side: seconds by name.
    """
    arguments = [case, side, "--device", str(settings.device), *(["--tiny"] if settings.tiny else [])]
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MILLSTREAM_CACHE_DIR")
    folders = {name: f"{cache}/{name.lower()}" for name in names}
    try:
        return answer_of("benchmarks.measuring.cold", arguments, LIMIT_S, folders)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise RuntimeError(f"compiling {case} for {side} failed: {error}") from error


def compare_cold(case: str, settings: Settings) -> list[Row]:
    """Return rows with the cold compile seconds of our side and their ratio to those of torch.compile.

    Our step compiles the optimizer, too, so it is compared with a loop that does not and with one that does.
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


class Phases(logging.Handler):
    """How long each phase of a capture takes, by the records of its progress."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seconds: dict[str, float] = {}
        self._last = ("", 0.0)

    def emit(self, record: logging.LogRecord) -> None:
        name, since = self._last
        if name:
            self.seconds[name] = self.seconds.get(name, 0.0) + record.created - since
        text = record.getMessage().partition(": ")[2]
        self._last = ("" if " in " in text else text.partition(" 1 of")[0], record.created)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("side")
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    prepare_torch()
    phases, logger = Phases(), logging.getLogger("millstream")
    logger.addHandler(phases)
    logger.setLevel(logging.INFO)
    seconds = build(CASES[options.case], options.side, options.device, tiny=options.tiny)
    print(json.dumps({"seconds": seconds, "phases": phases.seconds}))


if __name__ == "__main__":
    main()
