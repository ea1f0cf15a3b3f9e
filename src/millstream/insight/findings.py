"""What a diagnosis says: causes, where they come from, and what their remedies would give."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import ceil
from typing import Any

from millstream.insight.aside import Aside
from millstream.insight.causes import Cause
from millstream.insight.gaps import Slice
from millstream.insight.intervals import union
from millstream.insight.records import (
    Activity,
    ActivityKind,
    HostSpan,
    Loader,
    Note,
    ProfiledStep,
    Recording,
    Site,
)

HIGH, MODERATE = 0.20, 0.05
"""Share of a step from which a cause is called so: XProf's thresholds for its input pipeline."""
UNSURE = 0.10
"""Share of a step of which nobody knows what it was; with more, that comes first."""
DATA = (Cause.DATA_WAIT, Cause.IN_PROCESS)
REPORT_VERSION = 1
"""Of ``to_dict``: another one when a key changes its meaning or goes."""
QUEUED = 0.1
"""Of the time for a batch: with more of it spent in a queue for processors, workers have all that they can get."""
MOST_WORKERS = 4
"""For a processor, of workers that mostly wait: each takes memory and a start of its own."""
RECEIVE_NS = 200_000
"""What the loop takes to receive a batch of two tensors from a worker: 0.15 to 0.3 ms of its processor's time were
measured with torch 2.13 on two hosts. Whatever is made faster than that is best made in the loop."""


class Severity(StrEnum):
    """The weight of a finding."""

    HIGH = "HIGH"
    MODERATE = "MODERATE"
    HEALTHY = "healthy"
    NOT_SURE = "not sure"
    UNRELIABLE = "unreliable"


@dataclass(frozen=True)
class Row:
    """One cause at one line.

    Attributes:
        cause: What the device waited for.
        site: The user's line; ``None`` if nobody knows it.
        inside: The library's line below it, if it is one.
        num_steps: Steps in which it happened; 0 of what is counted per run.
        idle_ns: Time of all of them.
        share: Of the window's time, or of the run's where ``is_rare``.
        recoverable_share: What of the window's time (of the run's where ``is_rare``) its remedy would return, for the
            whole cause; never add these up.
        is_rare: In fewer than one of 8 steps: counted over the whole run.
        detail: A few words more.
    """

    cause: Cause
    site: Site | None
    inside: Site | None
    num_steps: int
    idle_ns: int
    share: float
    recoverable_share: float
    is_rare: bool = False
    detail: str = ""


