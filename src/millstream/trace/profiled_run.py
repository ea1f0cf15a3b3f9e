"""One profiled run: hooks and sampler on, later off, and what they saw as a recording.

**Contract**
- Output, exit code, random numbers and results of what runs are untouched. CUDA is initialized by what runs, or not
  at all: then the device is the CPU.
- Sessions of one process may lie within each other, or overlap: they share hooks and sampler, and each reports its own
  time. The device's profiler is the first one's.
- Children that are forked write down nothing but how long their batches took, unless they have a session of their own.
- After the last ``stop`` nothing of them is left in the process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch

from millstream._torch.devices.presence import has_gpu
from millstream.insight import Cause, HostSpan, Loader, ProfiledStep, Recording, Sample
from millstream.locks import ForkSafeLock
from millstream.trace import frames, stacks
from millstream.trace.device_profile import DeviceWindow, Recorded
from millstream.trace.log import FIRST_BATCH, TOLD, Log, clock
from millstream.trace.notes import notes_of
from millstream.trace.sampler import Look, Sampler, cpu_ns_of_threads, samples_of
from millstream.trace.watchers import Hooks
from millstream.trace.workers import BatchClocks

Waiter = tuple[type, str]
"""A class, and the name of its function in which a loop waits for data."""

PRICED_DEPTH, NUM_PRICED = 40, 200
"""What a hook costs is measured with so many frames above it, so many times."""
NUM_SLICES = 20
"""A run without steps is cut into so many pieces, to say at least what they waited for."""
LEAST_MARKS, LEAST_STEPS = 3, 3


class _Watch:
    """Hooks and sampler of this process."""

    def __init__(self, places: tuple[tuple[Waiter, ...], ...]) -> None:
        self.log, self.pid, self.num_users = Log(), os.getpid(), 0
        self.hooks = Hooks(self.log, *places)
        self.sampler = Sampler(self.hooks.watch_compiler)
        self.sampler.start()

    def close(self) -> None:
        self.sampler.stop()
        self.hooks.close()
        self.hooks.worker_times.close()


_guard = ForkSafeLock()
_watches: list[_Watch] = []
"""None, or the one of this process; a forked child has its parent's, which is of no use to it."""


def _enter(places: tuple[tuple[Waiter, ...], ...]) -> _Watch:
    with _guard.lock:
        if not _watches or _watches[0].pid != os.getpid():
            _watches[:] = [_Watch(places)]
        _watches[0].num_users += 1
        return _watches[0]


def _leave(watch: _Watch) -> None:
    with _guard.lock:
        watch.num_users -= 1
        if not watch.num_users:
            watch.close()
            _watches.clear()


