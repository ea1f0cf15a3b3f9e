"""Suite ``cpu``: small cases on the processor, ours with the serial engine, by wall clock of a user's loop.

Compile seconds are measured cold, each side in a process of its own (see ``benchmarks.cold``).
"""

from __future__ import annotations

import sys
from dataclasses import replace

from benchmarks import inference, training
from benchmarks.cold import compare_cold
from benchmarks.models import CPU_INFERENCE, CPU_TRAINING, InferenceCase, TrainingCase
from benchmarks.results import Row
from benchmarks.suite import Settings, run_suite

INFERENCE_PEERS = ("eager", "compile")
TRAINING_PEERS = ("eager", "compile loop", "compile loop fused", "compile loop compiled optimizer")
CASES: tuple[InferenceCase | TrainingCase, ...] = (*CPU_INFERENCE, *CPU_TRAINING)


def run_case(case: InferenceCase | TrainingCase, settings: Settings) -> list[Row]:
    """Time a case against its peers, and compile it cold."""
    if isinstance(case, InferenceCase):
        rows = inference.run_case(case, settings, INFERENCE_PEERS)
    else:
        rows = training.run_case(case, settings, TRAINING_PEERS)
    cold = {row.baseline: row for row in compare_cold(case.name, settings)}
    seconds = next(iter(cold.values())).compile_s
    ratios = {baseline: row.compile_ratio for baseline, row in cold.items()}
    return [replace(row, compile_s=seconds, compile_ratio=ratios.get(row.baseline)) for row in rows]


if __name__ == "__main__":
    sys.exit(run_suite("cpu", CASES, run_case, device="cpu"))
