"""A placement on streams: its plan, and what that is predicted to take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from millstream.cost import Costs
from millstream.graph import KernelGraph, Plan, derive_dependencies
from millstream.placement.crossing import Placement
from millstream.placement.machine import Machine
from millstream.schedule import assign_among, assign_offsets, peak_bytes, place_allocations, place_waits
from millstream.simulate import simulate

AHEAD = 4  # kernels and copies that touch a device, by which one of them may be ahead of another where memory is short


def keep_close(graph: KernelGraph, predecessors: Sequence[Sequence[int]]) -> list[list[int]]:
    """Let nothing on a device run far ahead of, or behind, its copies, in the order of the program.

    Memory goes from one stream to another only where these wait for each other. A link that brings all gradients as
    soon as it can needs memory for all of them, though each is used up at once; and those that wait to be sent keep
    theirs.

    Returns:
        For each kernel those that it waits for, with these.
    """
    touching: dict[str, deque[int]] = {}  # by device, its latest few
    passed: dict[str, dict[object, int]] = {}  # the latest before those, by where it runs
    found = []
    for kernel, before in zip(graph.kernels, predecessors, strict=True):
        ends = graph.links.get(kernel.id, (kernel.device,))
        found.append(sorted({*before, *(each for end in ends for each in passed.get(end, {}).values())}))
        for end in ends:
            latest = touching.setdefault(end, deque())
            latest.append(kernel.id)
            if len(latest) > AHEAD:
                old = latest.popleft()
                passed.setdefault(end, {})[graph.links.get(old, end)] = old
    return found


@dataclass(frozen=True)
class PlacedPlan:
    """A placement with its plan.

    Attributes:
        placement: What it is a plan of.
        costs: Of the kernels of that, copies included.
        machine: What they run on.
    """

    placement: Placement
    costs: Costs
    machine: Machine

    @property
    def graph(self) -> KernelGraph:
        """With copies."""
        return self.placement.graph

    @cached_property
    def _issued(self) -> Plan:
        """Launches, records and waits: all that the simulator looks at.

        Each device has streams of its own, and each link has one for each direction, on which nothing is but copies.
        """
        graph, machine = self.graph, self.machine
        streams: dict[object, list[int]] = {}
        for number, device in enumerate(machine.devices):
            streams[device] = [number * machine.streams + each for each in range(machine.streams)]
        num_streams = len(machine.devices) * machine.streams
        for link in sorted({*graph.links.values()}):
            streams[link] = [num_streams]
            num_streams += 1
        predecessors = [[found.kernel for found in each] for each in derive_dependencies(graph)]
        if machine.memory_bytes is not None:
            predecessors = keep_close(graph, predecessors)
        assignment = assign_among(
            [streams[graph.links.get(kernel.id, kernel.device)] for kernel in graph.kernels],
            predecessors,
            [cost.duration_ns for cost in self.costs.kernels],
            self.costs.wait_ns,
            streams[machine.home],
            lookahead=None if machine.memory_bytes is None else 1,  # the program's order is kept where memory is short
        )
        num_used = max(assignment.stream_of, default=0) + 1
        steps = place_waits(assignment.launch_order(), assignment.stream_of, predecessors, num_used)
        return Plan(graph, tuple(steps), num_used, "placed")

    @cached_property
    def plan(self) -> Plan:
        """To be checked before it runs."""
        return place_allocations(self._issued)

    @cached_property
    def predicted_ns(self) -> int:
        """Its time in the simulator."""
        return simulate(self._issued, self.costs).end_ns

    @property
    def devices(self) -> tuple[str, ...]:
        """Those that are used."""
        return self.graph.devices

    @cached_property
    def excess_bytes(self) -> int:
        """By how much temporaries and outputs exceed what the devices have for them."""
        bounds = self.machine.memory_bytes
        if bounds is None:
            return 0
        pairs = zip(self.machine.devices, bounds, strict=True)
        return sum(max(self.bytes_on(device) - bound, 0) for device, bound in pairs)

    def bytes_on(self, device: str) -> int:
        """Return what temporaries, in an arena, and outputs take on a device."""
        return peak_bytes(self.plan, device, assign_offsets(self.plan, device))

    @property
    def merit(self) -> tuple[int, int]:
        """The less the better: what does not fit is worse than what is slow."""
        return self.excess_bytes, self.predicted_ns
