"""One profiled run: hooks and sampler on, later off, and what they saw as a recording.

**Contract**
- Output, exit code, random numbers and results of what runs are untouched.
- There is one session in a process; children that are forked write down nothing but how long their batches took.
- After ``stop`` nothing of the session is left in the process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch

from millstream.errors import ArgumentError
from millstream.insight import Cause, Recording, Sample, Span, Step
from millstream.trace import frames, stacks
from millstream.trace.device import DeviceWindow
from millstream.trace.hooks import Hooks
from millstream.trace.log import Log, clock
from millstream.trace.notes import notes_of
from millstream.trace.sampler import Sampler, samples_of

Waiter = tuple[type, str]
"""A class, and the name of its function in which a loop waits for data."""

PRICED_DEPTH, NUM_PRICED = 40, 200
"""What a hook costs is measured with so many frames above it, so many times."""
NUM_SLICES = 20
"""A run without steps is cut into so many pieces, to say at least what they waited for."""
LEAST_MARKS, LEAST_STEPS = 3, 3

_lock = threading.Lock()


class Session:
    """Watches this process from ``start`` to ``stop``.

    Args:
        script: What runs, in a word.
        waiters: Functions besides a DataLoader's in which a loop waits for data.
        steppers: Functions besides an optimizer's that are a step.
        compilers: Functions besides TorchDynamo's that compile.
        uses_device: Whether the device's own profiler may be used for some steps, where there is a GPU.
    """

    def __init__(
        self,
        script: str = "",
        waiters: tuple[Waiter, ...] = (),
        steppers: tuple[Waiter, ...] = (),
        compilers: tuple[Waiter, ...] = (),
        *,
        uses_device: bool = True,
    ) -> None:
        self._script, self._places = script, (waiters, steppers, compilers)
        has_device = uses_device and torch.cuda.is_available()
        self._device = DeviceWindow(self._count_compiles, self._hurry) if has_device else None
        self._log = Log()
        self._pid = os.getpid()
        self._hooks: Hooks | None = None

    def start(self) -> None:
        """Begin to watch.

        Raises:
            ArgumentError: Another session of this process is watching.
        """
        if not _lock.acquire(blocking=False):
            raise ArgumentError("This process is being profiled already: leave out the inner one.")
        self._hooks = hooks = Hooks(self._log, *self._places)
        if self._device is not None:
            hooks.on_step, hooks.on_batch = self._device.on_step, self._device.on_batch
        self._sampler = Sampler(hooks.watch_compiler)
        self._began_unix_ns, self._began_ns = time.time_ns(), clock()
        self._sampler.start()

    def _hurry(self, is_on: bool) -> None:
        self._sampler.is_hurried = is_on

    def _count_compiles(self) -> int:
        return self._hooks.num_compiles if self._hooks is not None else 0

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, which has nothing to report."""
        return os.getpid() != self._pid

    def stop(self) -> Recording:
        """Watch no more, and say what was seen."""
        assert self._hooks is not None, "not started"
        hooks, ended_ns = self._hooks, clock()
        self._sampler.stop()
        thread = self._find_thread()
        hooks.close()  # before what they saw is read, which is no part of the run
        self._log = self._log.settled()
        device = self._device.close(thread) if self._device is not None else None
        batch_ns = hooks.worker_times.median_ns()
        hooks.worker_times.close()
        _lock.release()
        steps, caveats = self._find_steps(thread)
        has_steps = len(steps) >= LEAST_STEPS
        if not has_steps:
            if steps:
                caveats = [f"{len(steps)} steps are too few to tell them from their warm-up", *caveats]
            steps = _cut(self._began_ns, ended_ns)
        samples = samples_of(self._sampler.looks, thread)
        caveats += _why_sparse(samples, steps)
        windows = self._device.spans if self._device is not None else []
        windows_ns = sum(span.end_ns - span.start_ns for span in windows)
        always_ns = self._sampler.busy_ns - self._sampler.hurried_ns + self._log.num_events * _event_ns()
        in_process = [end - start for _, start, end, cause, _, _ in self._log.spans if cause is Cause.IN_PROCESS]
        own_ns = int(median(in_process)) if in_process else 0
        loaders = [
            replace(loader, batch_ns=batch_ns if loader.num_workers else own_ns, num_batches=self._log.num_batches[key])
            for key, loader in self._log.loaders.items()
        ]
        recording = Recording(
            script=self._script,
            device="CPU",
            start_ns=self._began_ns,
            end_ns=ended_ns,
            thread=thread,
            steps=tuple(steps),
            spans=tuple(
                Span(ident, start, end, cause, frames.sites_of(stack), detail)
                for ident, start, end, cause, stack, detail in self._log.spans
            )
            + tuple(windows),
            samples=tuple(samples),
            notes=tuple(notes_of(self._log.breaks, self._began_unix_ns, self._began_ns)),
            loaders=tuple(loaders),
            num_cores=_num_cores(),
            switch_ns=round(sys.getswitchinterval() * 1e9),
            library_roots=frames.library_roots(),
            cost_share=(always_ns + self._sampler.hurried_ns + windows_ns) / max(ended_ns - self._began_ns, 1),
            always_on_share=always_ns / max(ended_ns - self._began_ns - windows_ns, 1),
            caveats=tuple(caveats),
            rank=int(os.environ.get("RANK", "0")),
            unix_minus_clock_ns=self._began_unix_ns - self._began_ns,
            has_steps=has_steps,
            is_complete=has_steps,
        )
        frames.forget()
        stacks.forget()
        return recording if device is None else device.add_to(recording, self._began_unix_ns - self._began_ns)

    def _find_thread(self) -> int:
        """The thread that trains: who steps optimizers, or else who gets batches, or else the main thread."""
        for events in (self._log.marks, self._log.batches):
            counts = Counter(event[0] for event in events)
            if counts:
                return counts.most_common(1)[0][0]
        main = threading.main_thread().ident
        return main if main is not None else threading.get_ident()

    def _find_steps(self, thread: int) -> tuple[list[Step], list[str]]:
        """Steps, from the end of one to the end of the next, and what is to be said of them."""
        counts = Counter(optimizer for ident, _, optimizer in self._log.marks if ident == thread)
        first = counts.most_common(1)[0][0] if counts else None
        marks = [at for ident, at, optimizer in self._log.marks if ident == thread and optimizer == first]
        batches = [at for ident, at in self._log.batches if ident == thread]
        # A captured step's optimizer is seen while it is captured, and never again.
        has_ended = len(batches) >= LEAST_MARKS and marks and marks[-1] < (batches[0] + batches[-1]) / 2
        if len(marks) >= LEAST_MARKS and not has_ended:
            return _between(marks), []
        if len(batches) >= LEAST_MARKS:
            return _between(batches), ["no optimizer stepped: a step is from one batch to the next"]
        if marks or batches:
            return [], [f"{max(len(marks), len(batches))} steps are too few to tell them from their warm-up"]
        return [], ["no step was seen: neither did an optimizer step nor a DataLoader give batches"]


def _between(marks: list[int]) -> list[Step]:
    return [Step(start, end) for start, end in pairwise(marks) if start < end]


def _cut(start: int, end: int) -> list[Step]:
    edges = [start + (end - start) * number // NUM_SLICES for number in range(NUM_SLICES + 1)]
    return _between(edges)


def _why_sparse(samples: list[Sample], steps: list[Step]) -> list[str]:
    if not steps:
        return []
    seen = sum(sample.end_ns - sample.start_ns for sample in samples if sample.end_ns > steps[0].start_ns)
    whole = steps[-1].end_ns - steps[0].start_ns
    return [f"the sampler saw {seen / whole:.0%} of the time"] if whole and seen < 0.9 * whole else []


def _event_ns(depth: int = PRICED_DEPTH) -> int:
    """What a hook costs on this machine."""
    if depth:
        return _event_ns(depth - 1)
    log, start = Log(), clock()
    for _ in range(NUM_PRICED):
        log.add_span(clock(), Cause.IO, depth=1)
    return (clock() - start) // NUM_PRICED


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
