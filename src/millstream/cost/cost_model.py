"""The cost of a kernel, as data, and the protocol of those who estimate it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millstream.graph import KernelGraph


@dataclass(frozen=True, slots=True)
class KernelCost:
    """The cost of one kernel that runs alone.

    Attributes:
        duration_ns: Time from its start to that of the next kernel on the stream, launch gap included.
        compute_share: Part of the device's arithmetic units that it keeps busy meanwhile, from 0 to 1.
        memory_share: Part of the device's memory bandwidth that it uses meanwhile, from 0 to 1.
    """

    duration_ns: int
    compute_share: float = 1.0
    memory_share: float = 1.0


@dataclass(frozen=True)
class Costs:
    """The costs of one graph's kernels on one device.

    Attributes:
        kernels: By kernel id.
        wait_ns: How much later than on its own stream a kernel starts when it has to wait for another stream.
        start_ns: Least time between the starts of two kernels, on whichever streams.
        crowding: By what part of its time every other kernel on the device slows a kernel down.
    """

    kernels: tuple[KernelCost, ...]
    wait_ns: int = 0
    start_ns: int = 0
    crowding: float = 0.0

    @property
    def total_ns(self) -> int:
        """How long the kernels take one after another."""
        return sum(cost.duration_ns for cost in self.kernels)


class CostModel(Protocol):
    """Tells what the kernels of a graph cost: by calculation, by measurement, or both."""

    def estimate(self, graph: KernelGraph) -> Costs:
        """Estimate the costs of every kernel of a graph."""
        ...
