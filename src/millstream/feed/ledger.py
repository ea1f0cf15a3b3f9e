"""Where the time of each step went, always on.

A step lasts from one request for a batch to the next. On a device it is measured there, between events that the
consumer records on his stream when he asks for a batch (*ask*) and when he gets it (*get*); on the CPU by the host's
clock::

    ask ──── waits for the batch ────▶ get ──── the user's step ────▶ the next ask

The wait is the time in which the batch was not there though everything before was done. Until the copy, and what a
transform does behind it, is over, it is charged backwards along the way of that batch: first to its copy (that part was
*exposed*; the rest of the copy was *hidden*), then to staging, then to the source. What is left is the host's, which
had not handed the batch out yet; a loop without a worker pulls and stages the next one meanwhile. The user's step is
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
from dataclasses import asdict, dataclass, field
from typing import Any

from millstream.device import DeviceContext, Stream
from millstream.errors import DeviceError
from millstream.graph import Span, Timeline

NUM_FIRST = 16
"""So many steps are all measured, and the first batch of all: they show warm-up and steady state."""

INTERVAL_NS = 20_000_000
"""Later a step is measured in about this time, which dice choose: so no step of a pass is measured more often than
others, be passes long or short. On an H200's host it takes up to 90 µs, and so less than 0.5 % of the time."""

NUM_MEAN = 256
"""About so many steps the present length of a step is a mean of: so many that a step which stalls does not have those
behind it measured more often."""

NUM_KEPT = 64
"""Steps kept for the timeline."""

DRY_NS = 25_000
"""A lag below this is the way from the host to an idle device."""

DRY_SHARE = 0.02
"""As is one below this share of the step."""

CAUSES = ("source", "stage", "copy", "compute", "host")
LANES = ("source", "stage", "copy", "step")


class Mark:
    """A point on a stream: an event that goes back to its context when nobody needs the mark any more.

    Attributes:
        stream: The stream.
        event: Recorded there.
        at_ns: When the host did so.
    """

    __slots__ = ("_context", "at_ns", "event", "stream")

    def __init__(self, context: DeviceContext, stream: Stream, *, timing: bool = True, record: bool = True) -> None:
        self._context = context
        self.stream = stream
        self.event = context.acquire_event(timing=timing)
        if record:  # or the caller does, at once
            self.event.record(stream)
        self.at_ns = time.perf_counter_ns()

    def __del__(self) -> None:
        with suppress(AttributeError):  # of which an interrupt may have kept it
            self._context.release_event(self.event)

    def until(self, later: Mark) -> int:
        """Nanoseconds on the device; both points have been reached."""
        return round(self.event.elapsed_time(later.event) * 1e6)


@dataclass(slots=True)
class Times:
    """What is known of one batch on its way; all in nanoseconds of the host's clock.

    Attributes:
        index: Number of the batch in its pass.
        measured: Whether its step is to be measured; on the CPU, where every step is, whether the timeline shows it.
        pull_ns: When the worker began to ask the source, and when it had the batch.
        stage_ns: When staging began and ended.
        num_bytes: Staged bytes.
        copy: Marks around the copy and what a transform does behind it.
        timed: Whether anybody needs the other times: those of batches whose steps are not measured tell nothing.
    """

    index: int
    measured: bool = True
    pull_ns: tuple[int, int] = (0, 0)
    stage_ns: tuple[int, int] = (0, 0)
    num_bytes: int = 0
    copy: tuple[Mark, Mark] | None = None
    timed: bool = True


