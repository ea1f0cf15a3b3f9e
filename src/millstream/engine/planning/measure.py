"""Measure each kernel alone on its device while the program runs for its caller.

The first call of a program is needed anyway, to warm it up. Here it also measures: after each launch, the same launch
is captured a few times in a row into a small CUDA graph, which is timed. So the kernel works on real values in real
memory, and its time contains what separates it from the next kernel on a stream, as in the graph that is scheduled.
What a kernel that updates something in place wrote is put back afterwards, and what it counts in before each launch.
Kernels that are equal by their key are measured once.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from millstream.cost import KernelCost, MeasuredCosts
from millstream.device import DeviceContext
from millstream.device.cuda_graphs.capturing import capture
from millstream.device.cuda_graphs.occupancy import filled_share
from millstream.device.cuda_graphs.workspaces import take_workspaces
from millstream.engine.unchanged import may_count, rewinding
from millstream.graph import Kernel, KernelGraph, KernelKind
from millstream.program import Program

TARGET_NS = 100_000  # length of a timed graph: short launches are repeated more often
MOST_REPEATS, FEWEST_REPEATS = 24, 4
SAMPLES = 5


class CostMeter:
    """Observes the launches of one run and measures the kernels that a table does not know.

    Args:
        program: What is run, on one CUDA device.
        context: Of that device.
        known: What is known; its estimates of the rest tell which launches need few repetitions.

    Attributes:
        costs: What was measured, by kernel key.
        error: Why measuring had to stop, or ``None``.
    """

    def __init__(self, program: Program, context: DeviceContext, known: MeasuredCosts) -> None:
        self.costs: dict[str, KernelCost] = {}
        self.error: Exception | None = None
        self._program, self._context = program, context
        graph = program.graph
        self._wanted = {kernel.id: known.key(graph, kernel) for kernel in to_measure(known, graph)}
        self._guess_ns = [cost.duration_ns for cost in known.estimate(graph).kernels]
        self._device = context.torch_device
        self._pool = torch.cuda.graph_pool_handle()
        self._latest: torch.cuda.CUDAGraph | None = None
        self._empty_ns: float | None = None

    def observe(self, kernel: int, launch: Callable[[], Any], written: tuple[torch.Tensor, ...]) -> Any:
        """Launch a kernel for the caller and measure it if need be."""
        key = self._wanted.get(kernel)
        if key is None or key in self.costs or self.error is not None:
            return launch()
        saved: list[torch.Tensor] = []
        try:
            counted = [tensor for tensor in written if may_count(tensor)]
            rewind = rewinding(counted, [tensor.clone() for tensor in counted]) if counted else None
        except (RuntimeError, torch.AcceleratorError) as error:  # no memory
            self.error = error.with_traceback(None)
            return launch()
        result = launch()
        try:
            saved = [tensor.clone() for tensor in written]
            self.costs[key] = self._measure(self._program.graph.kernels[kernel], launch, rewind)
        except (RuntimeError, torch.AcceleratorError) as error:  # no memory, or a call that cannot be captured
            self.error = error.with_traceback(None)  # which would keep what the program has in memory
        finally:  # also after Ctrl-C
            for tensor, value in zip(written, saved, strict=False):  # none where memory was short: nothing changed
                tensor.copy_(value)
        return result

    def _measure(self, kernel: Kernel, launch: Callable[[], Any], rewind: Callable[[], None] | None) -> KernelCost:
        if self._empty_ns is None:
            take_workspaces(self._context, self._program, [0])
            small = torch.empty(32, device=self._device)
            self._empty_ns = self._fixed_ns(small.zero_)
        repeats = min(max(TARGET_NS // self._guess_ns[kernel.id], FEWEST_REPEATS), MOST_REPEATS)
        if rewind is None:
            total_ns, share = self._time(launch, repeats)
            other_ns = self._empty_ns
        else:  # what it counts in may be the position at which it, too, reads or writes
            total_ns, share = self._time(lambda: (rewind(), launch()), repeats)
            other_ns, _ = self._time(rewind, repeats)
        duration_ns = max(round((total_ns - other_ns) / repeats), 1)
        limits = torch.cuda.get_device_properties(self._device)
        bandwidth = 2 * limits.memory_clock_rate * 1e3 * limits.memory_bus_width / 8  # bytes/s, double data rate
        memory_share = min(1.0, kernel.num_bytes * 1e9 / (duration_ns * bandwidth)) if bandwidth else 1.0
        return KernelCost(duration_ns, 1.0 if share is None else share, memory_share)

    def _fixed_ns(self, launch: Callable[[], Any]) -> float:
        """Return what launching and timing a graph takes beyond its kernels.

        From graphs of few and of many tiny ones.
        """
        few, many = self._time(launch, 4)[0], self._time(launch, 24)[0]
        return max(few - 4 * (many - few) / 20, 0.0)

    def _time(self, launch: Callable[[], Any], repeats: int) -> tuple[float, float | None]:
        """Return ns of a graph of so many launches, and the share of the device that they fill."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with capture(self._context, graph, self._pool):
            for _ in range(repeats):
                launch()
        self._latest = graph  # a pool lives as long as a graph in it
        share = filled_share(graph, self._device)
        graph.instantiate()
        samples = []
        for _ in range(SAMPLES + 1):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e6)
        return median(samples[1:]), share


def to_measure(known: MeasuredCosts, graph: KernelGraph) -> list[Kernel]:
    """The kernels of unknown cost that can be measured.

    Not those that draw from a generator: launched again, they would move it. And not control flow, which the host
    decides in that run.
    """
    missing = [kernel for kernel in known.missing(graph) if kernel.kind is not KernelKind.CONTROL]
    return [kernel for kernel in missing if not any(name.startswith("rng:") for name in kernel.reads)]
