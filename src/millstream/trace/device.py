"""Window A: some steps under the device's own profiler (CUPTI, by torch.profiler), without PyTorch's operators.

Recording operators costs half as much again as a launch-bound step; kernels alone, a few percent. So times come from
here, and lines from hooks and samples. Not run on a GPU yet; what reads the trace is tested on synthetic ones.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from millstream.insight import Recording, Step
from millstream.insight.kineto import DeviceTrace, read_trace
from millstream.trace.hooks import Patch

FIRST_STEP, NUM_STEPS = 10, 20
"""The window begins after the warm-up, and is so long."""


class Recorded:
    """What the device's profiler saw; ``why_not`` says why there is nothing."""

    def __init__(self, trace: DeviceTrace | None, device: str, why_not: str = "") -> None:
        self.trace, self.device, self.why_not = trace, device, why_not

    def add_to(self, recording: Recording, unix_minus_clock_ns: int) -> Recording:
        """The recording with the device's side of it; only steps within the window count."""
        if self.trace is None or not self.trace.activities:
            why = self.why_not or "the device's profiler recorded nothing"
            caveats = (f"the GPU was not looked into ({why}): this is the host's side only", *recording.caveats)
            return replace(recording, device=self.device, caveats=caveats, is_complete=False)
        trace = self.trace.shifted(-unix_minus_clock_ns)
        first = min(each.start_ns for each in trace.launches or trace.activities)
        last = max(each.end_ns for each in trace.activities)
        steps = tuple(
            Step(*each) for each in ((s.start_ns, s.end_ns) for s in recording.steps) if _is_within(each, first, last)
        )
        return replace(
            recording,
            device=self.device,
            is_synchronous=False,
            steps=steps,
            activities=trace.activities,
            launches=trace.launches,
            waits=trace.waits,
            spans=(*recording.spans, *(replace(span, thread=recording.thread) for span in trace.spans)),
        )


def _is_within(step: tuple[int, int], first: int, last: int) -> bool:
    return first <= step[0] and step[1] <= last


class DeviceWindow:
    """Starts and stops the device's profiler by the count of steps; gives way to a profiler of the script's."""

    def __init__(self) -> None:
        self._patches = [
            Patch(torch.profiler.profile, "start", self._give_way),
            Patch(torch.autograd.profiler.profile, "__enter__", self._give_way),
        ]
        self._num_steps = 0
        self._profiler: Any = None
        self._is_starting = False
        self._recorded: Recorded | None = None
        self._device = torch.cuda.get_device_name()

    def on_step(self) -> None:
        """An optimizer has stepped."""
        self._num_steps += 1
        if self._num_steps == FIRST_STEP:
            self._begin()
        elif self._num_steps == FIRST_STEP + NUM_STEPS:
            self._end()

    def close(self) -> Recorded:
        """End the window, if it has not ended, and say what was seen."""
        for patch in self._patches:
            patch.close()
        if self._profiler is not None:
            self._end()
        short = f"the run ended before step {FIRST_STEP}"
        return self._recorded or Recorded(None, self._device, short)

    def _give_way(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """There is one profiler at a time; the script's must not fail because of ours."""

        def start(profiler: Any, *arguments: Any, **options: Any) -> Any:
            if self._profiler is not None and not self._is_starting:
                self._end()
            return original(profiler, *arguments, **options)

        return start

    def _begin(self) -> None:
        if torch.autograd._profiler_enabled():
            self._recorded = Recorded(None, self._device, "another profiler was running")
            return
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._is_starting = True
        try:
            profiler.start()
        except RuntimeError as error:
            self._recorded = Recorded(None, self._device, str(error).splitlines()[0])
            return
        finally:
            self._is_starting = False
        self._profiler = profiler

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        torch.cuda.synchronize()
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            self._recorded = Recorded(read_trace(json.loads(path.read_text())), self._device)
