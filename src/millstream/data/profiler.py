"""Measure where the time of each step goes, always on; it looks at a pass from outside.

A step lasts from one request for a batch to the next. On a device it is measured there, between events that the
consumer records on its stream when it asks for a batch (*ask*) and when it gets it (*get*); on the CPU by the host's
clock::

    ask ──── waits for the batch ────▶ get ──── the user's step ────▶ the next ask

The wait is the time in which the batch was not there though everything before was done. Until the copy, and what a
transform does after it, is over, it is charged backwards along the way of that batch: first to its copy (that part was
*exposed*; the rest of the copy was *hidden*), then to staging, then to the source. What is left is the host's, which
had not handed the batch out yet; without a worker it pulls and stages the next one meanwhile. The user's step is
charged to *compute* when the device still had work queued as the host came back for the next batch, and to *host* when
the device had run dry by then: the host was what the step waited for, launching kernels or computing in Python. So the
five shares sum to one.

Whether the device had run dry is told from how far it lagged behind the host: no event can be reached before it is
recorded, so when the difference of the two clocks comes out negative, it is known to have been underestimated before.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from millstream.data.stats import Stats, StepTimes, summarize
from millstream.device import DeviceContext, StreamMarker
from millstream.errors import DeviceError

NUM_FIRST = 16
"""So many steps are all measured, and the first batch of all: they show warm-up and steady state."""

INTERVAL_NS = 20_000_000
"""Later a step is measured in about this time, which dice choose: so no step of a pass is measured more often than
others, be passes long or short. On an H200's host it takes up to 90 µs, and so less than 0.5 % of the time."""

NUM_MEAN = 256
"""About so many steps the present length of a step is a mean of: so many that a step which stalls does not have those
after it measured more often."""

NUM_STEPS = 1024
"""Measured steps of a pass that are kept."""

DRY_NS, DRY_SHARE = 25_000, 0.02
"""A lag below this is the way from the host to an idle device; as is one below this share of the step."""


@dataclass(slots=True)
class BatchTimes:
    """Times of one measured batch on its way, written by the thread that takes it there; by the host's clock.

    Attributes:
        index: Number of the batch in its pass.
        asked_ns: When the source was asked.
        pulled_ns: When it had answered.
        stage_ns: When staging began.
        staged_ns: When that was over.
        num_bytes: Staged bytes.
        copy: Markers around the copy and what a transform does after it.
    """

    index: int
    asked_ns: int
    pulled_ns: int = 0
    stage_ns: int = 0
    staged_ns: int = 0
    num_bytes: int = 0
    copy: tuple[StreamMarker, StreamMarker] | None = None


@dataclass(slots=True)
class _Step:
    """A step being measured."""

    times: BatchTimes
    ask: StreamMarker
    get: StreamMarker
    end: StreamMarker | None = None


