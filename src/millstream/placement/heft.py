"""Units put on devices one by one, the most urgent first, each where it ends earliest.

Source: HEFT with insertion (Topcuoglu, Hariri and Wu, "Performance-effective and low-complexity task scheduling for
heterogeneous computing", IEEE TPDS 13(3), 2002), for devices of equal speed. The first kernel of a unit decides for all
of it. A link takes one copy at a time in each direction, and what has crossed is there for later readers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from millstream.cost import Costs
from millstream.graph import KernelGraph, Role, derive_dependencies
from millstream.placement.machine import Machine, Units
from millstream.schedule import Gaps, by_urgency


def place_by_urgency(
    graph: KernelGraph, costs: Costs, machine: Machine, units: Units, order_only: Collection[str] = ()
) -> tuple[int, ...]:
    """Return the number of a device for each unit."""
    return _Heft(graph, costs, machine, units, order_only).run()


class _Heft:
    """A placement in the making."""

    def __init__(
        self, graph: KernelGraph, costs: Costs, machine: Machine, units: Units, order_only: Collection[str]
    ) -> None:
        self.graph, self.machine, self.units = graph, machine, units
        self.durations_ns = [cost.duration_ns for cost in costs.kernels]
        self.predecessors = [[found.kernel for found in each] for each in derive_dependencies(graph)]
        self.device_of: list[int | None] = [0 if unit in units.fixed else None for unit in range(units.num_units)]
        shortest_ns = min(self.durations_ns, default=0)
        self.gaps = [[Gaps(shortest_ns) for _ in range(machine.streams)] for _ in machine.devices]
        self.link_free_ns: dict[tuple[int, int], int] = {}
        self.end_ns = [0] * len(graph.kernels)
        # When each storage's value is where: by storage and device.
        self.there_ns: dict[str, dict[int, int]] = {}
        self.copy_ns = {buffer.id: machine.link.copy_ns(buffer.num_bytes) for buffer in graph.buffers}
        self.stays = {b.id for b in graph.buffers if b.role is Role.CONSTANT} | set(order_only)

    def run(self) -> tuple[int, ...]:
        for kernel in by_urgency(self.predecessors, self._ranks()):
            unit = self.units.unit_of[kernel]
            known = self.device_of[unit]
            choice: Sequence[int] = range(len(self.machine.devices)) if known is None else [known]
            *_, device = min((*self._try(kernel, device), device) for device in choice)
            self.device_of[unit] = device
            self._put(kernel, device)
        return tuple(device or 0 for device in self.device_of)

    def _ranks(self) -> list[int]:
        """Longest chains of kernels, and of half of the copies that there may be between them."""
        ranks = list(self.durations_ns)
        for kernel in reversed(range(len(ranks))):
            for before in self.predecessors[kernel]:
                written = self.graph.touched_by[before][1]
                crossing_ns = max((self.copy_ns[storage] for storage in written), default=0) // 2
                ranks[before] = max(ranks[before], self.durations_ns[before] + crossing_ns + ranks[kernel])
        return ranks

    def _ready_ns(self, kernel: int, device: int, *, sends: bool = False) -> int:
        """When all that a kernel needs is on a device; with ``sends``, links are taken for it."""
        ready = max((self.end_ns[before] for before in self.predecessors[kernel]), default=0)
        free = self.link_free_ns if sends else dict(self.link_free_ns)
        for storage in self.graph.touched_by[kernel][0]:
            there = self.there_ns.setdefault(storage, {0: 0})
            if storage in self.stays:
                continue
            if device in there:
                ready = max(ready, there[device])
                continue
            source, since = next(iter(there.items()))
            arrival = max(since, free.get((source, device), 0)) + self.copy_ns[storage]
            free[source, device] = arrival
            if sends:
                there[device] = arrival
            ready = max(ready, arrival)
        return ready

    def _try(self, kernel: int, device: int) -> tuple[int, int]:
        """When a kernel would end on a device, with its results where they are wanted, and start there."""
        ready, duration = self._ready_ns(kernel, device), self.durations_ns[kernel]
        start = min(gaps.find(ready, duration)[1] for gaps in self.gaps[device])
        roles = ((storage, self.graph.buffer_of[storage].role) for storage in self.graph.touched_by[kernel][1])
        back_ns = sum(self.copy_ns[storage] for storage, role in roles if role is not Role.TEMPORARY) if device else 0
        return start + duration + back_ns, start

    def _put(self, kernel: int, device: int) -> None:
        ready, duration = self._ready_ns(kernel, device, sends=True), self.durations_ns[kernel]
        start, gap, stream = min(
            (start, gap, stream)
            for stream, gaps in enumerate(self.gaps[device])
            for gap, start in [gaps.find(ready, duration)]
        )
        self.gaps[device][stream].fill(gap, start, start + duration)
        self.end_ns[kernel] = start + duration
        for storage in self.graph.touched_by[kernel][1]:
            self.there_ns[storage] = {device: self.end_ns[kernel]}
