"""Suite ``start``: from the uncompiled step to its first compiled result in a new process, beside torch.compile.

- ``cold``: all caches are empty.
- ``warm``: the same script has run before, once, with the same cache folders.

torch.compile compiles the model and the optimizer's ``step``. Imports, the compiler's workers and eager's first run are
paid before, on both sides.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass

import torch

from benchmarks.cases.models import CPU_START
from benchmarks.measuring.cold import start
from benchmarks.measuring.results import Row, ratio
from benchmarks.measuring.suite import Settings, run_suite

PEER = "compile loop compiled optimizer"
GPU_SECONDS = {"gpt2 2 layers b2 step": 150.0, "gpt2 small b8 T1024": 280.0, "resnet50 b8": 320.0}
CPU_SECONDS = {case.name: 4 * case.estimate_s for case in CPU_START}


@dataclass(frozen=True)
class StartCase:
    """A training step of another suite."""

    name: str
    estimate_s: float


def run_case(case: StartCase, settings: Settings) -> list[Row]:
    """Each side twice, in one cache folder of its own."""
    sides = {}
    for side in ("ours", PEER):
        with tempfile.TemporaryDirectory() as cache:
            sides[side] = [start(case.name, side, settings, cache) for _ in range(2)]
    rows = []
    for number, variant in enumerate(("cold", "warm")):
        ours, theirs = sides["ours"][number], sides[PEER][number]
        ours_ms, baseline_ms = 1000 * ours["seconds"], 1000 * theirs["seconds"]
        note = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in ours["phases"].items() if seconds >= 0.1)
        times = {"ours_ms": ours_ms, "baseline_ms": baseline_ms, "ratio": ratio(baseline_ms, ours_ms)}
        rows.append(Row(case.name, variant, PEER, note=note, **times))
    return rows


SECONDS = GPU_SECONDS if torch.cuda.is_available() else CPU_SECONDS
CASES = tuple(StartCase(name, seconds) for name, seconds in SECONDS.items())

if __name__ == "__main__":
    sys.exit(run_suite("start", CASES, run_case, device="cuda" if torch.cuda.is_available() else "cpu"))
