"""Whether a pass has a worker, chosen by timing one pass with and one without.

A worker makes batches while the consumer computes. But two threads that run Python hand the interpreter's lock to each
other, which costs a short step more than a small batch does. So where that can cost little it is tried once: in one
pass the consumer makes each batch himself, when he asks for it. He does so again if his steps were shorter than in
the pass behind that, which has a worker: the first of all passes also warms everything up.

A step is what the consumer usually computes and what he waits for on average: of a source that stalls at every tenth
batch, which a worker hides, the usual wait would tell nothing. Nor would the usual batch tell what making one takes.

It is never changed in the middle of a pass: a source may hold what belongs to the thread that made it.
"""

from __future__ import annotations

import sys
import time
from statistics import fmean, median

NUM_WARM = 8
"""So many steps of a pass are not counted."""

NUM_TIMED = 32
"""So many are needed to tell anything."""

MOST_TIMED = 256
"""What takes a call to look at, or memory, is looked at in no more than this many."""

LONGEST_STEP_NS = 2_000_000
"""In longer steps the lock does not matter."""

CHEAP_NS = 100_000
"""Where making a batch takes no longer than this beyond what the consumer waits for one, a pass is tried alone."""

CHEAP_SHARE = 0.2
"""As where it takes no larger share of the step."""

GAIN = 0.95
"""Of two passes that take about as long the one with a worker is better: it can hide more."""


class Pace:
    """What is timed in one pass.

    Args:
        alone: Whether the consumer makes the batches himself.
    """

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
        self._num_made = self._num_delivered = 0
        self.asked_ns = 0  # when a batch was asked for last
        self._began_ns = self._delivered_ns = 0
        self._pulled_ns = self._waited_ns = 0  # in all, behind the warm-up
        self._work_ns: list[int] = []
        self._computed_ns: list[int] = []

    # --- the worker's side -------------------------------------------------------------------------------------------

    def begin_work(self) -> None:
        """A batch is about to be made."""
        if not self.alone and len(self._work_ns) < MOST_TIMED:
            self._began_ns = time.thread_time_ns()

    def end_work(self, pull_ns: int) -> None:
        """It is on its way.

        Args:
            pull_ns: How long it took the source. A source that sleeps keeps the consumer waiting, not the processor.
        """
        self._num_made += 1
        if self._num_made > NUM_WARM:
            self._pulled_ns += pull_ns
            if len(self._work_ns) < MOST_TIMED:
                self._work_ns.append(time.thread_time_ns() - self._began_ns)

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def ask(self) -> None:
        """A batch is asked for."""
        self.asked_ns = now_ns = time.perf_counter_ns()
        if self._num_delivered > NUM_WARM and len(self._computed_ns) < MOST_TIMED:
            self._computed_ns.append(now_ns - self._delivered_ns)

    def deliver(self) -> None:
        """It was handed out."""
        self._num_delivered += 1
        self._delivered_ns = time.perf_counter_ns()
        if self._num_delivered > NUM_WARM:
            self._waited_ns += self._delivered_ns - self.asked_ns

    # --- behind the pass ---------------------------------------------------------------------------------------------

    @property
    def step_ns(self) -> float | None:
        """How long a step takes; ``None`` where there were too few."""
        if len(self._computed_ns) < NUM_TIMED:
            return None
        return median(self._computed_ns) + self.wait_ns

    @property
    def wait_ns(self) -> float:
        """How long the consumer waits for a batch, on average."""
        return self._waited_ns / max(self._num_delivered - NUM_WARM, 1)

    @property
    def work_ns(self) -> float:
        """What making a batch takes, of the processor or of the clock, on average."""
        if not self._work_ns:
            return 0.0
        return max(fmean(self._work_ns), self._pulled_ns / (self._num_made - NUM_WARM))


class PaceMaker:
    """Chooses for each pass of a feed."""

    def __init__(self) -> None:
        self.step_ns: dict[bool, float] = {}  # by whether the consumer was alone
        self.pace: Pace | None = None  # of the present pass
        self._may_try = False

    def begin_pass(self, *, may_be_alone: bool) -> Pace:
        """Choose for a pass, by what was timed in those before.

        Args:
            may_be_alone: Whether the consumer could do the worker's work at all.
        """
        if self.pace is not None:
            self._learn(self.pace)
        alone = may_be_alone and self._may_try and self._is_shorter_alone() and not _runs_event_loop()
        self.pace = Pace(alone=alone)
        return self.pace

    def _learn(self, pace: Pace) -> None:
        step_ns = pace.step_ns
        if step_ns is None:
            return
        if pace.alone and True not in self.step_ns:
            del self.step_ns[False]  # of a pass that may have been the first of all
        self.step_ns[pace.alone] = step_ns
        if not pace.alone:
            # Who waits for a batch could as well make it: no more than the rest can be lost.
            loss_ns = pace.work_ns - pace.wait_ns
            self._may_try = step_ns <= LONGEST_STEP_NS and loss_ns <= max(CHEAP_NS, CHEAP_SHARE * step_ns)

    def _is_shorter_alone(self) -> bool:
        if True not in self.step_ns or False not in self.step_ns:
            return False in self.step_ns
        return self.step_ns[True] < GAIN * self.step_ns[False]


def _runs_event_loop() -> bool:
    """Whether this thread runs coroutines, as in a notebook: there a source could not run any of its own."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None
