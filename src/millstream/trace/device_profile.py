"""Some steps under the device's own profiler (CUPTI, by torch.profiler).

*Window A* records kernels, copies and the driver's calls, without PyTorch's operators: recording those costs half as
much again as a launch-bound step, kernels alone a few percent. All times come from here. *Window B*, a few steps later,
records Python's stacks, too; from it come the lines of the driver's calls, joined by their order in a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from millstream._torch.devices import profilers
from millstream.insight import Cause, HostSpan, ProfiledStep, Recording
from millstream.insight.profiler.alignment import LEAST_SHARE, lines_from
from millstream.insight.profiler.kineto import DeviceTrace, read_trace
from millstream.trace.agenda import FIRST_STEP, Turn, Windows
from millstream.trace.log import clock
from millstream.trace.stacks import CallStacks
from millstream.trace.watchers import Patch

NUM_BEFORE, NUM_AFTER = 5, 20
"""Steps before window A that tell what it costs, where fewer than so many come after both."""
_DETACH = "TEARDOWN_CUPTI"  # Kineto reads it when a trace has been processed
PATIENCE = 20  # batches without any step: gradients may be accumulated over so many


class Recorded:
    """The observations of the device's profiler.

    Args:
        trace: Of window A; ``None`` where there is none.
        device: Name of the device.
        why_not: Why there is nothing.
        lined: Of window B, with lines.
        over: Number of the step after which the windows were; ``None`` if there was none.
        other_threads: Of the system's numbers of threads, those of Python's that do not train: what they wait for in
            the driver is no wait of the training thread's.
    """

    def __init__(
        self,
        trace: DeviceTrace | None,
        device: str,
        why_not: str = "",
        lined: DeviceTrace | None = None,
        other_threads: frozenset[int] = frozenset(),
        over: int | None = None,
    ) -> None:
        self.over = over
        self.trace, self.device, self.why_not, self.lined = trace, device, why_not, lined
        self.other_threads = other_threads

    def add_to(self, recording: Recording, unix_minus_clock_ns: int) -> Recording:
        """The recording with the device's side of it; only steps within the window count."""
        if self.trace is None or not self.trace.activities:
            why = self.why_not or "the device's profiler recorded nothing"
            caveats = (f"the GPU was not looked into ({why}): this is the host's side only", *recording.caveats)
            return replace(recording, device=self.device, caveats=caveats, is_complete=False)
        trace = self.trace.shifted(-unix_minus_clock_ns)
        steps = _steps_within(recording.steps, trace)
        launches, spans, caveats = trace.launches, trace.spans, recording.caveats
        if self.lined is not None:
            other = self.lined.shifted(-unix_minus_clock_ns)
            lined = lines_from(trace, steps, other, _steps_within(recording.steps, other))
            launches, spans = lined.launches, lined.spans
            if lined.share < LEAST_SHARE:
                why = f"only {lined.share:.0%} of the driver's calls were found again with their lines"
                caveats = (*caveats, f"{why.replace('%', ' %')}: lines come from samples")
        spans = tuple(span for span in spans if span.thread not in self.other_threads)
        slowed, later_ns = _slowed(recording.steps, steps, self.over)
        cost = recording.cost_share
        if cost is not None and slowed is not None and slowed > 0:  # longer steps are a cost, too
            looked_ns = sum(step.end_ns - step.start_ns for step in steps)
            cost += looked_ns * slowed / (1 + slowed) / max(recording.end_ns - recording.start_ns, 1)
        return replace(
            recording,
            device=self.device,
            is_synchronous=False,
            steps=steps,
            first_step=recording.first_step + (recording.steps.index(steps[0]) if steps else 0),
            activities=trace.activities,
            launches=launches,
            waits=trace.waits,
            spans=(*recording.spans, *(replace(span, thread=recording.thread) for span in spans)),
            caveats=caveats,
            cost_share=cost,
            looking_slowed=slowed,
            later_step_ns=later_ns,
        )


def _steps_within(steps: Sequence[ProfiledStep], trace: DeviceTrace) -> tuple[ProfiledStep, ...]:
    if not trace.activities:
        return ()
    first = min(each.start_ns for each in trace.launches or trace.activities)
    last = max(each.end_ns for each in trace.activities)
    return tuple(step for step in steps if first <= step.start_ns and step.end_ns <= last)


