"""Suite ``shapes``: sizes that change from call to call, on a CPU, beside torch.compile.

- ``first pass``: from the uncompiled model to the last result over all sizes, caches empty, each side by itself.
- ``later pass``: the same sizes again; the median of a few.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from benchmarks.results import Row, ratio
from benchmarks.sizes import programs
from benchmarks.suite import Settings, run_suite
from benchmarks.worker import answer_of

LIMIT_S = 1800.0  # a side that takes longer has failed
PEER = "compile"


@dataclass(frozen=True)
class ShapesCase:
    """A program of ``benchmarks.sizes``."""

    name: str
    calls: int
    estimate_s: float = 200.0


def run_side(name: str, side: str) -> dict[str, Any]:
    """Run a program by one side in a new process with empty caches."""
    with tempfile.TemporaryDirectory() as cache:
        folders = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MILLSTREAM_CACHE_DIR"), cache)
        return answer_of("benchmarks.sizes", [name, side], LIMIT_S, folders)  # type: ignore[no-any-return]


def run_case(case: ShapesCase, settings: Settings) -> list[Row]:  # noqa: ARG001  a CPU suite
    """Both sides, one after the other."""
    mine, theirs = run_side(case.name, "ours"), run_side(case.name, PEER)
    graphs = f"{case.calls} calls; {mine['graphs']} graphs, {PEER} {theirs['graphs']}"
    rows = []
    for variant, key in (("first pass", "first_s"), ("later pass", "later_s")):
        ours_ms, baseline_ms = 1000 * mine[key], 1000 * theirs[key]
        times = {"ours_ms": ours_ms, "baseline_ms": baseline_ms, "ratio": ratio(baseline_ms, ours_ms)}
        rows.append(Row(case.name, variant, PEER, equal=mine["equal"], note=graphs, **times))
    return rows


CASES = tuple(ShapesCase(each.name, each.calls) for each in programs())

if __name__ == "__main__":
    sys.exit(run_suite("shapes", CASES, run_case, device="cpu"))
