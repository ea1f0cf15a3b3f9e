"""Measuring: sides in turn on one clock, peak memory of captured graphs, and what makes a device time trustworthy.

A time on a GPU is easily the time of something else. So here:

- **Device time** is read from events around a replay that is queued behind a short spin: the host is ahead, and the
  launch itself does not count. ``check_ordered`` proves that the replay really runs between those events. Before, a
  second stream is used, so that no side is timed in front of what that slows (``docs/decisions/side-by-side.md``).
- **Loop time** is wall clock over some calls and one final synchronisation, as a user's loop goes.
- **Host time** is wall clock of one call that finds the device idle, without waiting for the device.
- Every side is warm before the first sample, sides take turns, and the one that begins rotates.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

Run = Callable[[], Any]

SPIN_CYCLES = 500_000  # about 0.25 ms at 2 GHz: longer than launching any captured graph takes the host
WARM_RUNS = 5
KERNELS_ELSEWHERE = 8  # so many on another stream slow all others down
LOOP_MS = 20.0  # a loop's sample lasts at least about this long, so that the final synchronisation does not weigh


@dataclass(frozen=True)
class Sample:
    """A measured time in milliseconds: median, 20th and 80th percentile, and each in the order they were taken."""

    median: float
    p20: float
    p80: float
    times: tuple[float, ...]

    @staticmethod
    def of(times_ms: list[float]) -> Sample:
        ordered = sorted(times_ms)

        def percentile(share: float) -> float:
            position = share * (len(ordered) - 1)
            low = math.floor(position)
            high = math.ceil(position)
            return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

        return Sample(percentile(0.5), percentile(0.2), percentile(0.8), tuple(times_ms))


def alternate(clocks: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Sample]:
    """Take one sample of each side per round, another side first each time.

    Args:
        clocks: For each side a function that runs it once and returns the milliseconds it took.
        rounds: Number of samples of each side.
    """
    names = list(clocks)
    times: dict[str, list[float]] = {name: [] for name in names}
    for first in range(rounds):
        for position in range(len(names)):
            name = names[(first + position) % len(names)]
            times[name].append(clocks[name]())
    return {name: Sample.of(values) for name, values in times.items()}


def by_rounds(baseline: Sample, ours: Sample) -> Sample:
    """Baseline over ours round by round: of a host whose speed drifts, both have had about the same."""
    return Sample.of([theirs / own for theirs, own in zip(baseline.times, ours.times, strict=True)])


# --- clocks ----------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_ms(run: Run, device: torch.device, calls: int = 1) -> float:
    """Milliseconds per call of a loop on an idle device, until the device is done."""
    synchronize(device)
    start = time.perf_counter_ns()
    for _ in range(calls):
        run()
    synchronize(device)
    return (time.perf_counter_ns() - start) / 1e6 / calls


def loop_clock(run: Run, device: torch.device) -> Callable[[], float]:
    """Return a clock for a user's loop; warms it up and finds how many calls make a sample long enough."""
    for _ in range(WARM_RUNS):
        run()
    calls = max(1, min(50, math.ceil(LOOP_MS / wall_ms(run, device, 2))))
    return lambda: wall_ms(run, device, calls)


def host_clock(run: Run, device: torch.device) -> Callable[[], float]:
    """Return a clock for the time a call keeps the host, the device being idle when it comes."""
    for _ in range(WARM_RUNS):
        run()

    def clock() -> float:
        synchronize(device)
        start = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - start) / 1e6

    return clock


def device_clock(run: Run, device: torch.device) -> Callable[[], float]:
    """Return a clock for the time a replay keeps the device; without a GPU it is wall clock, to try the scripts.

    Raises:
        RuntimeError: The replay does not run between events recorded around it on the current stream.
    """
    if device.type != "cuda":
        return loop_clock(run, device)
    use_second_stream(device)
    for _ in range(WARM_RUNS):
        run()
    check_ordered(run, device)

    def clock() -> float:
        torch.cuda.synchronize(device)
        start, end = queue_behind_spin(run)
        end.synchronize()
        return start.elapsed_time(end)

    return clock


@functools.cache
def use_second_stream(device: torch.device) -> None:
    """Run kernels on another stream: from the eighth on, all kernels of a process are further apart."""
    with torch.cuda.stream(torch.cuda.Stream(device)):
        small = torch.zeros(1, device=device)
        for _ in range(2 * KERNELS_ELSEWHERE):
            small.add_(1)
    torch.cuda.synchronize(device)


