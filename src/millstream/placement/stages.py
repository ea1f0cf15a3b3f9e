"""Units divided among devices by what they leave in memory: a start for graphs that do not fit on one device.

What is alive when the most is, such as what a forward pass leaves to its backward pass, is divided in the order in
which it comes to be: so kernels before that moment become stages, and those after it go where most of what they read
is. Searches that move a few kernels at a time don't find that: each move of its own makes copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

from millstream.graph import PLANNED_ROLES, KernelGraph
from millstream.placement.machine import Units

ROUNDS = 6  # of dividing again by what has come out


def place_in_stages(
    graph: KernelGraph, units: Units, num_devices: int, fullness: Callable[[tuple[int, ...]], Sequence[float]]
) -> list[tuple[int, ...]]:
    """Return choices of a device for each unit, each made after what came of the one before.

    Args:
        graph: To be placed.
        units: Its units.
        num_devices: That there are.
        fullness: Says of a choice what each device would have to hold, in parts of what it may.
    """
    stages = _Stages(graph, units)
    shares, found = [1.0] * num_devices, list[tuple[int, ...]]()
    for _ in range(ROUNDS):
        chosen = stages.divide(shares)
        if chosen in found:
            break
        found.append(chosen)
        full = fullness(chosen)
        mean = sum(full) / num_devices
        shares = [share * min(mean / max(part, 1e-9), 2) for share, part in zip(shares, full, strict=True)]
    return found


class _Stages:
    """What is to be divided."""

    def __init__(self, graph: KernelGraph, units: Units) -> None:
        self.graph, self.units = graph, units
        roles = {buffer.id: buffer.role for buffer in graph.buffers}
        self.planned = {name for name, role in roles.items() if role in PLANNED_ROLES}
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for kernel in graph.kernels:
            for storage in {*graph.touched_by[kernel.id][0], *graph.touched_by[kernel.id][1]} & self.planned:
                first.setdefault(storage, kernel.id)
                last[storage] = kernel.id
        last |= {graph.storage(name): len(graph.kernels) for name in graph.outputs if graph.storage(name) in first}
        change = [0] * (len(graph.kernels) + 2)
        for storage, start in first.items():
            change[start] += graph.buffer_of[storage].num_bytes
            change[last[storage] + 1] -= graph.buffer_of[storage].num_bytes
        alive = list(accumulate(change))
        self.fullest = alive.index(max(alive))
        self.saved = sorted(
            (storage for storage in first if first[storage] <= self.fullest <= last[storage]), key=first.__getitem__
        )
        self.first = first

    def divide(self, shares: Sequence[float]) -> tuple[int, ...]:
        """Return a device for each unit: the memory in question is divided as ``shares`` are."""
        sizes = [self.graph.buffer_of[storage].num_bytes for storage in self.saved]
        ends = [sum(sizes) * end / sum(shares) for end in accumulate(shares)]
        begins = [0] * len(shares)  # the first kernel of each stage
        stage, before = 0, 0
        for storage, size in zip(self.saved, sizes, strict=True):
            while stage < len(shares) - 1 and before + size / 2 > ends[stage]:
                stage += 1
                begins[stage] = self.first[storage]
            before += size
        for later in range(stage + 1, len(shares)):
            begins[later] = len(self.graph.kernels)
        chosen: dict[int, int] = dict.fromkeys(self.units.fixed, 0)
        writer: dict[str, int] = {}  # of storages, the device that has written them
        for kernel in self.graph.kernels:
            unit = self.units.unit_of[kernel.id]
            if unit not in chosen:
                is_early = kernel.id <= self.fullest
                chosen[unit] = (
                    sum(begin <= kernel.id for begin in begins) - 1 if is_early else self._nearest(kernel.id, writer)
                )
            writer |= dict.fromkeys(self.graph.touched_by[kernel.id][1], chosen[unit])
        return tuple(chosen[unit] for unit in range(self.units.num_units))

    def _nearest(self, kernel: int, writer: dict[str, int]) -> int:
        """Where most is of what a kernel reads; what it changes of the user's is on the first device."""
        votes: Counter[int] = Counter()
        reads, writes = self.graph.touched_by[kernel]
        for storage in (*reads, *writes):
            if storage in self.planned:
                if storage in writer:
                    votes[writer[storage]] += self.graph.buffer_of[storage].num_bytes
            elif storage in writes:
                votes[0] += self.graph.buffer_of[storage].num_bytes
        return max(votes, key=lambda device: (votes[device], -device), default=0)
