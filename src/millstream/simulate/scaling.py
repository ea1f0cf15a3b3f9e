"""Predict a captured data-parallel step on other numbers of devices: its kernel graph on a made-up network.

Assumptions: every device has the same work, none comes late, the host is ahead, and a collective takes what its network
says whatever else the network carries. So a prediction is the best that can be hoped for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from millstream.cost import CPU, H200, Costs, KernelCost, Network
from millstream.errors import ArgumentError
from millstream.graph import Kernel, KernelKind, Plan
from millstream.simulate.clock import simulate
from millstream.simulate.communication import CollectiveTransfer, bucket_bytes, find_transfers, leave_out, operation_of

ASSUMPTIONS = (
    "every device computes the same in the same time, and none comes late",
    "the host is ahead of the device",
    "links carry nothing else, and collectives of one step travel one after another",
    "kernels beside a collective slow down where both together ask for more memory bandwidth than there is",
)
SHARE_OF_BLOCKS = 0.2  # of the multiprocessors of an H100: NCCL takes up to 24 of 132


@dataclass(frozen=True)
class Prediction:
    """The step on one number of devices.

    Attributes:
        num_devices: That many.
        step_ns: Of a step.
        one_ns: Of the step on one device, with as large a batch.
        transfers: Its collectives.
        ways: How each travels: ``ring``, ``tree`` or ``hierarchical``.
        is_verified: Whether the network's links were measured on as many devices.
    """

    num_devices: int
    step_ns: int
    one_ns: int
    transfers: tuple[CollectiveTransfer, ...]
    ways: tuple[str, ...]
    is_verified: bool

    @property
    def efficiency(self) -> float:
        """Of weak scaling: 1 where communication costs nothing."""
        return self.one_ns / self.step_ns if self.step_ns else 1.0

    @property
    def exposed_ns(self) -> int:
        """Of all collectives."""
        return sum(each.exposed_ns for each in self.transfers)

    @property
    def communication_ns(self) -> int:
        """Of all collectives, exposed and hidden."""
        return sum(each.took_ns for each in self.transfers)


def costs_on(plan: Plan, costs: Costs, network: Network, num_devices: int) -> Costs:
    """Costs with what collectives take on a network."""

    def cost(kernel: Kernel, known: KernelCost) -> KernelCost:
        if kernel.kind is not KernelKind.COLLECTIVE:
            return known
        time_ns = network.time_ns(operation_of(kernel), bucket_bytes(plan.graph, kernel), num_devices)
        limits = CPU if kernel.device.partition(":")[0] == "cpu" else H200
        memory_share = min(1.0, kernel.num_bytes * 1e9 / limits.bytes_per_s / time_ns) if time_ns else 0.0
        return KernelCost(time_ns, SHARE_OF_BLOCKS, memory_share)

    return replace(costs, kernels=tuple(map(cost, plan.graph.kernels, costs.kernels)))


def predict(plan: Plan, costs: Costs, network: Network, counts: Iterable[int]) -> list[Prediction]:
    """Predict the step on several numbers of devices, with the same batch on each of them (weak scaling).

    Buckets and plan are those of the captured step, since they do not depend on the number of devices.

    Args:
        plan: Of a step with collectives.
        costs: Of its kernels; what they say of collectives does not matter.
        network: Between devices.
        counts: Numbers of devices.

    Raises:
        ArgumentError: A number is below 1, or larger than the network allows.
    """
    graph = plan.graph
    collectives = [kernel for kernel in graph.kernels if kernel.kind is KernelKind.COLLECTIVE]
    alone = simulate(leave_out(plan, (kernel.id for kernel in collectives)), costs).end_ns
    found = []
    for count in counts:
        if count < 1:
            raise ArgumentError(f"there are {count} devices to simulate: expected 1 or more")
        on = costs_on(plan, costs, network, count)
        free = [kernel.id for kernel in collectives if not on.kernels[kernel.id].duration_ns]
        timeline = simulate(leave_out(plan, free), on)
        transfers = find_transfers(graph, timeline)
        ways = tuple(network.choose(each.operation, each.num_bytes, count)[0] for each in transfers)
        is_verified = count == 1 or network.is_verified(count)
        found.append(Prediction(count, timeline.end_ns, alone, transfers, ways, is_verified))
    return found
