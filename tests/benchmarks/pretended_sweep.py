"""A sweep of which one case ends its process, run by ``test_sweeps`` with a file of results in its own folder."""

import os
from pathlib import Path

from benchmarks.sweeps import sweep
from benchmarks.sweeps.sweep import Outcome, Result, Sweep, main

FOLDER = "MILLSTREAM_TEST_SWEEP"
sweep.FOLDER = Path(os.environ.get(FOLDER, "."))


def run(case):
    if case == "dies":
        os._exit(3)
    return Result(case, Outcome.FELL_BACK if case == "falls back" else Outcome.EQUAL, "because | of this")


SWEEP = Sweep("tests.benchmarks.pretended_sweep", "Pretended", lambda: ["one", "dies", "falls back", "two"], run)

if __name__ == "__main__":
    main(SWEEP)