class ProfiledRun:
    """Watches this process from ``start`` to ``stop``.

    Args:
        script: What runs, in a word.
        waiters: Functions besides a DataLoader's in which a loop waits for data.
        steppers: Functions besides an optimizer's that are a step.
        compilers: Functions besides TorchDynamo's that compile.
        exchangers: Functions besides ``torch.distributed``'s that wait for other processes.
        uses_device: Whether the device's own profiler may be used for some steps, where there is a GPU.
    """

    def __init__(
        self,
        script: str = "",
        waiters: tuple[Waiter, ...] = (),
        steppers: tuple[Waiter, ...] = (),
        compilers: tuple[Waiter, ...] = (),
        exchangers: tuple[Waiter, ...] = (),
        *,
        uses_device: bool = True,
    ) -> None:
        self._script, self._places = script, (waiters, steppers, compilers, exchangers)
        self._uses_device = uses_device and has_gpu()
        self._device: DeviceWindow | None = None
        self._pid = os.getpid()
        self._watch: _Watch | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._pid = os.getpid()
        self._watch = watch = _enter(self._places)
        if self._uses_device and watch.hooks.on_step is None:
            self._device = DeviceWindow(lambda: watch.hooks.num_compiles, self._hurry)
            watch.hooks.on_step, watch.hooks.on_batch = self._device.on_step, self._device.on_batch
        self._began_unix_ns, self._began_ns = time.time_ns(), clock()
        self._before = watch.sampler.busy_ns, watch.sampler.hurried_ns, watch.log.num_events
        self._ran_before = _ran_s()
        self._batches_before = watch.log.num_batches.copy()

    def mark_step(self) -> None:
        """A step is over. Where a user says so, nothing else counts."""
        if self._watch is not None:
            self._watch.hooks.mark_step(TOLD)

    def _hurry(self, is_on: bool) -> None:
        if self._watch is not None:
            self._watch.sampler.is_hurried = is_on

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, which has nothing to report."""
        return os.getpid() != self._pid

    def stop(self) -> Recording:
        """Watch no more, and say what was seen."""
        assert self._watch is not None, "not started"
        watch, ended_ns = self._watch, clock()
        self._log = watch.log.between(self._began_ns, ended_ns)
        by_workers = watch.hooks.worker_times.usual()
        batch_ns = by_workers.took_ns if by_workers is not None else 0
        if self._device is not None:
            watch.hooks.on_step = watch.hooks.on_batch = None
            self._hurry(False)
        _leave(watch)  # before what was seen is read, which is no part of the run
        looks = [look for look in watch.sampler.looks.copy() if self._began_ns <= look.at_ns <= ended_ns]
        thread = self._find_thread(looks)
        device = self._device.close(thread) if self._device is not None else None
        if not torch.cuda.is_initialized():  # what ran did not use it
            device = None
        elif device is None and self._uses_device:
            device = Recorded(None, torch.cuda.get_device_name(), "the profile around this one has its profiler")
        steps, caveats = self._find_steps(thread)
        has_steps = len(steps) >= LEAST_STEPS
        if not has_steps:
            if steps:
                caveats = [f"{len(steps)} steps are too few to tell them from their warm-up", *caveats]
            steps = _cut(self._began_ns, ended_ns)
        own_s, others_s = (now - before for now, before in zip(_ran_s(), self._ran_before, strict=True))
        is_here = has_steps or others_s <= own_s
        if not is_here:
            caveats.insert(
                0,
                f"processes that this one started ran for {others_s:.1f} s, and were not looked into: profile them, "
                "with ms.profile() in what they run, or by torchrun -m millstream profile script.py",
            )
        samples = samples_of(looks, thread)
        caveats += _why_sparse(samples, steps)
        windows = self._device.spans if self._device is not None else []
        windows_ns = sum(span.end_ns - span.start_ns for span in windows)
        sampler_ns = watch.sampler.busy_ns - self._before[0]
        hurried_ns = watch.sampler.hurried_ns - self._before[1]
        always_ns = sampler_ns - hurried_ns + (watch.log.num_events - self._before[2]) * _event_ns()
        in_process = [end - start for _, start, end, cause, *_ in self._log.spans if cause is Cause.IN_PROCESS]
        own_ns = int(median(in_process)) if in_process else 0
        own_ran = self._log.ran_for_batch_ns.copy()
        own = BatchClocks(own_ns, int(median(own_ran)), 0) if own_ns and own_ran else None
        loaders = [
            _with_times(replace(loader, num_batches=number), by_workers if loader.num_workers else own)
            for key, loader in self._log.loaders.items()
            if (number := self._log.num_batches[key] - self._batches_before[key])
        ]
        recording = Recording(
            script=self._script,
            device="CPU",
            start_ns=self._began_ns,
            end_ns=ended_ns,
            thread=thread,
            steps=tuple(steps),
            spans=(
                *_with_first_batches(
                    (
                        HostSpan(ident, start, end, cause, frames.sites_of(stack), detail, min(stays, end - start))
                        for ident, start, end, cause, stack, detail, stays in self._log.spans
                    ),
                    batch_ns,
                ),
                *windows,
            ),
            samples=tuple(samples),
            notes=tuple(notes_of(self._log.breaks, self._began_unix_ns, self._began_ns)),
            loaders=tuple(loaders),
            num_cores=_num_cores(),
            switch_ns=round(sys.getswitchinterval() * 1e9),
            library_roots=frames.library_roots(),
            cost_share=(always_ns + hurried_ns + windows_ns) / max(ended_ns - self._began_ns, 1),
            always_on_share=always_ns / max(ended_ns - self._began_ns - windows_ns, 1),
            caveats=tuple(caveats),
            rank=int(os.environ.get("RANK", "0")),
            unix_minus_clock_ns=self._began_unix_ns - self._began_ns,
            has_steps=has_steps,
            is_complete=is_here,
        )
        frames.forget()
        stacks.forget()
        return recording if device is None else device.add_to(recording, self._began_unix_ns - self._began_ns)

    def _find_thread(self, looks: Sequence[Look]) -> int:
        """The thread that trains: one that steps, or else gets batches, or else runs, the main thread preferred."""
        for events in (self._log.marks, self._log.batches):
            counts = Counter(event[0] for event in events)
            if counts:
                return counts.most_common(1)[0][0]
        main = threading.main_thread().ident or threading.get_ident()
        spent = cpu_ns_of_threads(looks)
        busiest = max(spent, key=spent.__getitem__, default=main)
        return busiest if spent.get(busiest, 0) > 2 * spent.get(main, 0) else main

    def _find_steps(self, thread: int) -> tuple[list[ProfiledStep], list[str]]:
        """Steps, from the end of one to the end of the next, and what is to be said of them."""
        told = [at for ident, at, stepper in self._log.marks if ident == thread and stepper == TOLD]
        if len(told) >= LEAST_MARKS:
            return _between(told), []
        marks = _in_turn([(at, stepper) for ident, at, stepper in self._log.marks if ident == thread])
        batches = [at for ident, at in self._log.batches if ident == thread]
        # A captured step's optimizer is seen while it is captured, and never again.
        has_ended = len(batches) >= LEAST_MARKS and marks and marks[-1] < (batches[0] + batches[-1]) / 2
        if len(marks) >= LEAST_MARKS and not has_ended:
            return _between(marks), []
        if len(batches) >= LEAST_MARKS:
            return _between(batches), ["no optimizer stepped: a step is from one batch to the next"]
        if marks or batches:
            return [], [f"{max(len(marks), len(batches))} steps are too few to tell them from their warm-up"]
        return [], [
            "no step was seen: neither did an optimizer step nor a DataLoader give batches, and nobody called p.step()"
        ]


def _in_turn(marks: list[tuple[int, int]]) -> list[int]:
    """When an optimizer stepped: the one with the most steps, and those that step before or after it, but not between.

    Two that take turns, as in a GAN, make one step together; a new one for each phase of a run follows the last.
    """
    times: dict[int, list[int]] = defaultdict(list)
    for at, optimizer in marks:
        times[optimizer].append(at)
    kept: list[list[int]] = []
    for found in sorted(times.values(), key=len, reverse=True):
        if all(found[-1] < other[0] or other[-1] < found[0] for other in kept):
            kept.append(found)
    return sorted(at for found in kept for at in found)


def _between(marks: list[int]) -> list[ProfiledStep]:
    return [ProfiledStep(start, end) for start, end in pairwise(marks) if start < end]


def _with_times(loader: Loader, usual: BatchClocks | None) -> Loader:
    if usual is None:
        return loader
    return replace(loader, batch_ns=usual.took_ns, batch_ran_ns=usual.ran_ns, batch_queued_ns=usual.queued_ns)


def _with_first_batches(spans: Iterable[HostSpan], batch_ns: int) -> Iterator[HostSpan]:
    """Of a wait for a pass's first batch, the last part is for making it, which workers that stay do as well."""
    for span in spans:
        if span.detail != FIRST_BATCH:
            yield span
            continue
        began_ns = max(span.start_ns, span.end_ns - batch_ns)
        yield replace(span, end_ns=began_ns, detail="")
        yield replace(span, start_ns=began_ns, cause=Cause.DATA_WAIT, detail="")


def _cut(start: int, end: int) -> list[ProfiledStep]:
    edges = [start + (end - start) * number // NUM_SLICES for number in range(NUM_SLICES + 1)]
    return _between(edges)


def _ran_s() -> tuple[float, float]:
    """Processor time of this process, and of those that it started and waited for."""
    own = os.times()
    return own.user + own.system, own.children_user + own.children_system


def _why_sparse(samples: list[Sample], steps: list[ProfiledStep]) -> list[str]:
    if not steps:
        return []
    seen = sum(sample.end_ns - sample.start_ns for sample in samples if sample.end_ns > steps[0].start_ns)
    whole = steps[-1].end_ns - steps[0].start_ns
    share = f"{seen / max(whole, 1):.0%}".replace("%", " %")
    return [f"looks tell of {share} of the time only"] if seen < 0.9 * whole else []


def _event_ns(depth: int = PRICED_DEPTH) -> int:
    """Return what a hook costs on this machine."""
    if depth:
        return _event_ns(depth - 1)
    log, start = Log(), clock()
    for _ in range(NUM_PRICED):
        log.add_span(clock(), Cause.IO, depth=1)
    return (clock() - start) // NUM_PRICED


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
