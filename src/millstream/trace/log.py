"""The log that hooks write to. Bounded: of a long run the last part is kept."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from millstream.insight import Cause, Loader, Site
from millstream.trace.frames import RawStack, Stacks

MAX_EVENTS = 200_000

TOLD = 0
FIRST_BATCH = "first batch"
"""Detail of a span in which workers were started, and the first batch of a pass was made."""
clock = time.perf_counter_ns


@dataclass
class Log:
    """Events in the order in which they ended; appending to a deque is safe from every thread.

    Attributes:
        spans: Thread, begin, end, cause, stack, detail, and what of it no remedy saves.
        marks: Steps: thread, when, and the optimizer's ``id``, or ``TOLD`` by the user.
        batches: Batches that a loop got: thread, when.
        loaders: By name of the place where items are made: the loader.
        breaks: Graph breaks: when, and the text.
        ran_for_batch_ns: What the last batches that a loop made itself took of a processor.
        num_events: Of each kind of event.
    """

    spans: deque[tuple[int, int, int, Cause, RawStack, str, int]] = field(
        default_factory=lambda: deque(maxlen=MAX_EVENTS)
    )
    marks: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    batches: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    loaders: dict[tuple[Site | None, int], Loader] = field(default_factory=dict)
    num_batches: Counter[tuple[Site | None, int]] = field(default_factory=Counter)
    breaks: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=1000))
    ran_for_batch_ns: deque[int] = field(default_factory=lambda: deque(maxlen=1000))
    num_events: int = 0
    _stacks: Stacks = field(default_factory=Stacks)

    def between(self, start_ns: int, end_ns: int) -> Log:
        """A copy of what ended within some time, to be read: other threads may go on to write."""
        when = {"spans": 2, "marks": 1, "batches": 1, "breaks": 0}
        deques = {
            name: deque(event for event in getattr(self, name).copy() if start_ns <= event[at] <= end_ns)
            for name, at in when.items()
        }
        return replace(self, **deques, loaders=self.loaders.copy(), num_batches=self.num_batches.copy())

    def add_span(self, start_ns: int, cause: Cause, detail: str = "", depth: int = 2, stays_ns: int = 0) -> None:
        """Something has ended; the stack begins ``depth`` frames above."""
        stack = self._stacks.take(sys._getframe(depth))
        self.spans.append((threading.get_ident(), start_ns, clock(), cause, stack, detail, stays_ns))
        self.num_events += 1

    def add_mark(self, stepper: int) -> None:
        """An optimizer has stepped, or the user says so."""
        self.marks.append((threading.get_ident(), clock(), stepper))
        self.num_events += 1

    def add_batch(self) -> None:
        """A loop has got a batch."""
        self.batches.append((threading.get_ident(), clock()))
