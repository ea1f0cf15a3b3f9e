"""Suite ``cpu``: small cases on the processor, by wall clock of a user's loop.

Ours chooses between the engines ``serial`` and ``threads`` by itself; with networks that branch it is measured a second
time with the engine ``threads`` asked for. All sides have PyTorch's number of intra-op threads: the cores.
Compile seconds are measured cold, each side in a process of its own (see ``benchmarks.measuring.cold``).
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch

from benchmarks import inference, training
from benchmarks.cases.models import CPU_BRANCHING, CPU_INFERENCE, CPU_TRAINING, InferenceCase, TrainingCase
from benchmarks.measuring.cold import compare_cold
from benchmarks.measuring.results import Row
from benchmarks.measuring.suite import Settings, run_suite

INFERENCE_PEERS = ("eager", "compile")
TRAINING_PEERS = ("eager", "compile loop", "compile loop fused", "compile loop compiled optimizer")
CASES: tuple[InferenceCase | TrainingCase, ...] = (*CPU_INFERENCE, *CPU_BRANCHING, *CPU_TRAINING)


def run_case(case: InferenceCase | TrainingCase, settings: Settings) -> list[Row]:
    """Time a case against its peers, and compile it cold."""
    if isinstance(case, InferenceCase):
        rows = inference.run_case(case, settings, INFERENCE_PEERS)
        if case in CPU_BRANCHING:
            rows += run_on_threads(case, settings)
    else:
        rows = training.run_case(case, settings, TRAINING_PEERS)
    cold = {row.baseline: row for row in compare_cold(case.name, settings)}
    seconds = next(iter(cold.values())).compile_s
    ratios = {baseline: row.compile_ratio for baseline, row in cold.items()}
    return [replace(row, compile_s=seconds, compile_ratio=ratios.get(row.baseline)) for row in rows]


def run_on_threads(case: InferenceCase, settings: Settings) -> list[Row]:
    """Time a case once more, with the engine ``threads`` asked for."""
    before = os.environ.get("MILLSTREAM_ENGINE")
    os.environ["MILLSTREAM_ENGINE"] = "threads"
    try:
        torch._dynamo.reset()
        rows = inference.run_case(case, settings, ("compile",))
    finally:
        del os.environ["MILLSTREAM_ENGINE"]
        if before is not None:
            os.environ["MILLSTREAM_ENGINE"] = before
    return [replace(row, variant="call, threads") for row in rows]


if __name__ == "__main__":
    sys.exit(run_suite("cpu", CASES, run_case, device="cpu"))
