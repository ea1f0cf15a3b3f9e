"""Time in tests: none of them depends on how fast another thread or process is."""

import sys
import time

HANG_S = 120.0
"""So long waits a test for what another thread or process is sure to do: where it hangs, and nowhere else."""


class Clock:
    """Stands in for the module ``time``: time passes where it is asked for, and where somebody sleeps."""

    def __init__(self):
        self.now_ns = 1_000_000_000

    def monotonic_ns(self):
        self.now_ns += 1_000
        return self.now_ns

    def monotonic(self):
        return self.monotonic_ns() / 1e9

    perf_counter_ns = monotonic_ns

    def sleep(self, seconds):
        self.now_ns += round(1e9 * seconds)


def until(holds):
    """Wait for what another thread or process is sure to do, and nothing announces."""
    end = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end, "it never comes"
        time.sleep(1e-3)


def is_in(thread, function):
    """Whether a thread runs, or waits in, compiled code that a function of that name has called."""
    frame = sys._current_frames().get(thread.ident)
    return frame is not None and frame.f_code.co_name == function
