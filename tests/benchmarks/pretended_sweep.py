"""A sweep of which one case ends its process, run by ``test_sweeps`` with a file of results in its own folder."""

import os
import sys
import threading

from benchmarks.sweeps.sweep import Outcome, Result, Sweep, main


def run(case, device):
    sys.stdout.write("not the last line\nthe last line\n")
    if case == "dies":
        sys.stdout.flush()
        os._exit(3)
    if case == "hangs":
        threading.Event().wait()
    return Result(case, Outcome.FELL_BACK if case == "falls back" else Outcome.EQUAL, "because | of this")


SWEEP = Sweep("tests.benchmarks.pretended_sweep", "Pretended", lambda: ["one", "dies", "falls back", "two"], run)

if __name__ == "__main__":
    main(SWEEP)