class Profiler:
    """Collects the times of a feed's steps. The consumer writes; whoever comes by reads what the device has finished.

    Args:
        context: Of the device; ``None`` on the CPU.

    Attributes:
        next_due: Number of the next batch that is to be measured.
        is_open: Whether the step that the consumer is in is measured.
        num_batches: Handed out in this pass.
        unread: Steps that are complete on the host; the device may not be there yet.
    """

    def __init__(self, context: DeviceContext | None) -> None:
        self.context = context
        self.next_due = 0
        self.is_open = False
        self.num_batches = 0
        self._asked_at: tuple[int, int] | None = None  # when a batch was asked for last, and how many there were then
        self._step_ns: float = INTERVAL_NS  # from one request for a batch to the next, on average
        self._num_mean = 0  # of so many
        self._steps: deque[StepTimes] = deque(maxlen=NUM_STEPS)  # of the present pass
        self._facts: dict[str, Any] = {"is_staged": context is not None}
        self._asked: StreamMarker | int | None = None
        self._open: _Step | None = None  # the consumer has its batch and has not come back yet
        self._on_host: tuple[BatchTimes, int, int] | None = None  # the same on the CPU: asked and got at
        self.unread: deque[_Step] = deque()
        self._reading = threading.Lock()
        self._dice = random.Random(0)
        self._num_first = NUM_FIRST  # that are still to come
        self._lag: tuple[StreamMarker, int] | None = None  # a marker, and how far the device was behind the host there

    def begin_pass(self, *, has_worker: bool) -> None:
        """A new pass: what was open has no end."""
        self._steps.clear()
        self._facts["has_worker"] = has_worker
        self.num_batches = 0
        self.is_open, self._asked_at = False, None
        # The first one of a pass waits for what a pass begins with, and is not counted.
        self.next_due = 0 if self._num_first > 0 else self._draw_distance(0)
        self._open = self._on_host = self._asked = None

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def ask(self, mark: Callable[[], StreamMarker | None], asked_ns: int, *, due: bool) -> None:
        """The consumer asks for a batch; this ends the step before. It is called if a step is open, or one is due.

        Args:
            mark: Notes where its stream stands.
            asked_ns: When it did so.
            due: Whether the coming step may be measured.
        """
        self.is_open = False
        self._take_mean(asked_ns)
        if self.context is None:
            if self._on_host is not None:
                times, asked, got = self._on_host
                self._on_host = None
                self._book(times, got - asked, asked_ns - got)
            self._asked = asked_ns
            return
        here = mark() if due or self._open is not None else None
        if self._open is not None and here is not None:
            if here.stream == self._open.get.stream:  # of two streams nobody knows which is ahead
                self._open.end = here
                self.unread.append(self._open)
            else:
                self._lag = None
        self._open = None
        self._asked = here if due else None

    def get(self, times: BatchTimes | None, mark: Callable[[], StreamMarker | None]) -> None:
        """The consumer has got a batch; of one that is not measured, only if a step was due."""
        asked, self._asked = self._asked, None
        if asked is None or times is None:
            return
        self.is_open = True
        if isinstance(asked, int):
            self._on_host = times, asked, time.perf_counter_ns()
        elif (here := mark()) is not None:
            self._open = _Step(times, asked, here)

    def _take_mean(self, asked_ns: int) -> None:
        """Note how long the steps were since it was called last in this pass."""
        before_ns, before = self._asked_at or (asked_ns, self.num_batches)
        self._asked_at = asked_ns, self.num_batches
        if num_steps := self.num_batches - before:
            self._num_mean = min(self._num_mean + num_steps, NUM_MEAN)
            mean_ns = min((asked_ns - before_ns) / num_steps, INTERVAL_NS)
            self._step_ns += (mean_ns - self._step_ns) * min(num_steps / self._num_mean, 1.0)

    # --- the worker's side -------------------------------------------------------------------------------------------

    def watch(self, number: int) -> BatchTimes:
        """Begin to measure a batch that is due and about to be pulled."""
        self.next_due = number + self._draw_distance(number)
        return BatchTimes(number, time.perf_counter_ns())

    def _draw_distance(self, number: int) -> int:
        """Return how many batches from one that is measured to the next."""
        if self.context is None:
            return 1  # a clock costs little
        if self._num_first > 0:
            self._num_first -= number > 0
            return 1
        chance = min(self._step_ns / INTERVAL_NS, 1.0)
        distance = 1
        while self._dice.random() >= chance:
            distance += 1
        return distance

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the steps that the device has finished. Any thread; a second one leaves it to the first."""
        context = self.context
        if not self.unread or context is None or context.closed or not self._reading.acquire(blocking=False):
            return
        try:
            while self.unread:
                try:
                    step = self.unread[0]
                except IndexError:
                    return
                assert step.end is not None
                # A device in an error state refuses to tell. A measurement is no place to raise that.
                with context.capture_lock, suppress(RuntimeError, DeviceError), context.driver.spare_captures():
                    if not step.end.event.query():
                        return
                    # The copy of a batch that was handed out was waited for, so it is over, too.
                    self._measure(step, step.end)
                with suppress(IndexError):  # the pass has ended meanwhile
                    self.unread.popleft()
        finally:
            self._reading.release()

    def _measure(self, step: _Step, end: StreamMarker) -> None:
        wait_ns, run_ns = step.ask.until(step.get), step.get.until(end)
        self._lag_at(step.ask)
        is_dry = self._lag_at(end) < max(DRY_NS, DRY_SHARE * run_ns)
        copy_ns, late_ns = 0, 0
        if step.times.copy is not None:
            first, last = step.times.copy
            copy_ns, late_ns = first.until(last), min(max(last.until(step.get), 0), wait_ns)
        self._book(step.times, wait_ns, run_ns, copy_ns, late_ns, is_dry=is_dry)

    def _lag_at(self, marker: StreamMarker) -> int:
        """Return how far the device was behind the host at a marker; markers come in order."""
        lag_ns = 0
        if self._lag is not None:
            before, lag_ns = self._lag
            if before.stream != marker.stream:
                lag_ns = 0
            elif before is not marker:
                lag_ns = max(0, lag_ns + before.until(marker) - (marker.at_ns - before.at_ns))
        self._lag = marker, lag_ns
        return lag_ns

    def _book(
        self, times: BatchTimes, wait_ns: int, run_ns: int, copy_ns: int = 0, late_ns: int = 0, *, is_dry: bool = False
    ) -> None:
        """Add a step, charged to its causes. ``late_ns`` of the wait are those after the end of the copy."""
        pull_ns, stage_ns = times.pulled_ns - times.asked_ns, times.staged_ns - times.stage_ns
        copy = min(wait_ns - late_ns, copy_ns)
        stage = min(wait_ns - late_ns - copy, stage_ns)
        source = wait_ns - late_ns - copy - stage
        if not self._facts.get("has_worker", True):  # this batch stands for the next, which is like it
            making_next_ns = min(late_ns, stage_ns + pull_ns)
            next_stage = min(making_next_ns, stage_ns)
            stage += next_stage
            source += making_next_ns - next_stage
            late_ns -= making_next_ns
        compute, host = (0, late_ns + run_ns) if is_dry else (run_ns, late_ns)
        causes = source, stage, copy, compute, host
        self._steps.append(StepTimes(times.index, wait_ns, run_ns, copy_ns, pull_ns, stage_ns, causes, times.num_bytes))

    def stats(self, **facts: Any) -> Stats:
        """Return what is known of the present pass.

        Args:
            facts: Other fields of ``Stats``.
        """
        self.read()
        self._facts |= facts
        return summarize([*self._steps], num_batches=self.num_batches, **self._facts)

    def close(self) -> None:
        """End of a pass: read what the device has finished, forget the rest."""
        self.read()
        self._open = self._on_host = self._asked = self._lag = None
        self.unread.clear()
