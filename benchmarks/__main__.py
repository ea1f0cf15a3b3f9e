"""Run every suite, one after the other, each in a process of its own, with the options given: ``make bench``."""

from __future__ import annotations

import subprocess
import sys

SUITES = (
    "inference",
    "alone",
    "identity",
    "plans",
    "families",
    "alternatives",
    "training",
    "large",
    "feed",
    "overhead",
    "hand_streams",
    "cpu",
    "shapes",
    "start",
    "decode",
    "idle",
    "parallel",
    "placement",
)

if __name__ == "__main__":
    codes = [subprocess.call([sys.executable, "-m", f"benchmarks.{suite}", *sys.argv[1:]]) for suite in SUITES]
    sys.exit(max(codes))
