"""Whether a pass has a worker, chosen by timing one pass with and one without.

A worker makes batches while the consumer computes. But two threads that run Python hand the interpreter's lock to each
other, which costs a short step more than a small batch does. So where that can cost little it is tried once: in one
pass the consumer makes each batch himself, when he asks for it. He does so again if his steps were shorter.

It is never changed in the middle of a pass: a source may hold what belongs to the thread that made it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import pairwise
from statistics import median
from typing import Any

import torch

NUM_WARM = 8
"""So many steps of a pass are not counted."""

NUM_TIMED = 32
"""So many are needed to tell anything."""

MOST_TIMED = 256
"""Nor are more than this many looked at."""

LONGEST_STEP_NS = 2_000_000
"""In longer steps the lock does not matter."""

CHEAP_NS = 100_000
"""Batches that take the worker's processor no longer are made alone for one pass, to try it."""

CHEAP_SHARE = 0.2
"""As are those that take no larger share of the step."""

GAIN = 0.95
"""Of two passes that take about as long the one with a worker is better: it can hide more."""

_HOST = torch.device("cpu")


class Pace:
    """What is timed in one pass.

    Args:
        alone: Whether the consumer makes the batches himself.
    """

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
        self.keeps_modes = True
        self._delivered: list[int] = []
        self._work_ns: list[int] = []
        self._began_ns = 0

    # --- the worker's side -------------------------------------------------------------------------------------------

    def begin_work(self) -> None:
        """A batch is about to be made."""
        if len(self._work_ns) < MOST_TIMED:
            self._began_ns = time.thread_time_ns()

    def end_work(self) -> None:
        """It is on its way."""
        if len(self._work_ns) < MOST_TIMED:
            self._work_ns.append(time.thread_time_ns() - self._began_ns)
            self.keeps_modes = self.keeps_modes and has_usual_modes()

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """A batch was handed out."""
        if len(self._delivered) < MOST_TIMED:
            self._delivered.append(time.perf_counter_ns())

    # --- behind the pass ---------------------------------------------------------------------------------------------

    @property
    def step_ns(self) -> float | None:
        """The usual step; ``None`` where there were too few."""
        warm = self._delivered[NUM_WARM:]
        steps = [end - begin for begin, end in pairwise(warm)]
        return median(steps) if len(steps) >= NUM_TIMED else None

    @property
    def work_ns(self) -> float:
        """What a batch usually takes of the processor."""
        return median(self._work_ns) if self._work_ns else 0.0


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
        # Where a source would make its tensors is looked at here only: it takes 3 µs.
        alone = self._may_try and self._is_shorter_alone() and torch.get_default_device() == _HOST
        self.pace = Pace(alone=may_be_alone and alone)
        return self.pace

    @property
    def is_alone(self) -> bool:
        """Whether the present pass, or the last, is one without a worker."""
        return self.pace is not None and self.pace.alone

    def _learn(self, pace: Pace) -> None:
        step_ns = pace.step_ns
        if step_ns is None:
            return
        self.step_ns[pace.alone] = step_ns
        if not pace.alone:
            is_cheap = pace.work_ns <= max(CHEAP_NS, CHEAP_SHARE * step_ns)
            self._may_try = step_ns <= LONGEST_STEP_NS and is_cheap and pace.keeps_modes

    def _is_shorter_alone(self) -> bool:
        return True not in self.step_ns or self.step_ns[True] < GAIN * self.step_ns[False]


# --- modes of PyTorch ------------------------------------------------------------------------------------------------


def has_usual_modes() -> bool:
    """Whether PyTorch does in this thread what it does in a new one.

    A source may leave ``no_grad`` on where it yields: in a thread of its own that concerns nobody.
    """
    usual = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return usual and not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))


def usual_modes() -> AbstractContextManager[Any]:
    """Let a source that is asked under the consumer's ``autocast`` yield what it yields in a thread of its own."""
    return nullcontext() if has_usual_modes() else _set_usual_modes()


@contextmanager
def _set_usual_modes() -> Iterator[None]:
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for kind in filter(torch.is_autocast_enabled, ("cuda", "cpu")):
            modes.enter_context(torch.autocast(kind, enabled=False))
        yield
