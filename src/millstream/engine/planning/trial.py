"""Trying a captured plan on the device without leaving a trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Generic, TypeVar

import torch

from millstream.device import DeviceContext
from millstream.engine.cuda.captured import Captured
from millstream.engine.unchanged import unchanged
from millstream.program import Program
from millstream.schedule.choose import CandidatePlan

WARM_UPS = 2
LEAST_SAMPLES, MOST_SAMPLES = 7, 25
SAMPLES_MS = 60.0  # that long a comparison may take, unless so few samples take longer


Way = TypeVar("Way")
"""A way to run a program, which is captured to be timed: a plan, most often."""


class Trials(Generic[Way]):
    """Times plans in turn with the best so far, each captured in memory of its own that is given back.

    Args:
        capture: Captures a plan, or another way to run the program, on the caller's inputs.
        serial: The plan on one stream.
        context: Of the device.
        program: What is run.

    Attributes:
        ran: Whether anything was captured.
        error: With which a capture or a trial failed, so that the context needs repair; ``None`` while none did.
    """

    def __init__(
        self,
        capture: Callable[[Way], Captured],
        serial: Way,
        context: DeviceContext,
        program: Program,
    ) -> None:
        self.ran = False
        self.error: Exception | None = None
        self._capture, self._serial, self._context, self._program = capture, serial, context, program
        self._kept: list[tuple[Way, Captured]] = []  # what was timed last

    def forget(self) -> None:
        """Give back the memory of what was timed last."""
        self._kept = []

    def serial_ns(self) -> int | None:
        """Time the plan on one stream."""
        times = self.time(self._serial, self._serial)
        return times[1] if times else None

    def compare(self, candidate: CandidatePlan, best: CandidatePlan) -> tuple[int, int] | str:
        times = self.time(candidate.plan, best.plan)  # type: ignore[arg-type]  whoever compares candidates captures plans
        return times or "could not be captured"

    def time(self, way: Way, best: Way) -> tuple[int, int] | None:
        """Time one way and the best so far in turn, in ns; ``None`` when one of them cannot be captured."""
        if self.error is not None:
            return None
        self.ran = True
        try:
            with ExitStack() as stack:
                own, base, rewind = self._prepare(stack, way, best)
                return self._compare(own.graph, base.graph, rewind)
        except (RuntimeError, torch.AcceleratorError) as error:
            self.error = error.with_traceback(None)  # which would keep what was captured
            return None

    def _prepare(self, stack: ExitStack, way: Way, best: Way) -> tuple[Captured, Captured, Callable[[], None]]:
        """Capture both, and have put back what they write when the stack is left; what counts, by a call before."""
        self._kept = [pair for pair in self._kept if pair[0] is best]  # before more memory is taken
        base, own = self._capture_once(best), self._capture_once(way)
        generator = torch.cuda.default_generators[self._context.place.index]
        written = {tensor.data_ptr(): tensor for each in (own, base) for tensor in each.written}  # slots are their own
        rewind = stack.enter_context(unchanged(self._program, [*written.values()], generator))
        return own, base, rewind

    def _compare(
        self, graph: torch.cuda.CUDAGraph, base: torch.cuda.CUDAGraph, rewind: Callable[[], None]
    ) -> tuple[int, int]:
        return compare(graph, base, rewind)

    def _capture_once(self, way: Way) -> Captured:
        for known, captured in self._kept:
            if known is way:
                return captured
        captured = self._capture(way)
        self._kept.append((way, captured))
        return captured


def compare(
    graph: torch.cuda.CUDAGraph,
    base: torch.cuda.CUDAGraph,
    rewind: Callable[[], None],
    agree: Callable[[int], int] = lambda number: number,
) -> tuple[int, int]:
    """Time two graphs in turn on the current stream; return the median ns of each.

    Args:
        graph: One.
        base: The other.
        rewind: Called before each replay, and not timed.
        agree: Told how often this process would time them; says how often it does.
    """

    def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
        rewind()
        return _replay_ms(graph)

    warm_ms = min(replay_ms(graph) + replay_ms(base) for _ in range(WARM_UPS))
    samples = agree(min(max(int(SAMPLES_MS / warm_ms), LEAST_SAMPLES), MOST_SAMPLES))
    pairs = [(replay_ms(graph), replay_ms(base)) for _ in range(samples)]
    own, other = (median(times) for times in zip(*pairs, strict=True))
    return round(own * 1e6), round(other * 1e6)


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
