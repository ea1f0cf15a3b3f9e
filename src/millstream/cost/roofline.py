"""The roofline model: a kernel is as slow as its memory traffic, its arithmetic, or its launch.

Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures"
(CACM 52(4), 2009), with a floor for kernels too small to fill the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.cost.cost_model import Costs, KernelCost
from millstream.graph import Kernel, KernelGraph, KernelKind


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The peak rates of a device.

    Attributes:
        bytes_per_s: Memory traffic, reads and writes together.
        matrix_flops_per_s: Rate of matrix products and convolutions.
        vector_flops_per_s: Rate of everything else.
        launch_ns: Least time from the start of a kernel to that of the next one on the stream.
        wait_ns: How much later a kernel starts when it waits for another stream.
        start_ns: Least time between the starts of two kernels, on whichever streams.
        crowding: By what part of its time every other kernel on the device slows a kernel down.
    """

    bytes_per_s: float
    matrix_flops_per_s: float
    vector_flops_per_s: float
    launch_ns: int
    wait_ns: int
    start_ns: int = 0
    crowding: float = 0.0


H200 = DeviceLimits(
    bytes_per_s=4.26e12,  # measured: a large device copy
    matrix_flops_per_s=790e12,  # measured: a bf16 product of 8192³
    vector_flops_per_s=67e12,  # data sheet: fp32
    launch_ns=840,  # measured: a tiny kernel inside a CUDA graph
    wait_ns=400,  # measured: an edge between streams inside a CUDA graph (docs/decisions/cuda-graphs.md)
    start_ns=300,  # measured: what made the simulator agree with eight towers on eight streams
    crowding=0.07,  # measured: what made it agree with the plans of four networks (docs/decisions/side-by-side.md)
)
"""One NVIDIA H200, kernels launched from a CUDA graph."""

CPU = DeviceLimits(bytes_per_s=1e10, matrix_flops_per_s=5e10, vector_flops_per_s=1e10, launch_ns=1000, wait_ns=10_000)
"""One core of a present server, in orders of magnitude."""


class Roofline:
    """Calculates costs from bytes and operations, for want of a measurement.

    Args:
        limits: The device's; by default those of ``CPU`` where a kernel runs on a CPU, and of ``H200`` elsewhere. For
            another GPU the times are wrong, but their ratios, which decide a schedule, are about right.
    """

    def __init__(self, limits: DeviceLimits | None = None) -> None:
        self._limits = limits

    def estimate(self, graph: KernelGraph) -> Costs:
        """Estimate the costs of every kernel of a graph."""
        limits = [self._limits_of(kernel) for kernel in graph.kernels]
        return Costs(
            tuple(self._cost(kernel) for kernel in graph.kernels),
            max((each.wait_ns for each in limits), default=0),
            max((each.start_ns for each in limits), default=0),
            max((each.crowding for each in limits), default=0.0),
        )

    def _limits_of(self, kernel: Kernel) -> DeviceLimits:
        return self._limits or (CPU if kernel.device.partition(":")[0] == "cpu" else H200)

    def _cost(self, kernel: Kernel) -> KernelCost:
        limits = self._limits_of(kernel)
        is_matrix = kernel.kind in (KernelKind.GEMM, KernelKind.CONV)
        compute_ns = kernel.flops * 1e9 / (limits.matrix_flops_per_s if is_matrix else limits.vector_flops_per_s)
        memory_ns = kernel.num_bytes * 1e9 / limits.bytes_per_s
        duration_ns = max(limits.launch_ns, round(compute_ns), round(memory_ns), 1)
        return KernelCost(duration_ns, min(1.0, compute_ns / duration_ns), min(1.0, memory_ns / duration_ns))