@dataclass(frozen=True)
class Findings:
    """The conclusions from a recording.

    Attributes:
        recording: Where it comes from.
        severity: Of the diagnosis.
        leading: The row that the diagnosis is about; ``None`` where there is nothing to mend.
        rows: Every cause at every line, the largest first.
        steps: The steps that were judged.
        step_ns: Their mean length.
        idle_ns: Of the window, in all.
        idle_by_cause: The same by cause; sums to it exactly.
        exposed: Time of the window in which the device only copied or only communicated.
        slices: The idle time, piece by piece.
        recoverable: By cause, nanoseconds of the window.
        located_share: What of the charged time has a line.
        why_unreliable: Why there is no diagnosis; empty where there is one.
        notes: Recompilations and graph breaks.
        unseen_python: In what part of the window Python code ran in pieces too short to be looked into.
        unseen_before: The user's line of the operators that came next most often.
        aside: What keeps the device busy in few steps without training, where that takes long.
    """

    recording: Recording
    severity: Severity
    leading: Row | None
    rows: tuple[Row, ...]
    steps: tuple[ProfiledStep, ...]
    step_ns: float
    idle_ns: int
    idle_by_cause: dict[Cause, int]
    exposed: dict[Cause, int]
    slices: tuple[Slice, ...]
    recoverable: dict[Cause, int]
    located_share: float
    why_unreliable: str = ""
    notes: tuple[Note, ...] = ()
    unseen_python: float = 0.0
    unseen_before: Site | None = None
    aside: Aside | None = None

    @property
    def window_ns(self) -> int:
        """Length of the steps that were judged."""
        return self.steps[-1].end_ns - self.steps[0].start_ns if self.steps else 0

    @property
    def idle_share(self) -> float:
        """Of the window."""
        return self.idle_ns / self.window_ns if self.window_ns else 0.0

    @property
    def loader(self) -> Loader | None:
        """The loader with the most batches."""
        return max(self.recording.loaders, key=lambda loader: loader.num_batches, default=None)

    @property
    def usual_step_ns(self) -> float:
        """Mean length of a step that the device's profiler does not slow, as far as that is known."""
        return self.recording.later_step_ns or self.step_ns

    @property
    def free_step_ns(self) -> float:
        """Mean length of a step without waiting for data."""
        waits = sum(self.idle_by_cause.get(cause, 0) for cause in DATA)
        return max(self.step_ns - waits / max(len(self.steps), 1), 1.0)

    @property
    def batch_ns(self) -> int:
        """What one process takes to make a batch; 0 where that is not known."""
        return self.loader.batch_ns if self.loader is not None else 0

    @property
    def batches_per_step(self) -> float:
        """More than one where gradients are accumulated, or batches are evaluated between."""
        start, end = (self.steps[0].start_ns, self.steps[-1].end_ns) if self.steps else (0, 0)
        # A wait for a feed may have one for its loader within.
        mine = (span for span in self.recording.spans if span.cause in DATA and span.thread == self.recording.thread)
        waits = union((span.start_ns, span.end_ns) for span in mine if start < span.end_ns <= end)
        return max(len(waits) / max(len(self.steps), 1), 1.0)

    @property
    def workers_needed(self) -> int:
        """Workers that would make batches as fast as steps without waiting take them; 0 where that is not known."""
        return max(ceil(self.batch_ns * self.batches_per_step / self.free_step_ns), 1) if self.batch_ns else 0

    @property
    def is_too_quick_for_workers(self) -> bool:
        """Whether the loop makes a batch itself in less time than it would take to receive one."""
        return self.loader is not None and not self.loader.num_workers and 0 < self.batch_ns <= RECEIVE_NS

    @property
    def workers_sensible(self) -> int:
        """The same, but no more than processors keep busy: workers that wait for files need none meanwhile.

        Where nobody knows what batches take of processors, they count as computed throughout; but where there are as
        many workers as processors already, one more is tried.
        """
        loader = self.loader
        if loader is None or not self.workers_needed:
            return self.workers_needed
        if loader.batch_ran_ns is None:
            return min(self.workers_needed, max(self.recording.num_cores, loader.num_workers + 1))
        undisturbed_ns = (loader.batch_ns - loader.batch_queued_ns) * self.batches_per_step
        enough = ceil(
            undisturbed_ns / max(self.free_step_ns, self._processing_ns) - 0.1
        )  # a part of one is not worth it
        return max(min(self.workers_needed, enough, MOST_WORKERS * self.recording.num_cores), 1)

    @property
    def is_short_of_processors(self) -> bool:
        """Whether workers wait for a processor rather than for anything else: more of them make no more batches."""
        if self.loader is None or self.loader.batch_ran_ns is None:
            return False
        return self.workers_needed > self.loader.num_workers >= self.workers_sensible

    @property
    def _processing_ns(self) -> float:
        """What processors take at least for the batches of a step: all there are, or where workers queue, those got."""
        loader = self.loader
        if loader is None or not loader.batch_ran_ns:
            return 0.0
        processors = float(self.recording.num_cores)
        if loader.num_workers and loader.batch_queued_ns > QUEUED * loader.batch_ns:
            processors = min(processors, loader.num_workers * loader.batch_ran_ns / loader.batch_ns)
        return loader.batch_ran_ns * self.batches_per_step / processors

    @property
    def supplied_ns(self) -> float:
        """How long the batches of a step take to come at best: of enough workers, or of items at half their cost."""
        if self.is_short_of_processors:
            return self._processing_ns / 2
        making = self.batch_ns * self.batches_per_step / self.workers_sensible
        if self.loader is not None and self.loader.batch_ran_ns is not None:
            making = max(making - self.loader.batch_queued_ns * self.batches_per_step / self.workers_sensible, 0.0)
        return max(making, self._processing_ns)

    def collectives(self) -> Iterator[tuple[int, int, int, int]]:
        """Of each collective: number of its step in the run, its number in the step, begin and end in Unix time."""
        recording = self.recording
        spans: Sequence[Activity | HostSpan] = [
            each for each in recording.activities if each.kind is ActivityKind.COMMUNICATION
        ] or [s for s in recording.spans if s.cause is Cause.COMMUNICATION and s.thread == recording.thread]
        ordered = sorted(spans, key=lambda each: each.start_ns)
        starts = [each.start_ns for each in ordered]
        for number, step in enumerate(recording.steps):
            within = ordered[bisect.bisect_left(starts, step.start_ns) : bisect.bisect_left(starts, step.end_ns)]
            for at, each in enumerate(within):
                shift = recording.unix_minus_clock_ns
                yield recording.first_step + number, at, each.start_ns + shift, each.end_ns + shift

    def to_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON; times in nanoseconds, shares from 0 to 1."""
        return {
            "version": REPORT_VERSION,
            "script": self.recording.script,
            "device": self.recording.device,
            "severity": str(self.severity),
            "why_unreliable": self.why_unreliable,
            "leading": None if self.leading is None else asdict(self.leading) | {"cause": str(self.leading.cause)},
            "num_steps": len(self.steps),
            "step_ns": self.step_ns,
            "usual_step_ns": self.usual_step_ns,
            "idle": self.idle_share,
            "idle_ns_by_cause": {str(cause): spent for cause, spent in self.idle_by_cause.items()},
            "exposed_ns": {str(cause): spent for cause, spent in self.exposed.items()},
            "recoverable": {
                str(cause): spent / self.window_ns for cause, spent in self.recoverable.items() if self.window_ns
            },
            "unknown": self.idle_by_cause.get(Cause.UNKNOWN, 0) / self.window_ns if self.window_ns else 0.0,
            "located": self.located_share,
            "aside": None if self.aside is None else asdict(self.aside),
            "unseen_python": self.unseen_python,
            "unseen_before": None if self.unseen_before is None else asdict(self.unseen_before),
            "workers_needed": self.workers_needed,
            "rows": [asdict(row) | {"cause": str(row.cause)} for row in self.rows],
            "notes": [asdict(note) | {"cause": str(note.cause)} for note in self.notes],
            "caveats": list(self.recording.caveats),
            "cost": self.recording.cost_share,
            "always_on": self.recording.always_on_share,
            "rank": self.recording.rank,
            "collectives": [list(each) for each in self.collectives()],
            "looking_slowed": self.recording.looking_slowed,
            "looking_taken_ns": self.recording.looking_taken_ns,
        }