def queue_behind_spin(run: Run, calls: int = 1) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Queue calls between two events behind a kernel that only spins, and return the events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SPIN_CYCLES)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    return start, end


def check_ordered(run: Run, device: torch.device, calls: int = 5) -> None:
    """Prove that work queued by ``run`` waits for the current stream, and that the current stream waits for it.

    Otherwise it runs during the spin or after the last event, and almost no time passes between the events.
    """
    wall = wall_ms(run, device, calls) * calls
    start, end = queue_behind_spin(run, calls)
    torch.cuda.synchronize(device)
    between = start.elapsed_time(end)
    if between < 0.3 * wall:
        raise RuntimeError(
            f"{calls} replays take {wall:.3f} ms by the wall clock and {between:.3f} ms between events on the current "
            "stream: they are not ordered with it, so no device time can be read"
        )


# --- memory ----------------------------------------------------------------------------------------------------------


class MemoryMeter:
    """Device memory that a captured graph needs beyond what was there before it was built.

    It is the highest amount allocated *while a CUDA graph is being captured*, less what was allocated when building
    began. So it holds the temporaries of the graph, its outputs, its static inputs and whatever was prepared for it,
    and not what was in use only while compiling, autotuning or warming up. A replay allocates nothing. The same hook
    serves every side, whoever captures. cuBLAS workspaces do not count: they belong to the process, one for each stream
    that multiplies matrices (32 MiB on an H200), whichever graphs use them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        self._peak: int | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The peak, or ``None`` when no graph was captured."""
        return None if self._peak is None else self._peak - self._before

    @contextmanager
    def measure(self) -> Iterator[MemoryMeter]:
        """Watch all captures in the body."""
        if self._device.type != "cuda":
            yield self
            return
        begin, end = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end

        def capture_begin(graph: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> None:
            gc.collect()
            held = torch.cuda.memory_allocated(self._device)
            take_workspaces(self._device)
            self._before += torch.cuda.memory_allocated(self._device) - held
            torch.cuda.reset_peak_memory_stats(self._device)
            begin(graph, *args, **kwargs)

        def capture_end(graph: torch.cuda.CUDAGraph) -> None:
            self._peak = max(self._peak or 0, torch.cuda.max_memory_allocated(self._device))
            end(graph)

        self._before = settled_memory(self._device)
        graph_class: Any = torch.cuda.CUDAGraph
        graph_class.capture_begin, graph_class.capture_end = capture_begin, capture_end
        try:
            yield self
        finally:
            graph_class.capture_begin, graph_class.capture_end = begin, end


def take_workspaces(device: torch.device) -> None:
    """Let cuBLAS and cuBLASLt take their workspaces for the current stream, in memory that is never unmapped.

    A graph uses them as long as it lives, and PyTorch lets go of all when it captures graphs of its own
    (``mode="reduce-overhead"``).
    """
    with torch.cuda.use_mem_pool(_workspaces(), device):
        small = torch.ones(16, 16, device=device, dtype=torch.half)
        torch.addmm(small[0], small, torch.mm(small, small))


@functools.cache
def _workspaces() -> torch.cuda.MemPool:
    return torch.cuda.MemPool()


def settled_memory(device: torch.device) -> int:
    """Return the bytes allocated when all garbage is gone."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


# --- settings --------------------------------------------------------------------------------------------------------


def prepare_torch() -> None:
    """Set what holds for every side: fast matrix products, searched convolutions, room for many compiled variants."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.recompile_limit = 64  # type: ignore[attr-defined]  # every peer compiles the same module


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 in the body: for the run that others are judged by."""
    allowed, precision = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
        torch.set_float32_matmul_precision(precision)


@contextmanager
def sound_pools() -> Iterator[None]:
    """Average pooling on contiguous images in the body: for eager's steps that others are judged by, or begin with.

    On a GPU, PyTorch's gradient of padded average pooling is wrong where images are channels_last (pytorch#188344, in
    torch 2.11). Compiled steps get it right, and would be refused by a judge that does not.
    """
    pool = F.avg_pool2d

    def pool_soundly(image: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return pool(image.contiguous(), *arguments, **options)

    with mock.patch.object(F, "avg_pool2d", pool_soundly):
        yield


def forget_case(device: torch.device) -> None:
    """Drop compiled code and cached memory of the last case."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
