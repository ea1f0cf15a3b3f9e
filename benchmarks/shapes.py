"""Suite ``shapes``: sizes that change from call to call, beside torch.compile.

- ``first pass``: from the uncompiled model to the last result over all sizes, caches empty, each side by itself.
- ``later pass``: the same sizes again, once every size has its graph; the median of a few. Passes in between, in which
  plans are chosen and graphs captured, stand in the note.

The case ``new sizes`` is about one step with its kernels there already, beside eager:

- ``first call``, ``second call``: with a size that is new, and when it comes again, which captures a CUDA graph.
- ``falling sizes``, ``rising sizes``: memory of a hundred sizes, over that of the largest alone.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cases.sizes import GPU_ONLY, programs
from benchmarks.measuring.results import Row, ratio
from benchmarks.measuring.suite import Settings, run_suite
from benchmarks.measuring.worker import answer_of

LIMIT_S = 1800.0  # a side that takes longer has failed
PEER = "compile"
NEW_SIZES = "new sizes"


@dataclass(frozen=True)
class ShapesCase:
    """A program of ``benchmarks.cases.sizes``, or ``NEW_SIZES``, which is for GPUs."""

    name: str
    calls: int
    estimate_s: float = 200.0


def run_side(module: str, *arguments: str) -> dict[str, Any]:
    """Run a module in a new process with empty caches."""
    with tempfile.TemporaryDirectory() as cache:
        folders = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MILLSTREAM_CACHE_DIR"), cache)
        return answer_of(module, arguments, LIMIT_S, folders)  # type: ignore[no-any-return]


def run_case(case: ShapesCase, settings: Settings) -> list[Row]:
    """Both sides, one after the other."""
    device = ("--device", str(settings.device))
    if case.name == NEW_SIZES:
        return rows_of_new_sizes(run_side("benchmarks.cases.new_sizes", *device))
    sides = {}
    for side in ("ours", PEER):
        sides[side] = run_side("benchmarks.cases.sizes", case.name, side, *device)
        print(f"{case.name}, {side}: {sides[side]}", file=sys.stderr, flush=True)  # kept where the other does not end
    mine, theirs = sides["ours"], sides[PEER]
    graphs = f"{case.calls} calls; {mine['graphs']} graphs, {PEER} {theirs['graphs']}"
    rows = []
    for variant, key in (("first pass", "first_s"), ("later pass", "later_s")):
        ours_ms, baseline_ms = 1000 * mine[key], 1000 * theirs[key]
        times = {"ours_ms": ours_ms, "baseline_ms": baseline_ms, "ratio": ratio(baseline_ms, ours_ms)}
        between = ", ".join(f"{1000 * each:.0f}" for each in mine["settling_s"])
        note = graphs if key == "first_s" else f"passes before: {between} ms"
        rows.append(Row(case.name, variant, PEER, equal=mine["equal"], note=note, **times))
    return rows


def rows_of_new_sizes(found: dict[str, Any]) -> list[Row]:
    """What ``benchmarks.cases.new_sizes`` has measured, as rows."""
    eager_ms = 1000 * found["eager"]
    rows = []
    for variant, key in (("first call", "first"), ("second call", "second"), ("third call", "third")):
        ours_ms = 1000 * found[key]
        times = {"ours_ms": ours_ms, "baseline_ms": eager_ms, "ratio": ratio(eager_ms, ours_ms)}
        note = f"slowest {1000 * found['slowest second']:.1f} ms" if key == "second" else ""
        rows.append(Row(NEW_SIZES, variant, "eager", kernels=found["kernels"], note=note, **times))
    without, elsewhere = found["held"]["none"]
    alone_bytes = found["held"]["alone"][0] - without
    for order in ("falling", "rising"):
        held_bytes, elsewhere_bytes = found["held"][order]
        note = f"CUDA graphs and what else is no tensor: {(elsewhere_bytes - elsewhere) / 2**20:.0f} MiB more"
        peak = {"peak_bytes": held_bytes - without, "peak_ratio": ratio(held_bytes - without, alone_bytes)}
        rows.append(Row(NEW_SIZES, f"{order} sizes", "largest alone", note=note, **peak))
    return rows


GPU_S = 100.0  # of a case there, both sides with their compilations
ON_CPU = tuple(ShapesCase(each.name, each.calls) for each in programs() if each.name != GPU_ONLY)
ON_GPU = (
    ShapesCase(NEW_SIZES, 100, estimate_s=140),
    *(ShapesCase(each.name, each.calls, GPU_S) for each in programs()),
)
CASES = ON_GPU if torch.cuda.is_available() else ON_CPU

if __name__ == "__main__":
    sys.exit(run_suite("shapes", CASES, run_case, device="cuda" if torch.cuda.is_available() else "cpu"))