def _slowed(
    steps: Sequence[ProfiledStep], within: Sequence[ProfiledStep], over: int | None
) -> tuple[float | None, float | None]:
    """Return how much longer steps took in the window than outside, and what they take after it on average.

    Outside are the steps after both windows, or where those are few, the last ones before the first: the median of
    several tells what a step takes, though the first one of them may still have compiled something. The other number
    is ``None`` where too few steps came after the windows, and both where too few came before, too.
    """
    after = steps[over + 1 :] if over is not None else ()
    before = [step for step in steps if within and step.end_ns <= within[0].start_ns][-NUM_BEFORE - 1 : -1]
    has_after = len(after) >= NUM_AFTER
    outside = after if has_after else before
    if not within or len(outside) < NUM_BEFORE:
        return None, None

    def middle(of: Sequence[ProfiledStep]) -> int:
        return sorted(step.end_ns - step.start_ns for step in of)[len(of) // 2]

    later_ns = (after[-1].end_ns - after[0].start_ns) / len(after) if has_after else None
    return middle(within) / max(middle(outside), 1) - 1, later_ns


class DeviceWindow:
    """Starts and stops the device's profiler by the count of steps; gives way to a profiler of the script's.

    Args:
        num_compiles: Tells how often something was compiled. Where that continues, there is no window B: the compiler's
            own Python would fill it.
        on_times: Told when window A begins, and when it is over.

    Attributes:
        spans: Starting, stopping and saving.
    """

    def __init__(
        self, num_compiles: Callable[[], int] = lambda: 0, on_times: Callable[[bool], None] = lambda is_on: None
    ) -> None:
        self._num_compiles, self._compiled_before, self._on_times = num_compiles, 0, on_times
        self._others: set[int] = set()  # profilers of the script's that record, or are about to
        self._patches = [Patch(*place, self._give_way) for place in profilers.BEGINS]
        self._patches.append(Patch(*profilers.END, self._see_end))
        self.spans: list[HostSpan] = []
        self._counts: Counter[object] = Counter()
        self._leader: object = None  # what is counted: the optimizer, or step, that was the first to do enough of them
        self._num_lonely = 0  # batches since anything stepped
        self._profiler: Any = None
        self._is_starting = False
        self._why_not = ""
        self._windows = Windows()
        self._folder: Path | None = None
        self._tree: list[Any] = []
        self._path: list[str] = []

    @property
    def _times(self) -> Path | None:
        """Window A as it was written; ``None`` before."""
        return self._written("times.json")

    @property
    def _lines(self) -> Path | None:
        return self._written("lines.json")

    def _written(self, name: str) -> Path | None:
        return path if self._folder is not None and (path := self._folder / name).exists() else None

    def on_step(self, stepper: object) -> None:
        """An optimizer, or a captured step, has stepped."""
        self._num_lonely = 0
        self._count(stepper)

    def on_batch(self) -> None:
        """A loop has got a batch: that is a step where nothing else is seen to step for long."""
        self._num_lonely += 1
        if self._num_lonely > PATIENCE:
            self._count("batches")

    def _count(self, stepper: object) -> None:
        self._counts[stepper] += 1
        number = self._counts[stepper]
        if self._leader is None and number == FIRST_STEP:
            self._leader = stepper
        start = clock()
        if stepper == self._leader and (turn := self._windows.at_step(number, start)) is not None:
            self._take(turn, start)
            self._windows.taken(clock())

    def _take(self, turn: Turn, start: int) -> None:
        if turn is Turn.BEGIN:
            self._compiled_before = self._num_compiles()
            self._begin(with_stack=False)
            self._on_times(True)
        elif turn is Turn.END:
            self._on_times(False)
            self._end()
        elif turn is Turn.END_LINED:
            self._end(is_last=True)
        elif self._times is not None and self._num_compiles() == self._compiled_before:
            self._begin(with_stack=True)
        self.spans.append(HostSpan(threading.get_ident(), start, clock(), Cause.PROFILER, (), "windows"))

    def close(self, thread: int) -> Recorded:
        """End the window, if it has not ended, and say what was seen; ``thread`` trains."""
        for patch in self._patches:
            patch.close()
        self._end()
        try:
            return self._read(thread)
        finally:
            self._tree = []
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, thread: int) -> Recorded:
        name = torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""
        if self._times is None:
            return Recorded(None, name, self._why_not or f"the run ended before step {FIRST_STEP}")
        lined = None
        if self._lines is not None:
            written = json.loads(self._lines.read_text(encoding="utf-8"))
            lined = CallStacks(self._tree, written, self._path).add_to(read_trace(written))
        trace = read_trace(json.loads(self._times.read_text(encoding="utf-8")))
        others = (each.native_id for each in threading.enumerate() if each.ident != thread)
        other_threads = frozenset(filter(None, others))
        return Recorded(trace, name, lined=lined, other_threads=other_threads, over=self._windows.over)

    def _give_way(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """There is one profiler at a time; the script's must not fail because of ours."""

        def start(profiler: Any, *arguments: Any, **options: Any) -> Any:
            if not self._is_starting:
                self._others.add(id(profiler))
                if self._profiler is not None:
                    self._end()
            return original(profiler, *arguments, **options)

        return start

    def _see_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def end(profiler: Any, *arguments: Any, **options: Any) -> Any:
            self._others.discard(id(profiler))
            return original(profiler, *arguments, **options)

        return end

    def _begin(self, *, with_stack: bool) -> None:
        if not torch.cuda.is_initialized():
            self._why_not = "nothing had used it by then"
            return
        if self._others or torch.autograd._profiler_enabled():
            self._why_not = "another profiler was running"
            return
        kinds = {torch.profiler.ProfilerActivity.CUDA}
        if with_stack:
            kinds.add(torch.profiler.ProfilerActivity.CPU)
        profiler = torch.profiler.profile(activities=kinds, with_stack=with_stack, acc_events=True)  # else it warns
        torch.cuda.synchronize()  # of a graph that runs already, only a part of its kernels would be seen
        self._is_starting = True
        try:
            profiler.start()
        except RuntimeError as error:
            self._why_not = str(error).splitlines()[0]
            return
        finally:
            self._is_starting = False
        self._profiler = profiler

    def _end(self, *, is_last: bool = False) -> None:
        """Stop and save; after the last window CUPTI is detached, or each launch stays slower."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        torch.cuda.synchronize()
        with _detaching() if is_last else contextlib.nullcontext():
            profiler.stop()
            self._folder = self._folder or Path(tempfile.mkdtemp(prefix="millstream-"))
            name = "times.json"
            if self._times is not None:
                self._tree, name = profiler.profiler.kineto_results.experimental_event_tree(), "lines.json"
                self._path = [*sys.path]
            profiler.export_chrome_trace(str(self._folder / name))


@contextlib.contextmanager
def _detaching() -> Iterator[None]:
    """Have Kineto detach CUPTI when a profiler stops, from CUDA 12.6 on: before that it may crash (pytorch#150957)."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if _DETACH in os.environ or version < (12, 6):
        yield
        return
    os.environ[_DETACH] = "1"
    try:
        yield
    finally:
        os.environ.pop(_DETACH, None)