@dataclass(slots=True)
class _Step:
    """A step being measured."""

    times: Times
    ask: Mark
    get: Mark
    end: Mark | None = None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One measured step.

    Attributes:
        index: Number of its batch in its pass.
        begin_ns: When the batch was asked for.
        wait_ns: How long the device waited for it.
        run_ns: How long the user's step took after that.
        copy_ns: When the copy began, and when it and a transform ended; ``None`` without one.
        pull_ns: When the source was asked and when it had answered.
        stage_ns: When staging began and ended.
    """

    index: int
    begin_ns: int
    wait_ns: int
    run_ns: int
    copy_ns: tuple[int, int] | None
    pull_ns: tuple[int, int]
    stage_ns: tuple[int, int]


@dataclass(frozen=True)
class Stats:
    """Where the time of a feed's steps went; see ``Feed.stats``.

    Attributes:
        num_batches: Batches handed out.
        num_measured: Steps that were measured; the first of each pass is not among them, it waits for the warm-up.
        step_s: Mean length of a step.
        shares: For each cause its share of the time: ``source`` and ``stage`` (waiting for the source, for staging),
            ``copy`` (waiting for a copy, not hidden behind computing), ``compute``, ``host`` (the device had run dry).
            They sum to 1; empty before anything was measured.
        copy_s: Mean length of a copy; 0 without one.
        hidden: Share of the copies' time that was hidden; ``None`` without a copy.
        source_s: Mean time that the source took for a batch, hidden or not.
        stage_s: Mean time that staging took, hidden or not.
        batch_bytes: Mean size of a staged batch.
        num_kept: Pieces of memory that the user has kept beyond the next batch in the last pass, so that new ones had
            to be taken.
        is_alone: Whether the last pass has no worker: the loop's own thread makes each batch when it asks for it.
        is_staged: Whether batches go to a device. On the CPU ``stage`` is the time of ``transform=`` and ``cast=``.
    """

    num_batches: int
    num_measured: int
    step_s: float
    shares: dict[str, float]
    copy_s: float
    hidden: float | None
    source_s: float
    stage_s: float
    batch_bytes: float
    num_kept: int
    is_alone: bool
    is_staged: bool

    @property
    def verdict(self) -> str:
        """What limits the loop, and what would help, in a sentence or two."""
        if not self.shares:
            return "Too few batches to tell where the time goes."
        cause = max((name for name in CAUSES if name != "compute"), key=lambda name: self.shares[name])
        share = self.shares[cause]
        if share < 0.05:
            return f"The device computes {_percent(self.shares['compute'])} of the time: the feed keeps up with it."
        if cause == "stage" and not self.is_staged:
            cause = "transform"
        return _VERDICTS[cause].format(
            share=_percent(share), source=_ms(self.source_s), stage=_ms(self.stage_s), copy=_ms(self.copy_s)
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self) | {"verdict": self.verdict}

    def __str__(self) -> str:
        lines = [f"{self.num_batches} batches, {self.num_measured} steps measured, {_ms(self.step_s)} each"]
        meanings = _MEANINGS if self.is_staged else _MEANINGS | {"stage": "waiting for transform= or cast="}
        lines += [f"  {name:8} {self.shares[name]:7.1%}  {meanings[name]}" for name in CAUSES if self.shares]
        if self.hidden is not None:
            rate = self.batch_bytes / self.copy_s / 1e9 if self.copy_s else 0.0
            lines.append(f"  copies: {_ms(self.copy_s)} each, {rate:.1f} GB/s, {self.hidden:.0%} of their time hidden")
        if self.num_kept:
            lines.append(f"  {self.num_kept} pieces of memory were kept by the loop and replaced")
        if self.is_alone:
            lines.append("  the loop makes its batches itself: beside steps this short a worker took longer")
        return "\n".join([*lines, self.verdict])


_MEANINGS = {
    "source": "waiting for the source",
    "stage": "waiting for staging in pinned memory",
    "copy": "waiting for the copy",
    "compute": "computing, or with work queued",
    "host": "run dry: the host launched too slowly",
}

_VERDICTS = {
    "source": "{share} of each step waits for your DataLoader or other source, which takes {source} per batch: give it "
    "more workers, or let it do less.",
    "stage": "{share} of each step waits for staging, which takes {stage} per batch: let the source yield contiguous "
    "tensors, or smaller dtypes and cast them on the device (cast=).",
    "transform": "{share} of each step waits for transform= or cast=, which take {stage} per batch on the CPU: let "
    "them do less, or let the workers of a DataLoader do it.",
    "copy": "{share} of each step waits for the copy, which takes {copy} per batch: send smaller dtypes and cast them "
    "on the device (cast=), or do more with each batch.",
    "host": "{share} of the time belongs to steps at whose end the device had run dry: the host launches kernels, or "
    "runs Python, more slowly than the device computes. Capture the step (ms.step), and read results by ms.fetch "
    "instead of .item().",
}


@dataclass
class _Sums:
    causes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    num_steps: int = 0
    num_copies: int = 0
    copy_ns: int = 0
    hidden_ns: int = 0
    source_ns: int = 0
    stage_ns: int = 0
    num_bytes: int = 0


class Ledger:
    """Collects the times of a feed's steps. The consumer writes, the worker reads what the device has finished.

    Args:
        context: Of the device; ``None`` on the CPU.
    """

    def __init__(self, context: DeviceContext | None) -> None:
        self.context = context
        self._sums = _Sums()
        self._recent: deque[StepTimes] = deque(maxlen=NUM_KEPT)
        self._asked: Mark | int | None = None
        self._got = -1  # number of the batch handed out last
        self._open: _Step | None = None  # the consumer has its batch and has not come back yet
        self._on_host: tuple[Times, int, int] | None = None  # the same on the CPU: asked and got at
        self.unread: deque[_Step] = deque()  # complete on the host; the device may not be there yet
        self._reading = threading.Lock()
        self._asked_ns = 0  # when a batch was asked for last in this pass
        self._step_ns: float = INTERVAL_NS  # from then to the next time, at most, on average
        self._num_asked = 0  # times that this is a mean of
        self._dice = random.Random(0)
        self._num_first = NUM_FIRST  # that are still to come
        self._lag: tuple[Mark, int] | None = None  # a mark, and how far the device was behind the host there
        self.num_batches = 0
        self.num_kept = 0
        self.is_alone = False

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def begin_pass(self, *, is_alone: bool = False) -> None:
        """A new pass: what was open has no end.

        Args:
            is_alone: Whether it has no worker.
        """
        self.is_alone = is_alone
        self._got, self._asked_ns = -1, 0
        self._open = self._on_host = self._asked = None

    def ask(self, mark: Callable[[], Mark | None], times: Times | None, asked_ns: int) -> None:
        """The consumer asks for a batch; this ends the step before.

        Args:
            mark: Notes where his stream stands.
            times: Of the batch that he will get, if it is there.
            asked_ns: When he did so.
        """
        if self._asked_ns:
            self._num_asked += self._num_asked < NUM_MEAN
            self._step_ns += (min(asked_ns - self._asked_ns, INTERVAL_NS) - self._step_ns) / self._num_asked
        self._asked_ns = asked_ns
        if self.context is None:
            if self._on_host is not None:
                times, asked, got = self._on_host
                self._on_host = None
                self._book(times, asked, got - asked, asked_ns - got, None, "compute")
            self._asked = asked_ns
            return
        due = times is None or times.measured
        here = mark() if due or self._open is not None else None
        if self._open is not None and here is not None:
            if here.stream == self._open.get.stream:  # of two streams nobody knows which is ahead
                self._open.end = here
                self.unread.append(self._open)
            else:
                self._lag = None
        self._open = None
        self._asked = here if due else None

    def get(self, times: Times, mark: Callable[[], Mark | None]) -> None:
        """The consumer has got a batch."""
        self.num_batches += times.index != self._got  # or an interrupt has kept the consumer from getting it
        self._got = times.index
        asked, self._asked = self._asked, None
        if asked is None:
            return
        if isinstance(asked, int):
            self._on_host = times, asked, time.perf_counter_ns()
        elif times.measured and (here := mark()) is not None:
            self._open = _Step(times, asked, here)

    # --- the worker's side -------------------------------------------------------------------------------------------

    def is_due(self, index: int) -> bool:
        """Whether the step of the batch that is about to be pulled, the ``index``-th of its pass, is to be measured."""
        if self._num_first > 0:
            self._num_first -= index > 0
            return True
        # The first one of a pass waits for what a pass begins with, and is not counted.
        return index > 0 and self._dice.random() * INTERVAL_NS < self._step_ns

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the steps that the device has finished. Any thread; who comes second leaves it to the first."""
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
                with context.capture_lock, suppress(RuntimeError, DeviceError), context.spare_captures():
                    if not step.end.event.query():
                        return
                    # The copy of a batch that was handed out was waited for, so it is over, too.
                    self._measure(step, step.end)
                with suppress(IndexError):  # the pass has ended meanwhile
                    self.unread.popleft()
        finally:
            self._reading.release()

    def _measure(self, step: _Step, end: Mark) -> None:
        wait_ns, run_ns = step.ask.until(step.get), step.get.until(end)
        begin_ns = step.ask.at_ns + self._lag_at(step.ask)
        dry = self._lag_at(end) < max(DRY_NS, DRY_SHARE * run_ns)
        copy, late_ns = None, 0
        if step.times.copy is not None:
            first, last = step.times.copy
            behind_ns = last.until(step.get)
            over_ns = begin_ns + wait_ns - behind_ns
            copy = over_ns - first.until(last), over_ns
            late_ns = min(max(behind_ns, 0), wait_ns)
        self._book(step.times, begin_ns, wait_ns, run_ns, copy, "host" if dry else "compute", late_ns)

    def _lag_at(self, mark: Mark) -> int:
        """How far the device was behind the host at a mark; marks come in order."""
        lag_ns = 0
        if self._lag is not None:
            before, lag_ns = self._lag
            if before.stream != mark.stream:
                lag_ns = 0
            elif before is not mark:
                lag_ns = max(0, lag_ns + before.until(mark) - (mark.at_ns - before.at_ns))
        self._lag = mark, lag_ns
        return lag_ns

    def _book(
        self,
        times: Times,
        begin_ns: int,
        wait_ns: int,
        run_ns: int,
        copy_ns: tuple[int, int] | None,
        runner: str,
        late_ns: int = 0,
    ) -> None:
        """Add a step to the sums, charged to its causes, and to the timeline if it is due.

        ``late_ns`` of the wait are those behind the end of the copy.
        """
        copied_ns = 0 if copy_ns is None else copy_ns[1] - copy_ns[0]
        pulled_ns, staged_ns = (end - begin for begin, end in (times.pull_ns, times.stage_ns))
        copy_share = min(wait_ns - late_ns, copied_ns)
        stage_share = min(wait_ns - late_ns - copy_share, staged_ns)
        source_share = wait_ns - late_ns - copy_share - stage_share
        if self.is_alone:  # this batch stands for the next, which is like it
            making_next_ns = min(late_ns, staged_ns + pulled_ns)
            stage_share += min(making_next_ns, staged_ns)
            source_share += making_next_ns - min(making_next_ns, staged_ns)
            late_ns -= making_next_ns
        if times.measured:
            self._recent.append(
                StepTimes(times.index, begin_ns, wait_ns, run_ns, copy_ns, times.pull_ns, times.stage_ns)
            )
        if times.index == 0:
            return  # it waited for the warm-up
        sums = self._sums
        sums.num_steps += 1
        sums.causes["copy"] += copy_share
        sums.causes["stage"] += stage_share
        sums.causes["source"] += source_share
        sums.causes["host"] += late_ns
        sums.causes[runner] += run_ns
        if copy_ns is not None:
            sums.num_copies += 1
            sums.copy_ns += copied_ns
            sums.hidden_ns += copied_ns - copy_share
        sums.source_ns += pulled_ns
        sums.stage_ns += staged_ns
        sums.num_bytes += times.num_bytes

    def stats(self) -> Stats:
        """What is known so far."""
        self.read()
        sums = self._sums
        total = sum(sums.causes.values())
        steps = max(sums.num_steps, 1)
        return Stats(
            num_batches=self.num_batches,
            num_measured=sums.num_steps,
            step_s=total / steps / 1e9,
            shares={name: spent / total for name, spent in sums.causes.items()} if total else {},
            copy_s=sums.copy_ns / max(sums.num_copies, 1) / 1e9,
            hidden=sums.hidden_ns / sums.copy_ns if sums.copy_ns else None,
            source_s=sums.source_ns / steps / 1e9,
            stage_s=sums.stage_ns / steps / 1e9,
            batch_bytes=sums.num_bytes / steps,
            num_kept=self.num_kept,
            is_alone=self.is_alone,
            is_staged=self.context is not None,
        )

    def timeline(self) -> Timeline:
        """The last measured steps as spans: stream 0 is the source, 1 staging, 2 the copies, 3 the steps."""
        self.read()
        steps = list(self._recent)
        found: list[tuple[str, int, int, int]] = []  # name, stream, begin, end
        for step in steps:
            get_ns = step.begin_ns + step.wait_ns
            for stream, span in enumerate((step.pull_ns, step.stage_ns, step.copy_ns, (get_ns, get_ns + step.run_ns))):
                if span is not None:
                    found.append((f"{LANES[stream]} {step.index}", stream, *span))
        start = min((begin for _, _, begin, _ in found), default=0)
        found.sort(key=lambda span: (span[2], span[1]))
        spans = tuple(Span(name, stream, begin - start, end - start) for name, stream, begin, end in found)
        return Timeline(spans, len(LANES), max((span.end_ns for span in spans), default=0))

    def close(self) -> None:
        """End of a pass: read what the device has finished, forget the rest."""
        self.read()
        self._open = self._on_host = self._asked = self._lag = None
        self.unread.clear()


def draw_lanes(timeline: Timeline, width: int = 100) -> str:
    """Draw a feed's timeline as text: a line per lane, each batch by the last digit of its number."""
    lines = []
    for stream, lane in enumerate(LANES):
        line = [" "] * width
        for span in timeline.spans:
            if span.stream == stream and timeline.end_ns:
                first = span.start_ns * (width - 1) // timeline.end_ns
                last = max(first + 1, span.end_ns * (width - 1) // timeline.end_ns)
                line[first:last] = span.name[-1] * (last - first)
        lines.append(f"{lane:7}|{''.join(line)}|")
    lines.append(f"{'':8}0{timeline.end_ns / 1e6:>{width - 4}.2f} ms")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
