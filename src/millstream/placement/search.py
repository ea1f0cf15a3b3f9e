"""The best placement that is found: HEFT, then local search on the simulator. One device is always a candidate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from millstream.cost import Costs
from millstream.errors import ArgumentError
from millstream.graph import KernelGraph, derive_dependencies
from millstream.placement.crossing import insert_copies
from millstream.placement.heft import place_by_urgency
from millstream.placement.machine import Constraints, Machine, find_units
from millstream.placement.planning import PlacedPlan
from millstream.placement.proof import check_placement
from millstream.placement.stages import place_in_stages

MOST_KERNELS = 15_000  # that are simulated in a search: about two seconds
MOST_STARTS = 3  # that are improved where none fits


def place(graph: KernelGraph, costs: Costs, machine: Machine, constraints: Constraints | None = None) -> PlacedPlan:
    """Place a graph on devices so that it is predicted to end as early as may be.

    Contract:
        - The plan is never predicted to be slower than on the user's device alone, where it fits on that.
        - On no device do temporaries and outputs take more than ``machine.memory_bytes`` has for it.
        - It computes what the graph does; see ``check_placement``.
        - The same arguments give the same plan.

    Steps:
        1. Find what has to stay together, or where it is.
        2. Place by HEFT, on two devices or more; compare with one device; where none fits, also divide in stages.
        3. Move units, chains of them, and units with all that comes before or after them to other devices, as long as
           the simulator says that this helps, and so much time has not been spent.

    Args:
        graph: A valid graph on one device.
        costs: Of its kernels, on any of the devices.
        machine: The devices.
        constraints: What else is to be obeyed.

    Raises:
        ArgumentError: No placement was found that fits the memory.
    """
    best = _PlacementSearch(graph, costs, machine, constraints or Constraints()).run()
    if best.excess_bytes:
        raise ArgumentError(
            f"{_describe_memory(machine)} is too small for {graph.name}: what was found needs "
            f"{best.excess_bytes} bytes more"
        )
    check_placement(graph, best.placement, machine.home, constraints.order_only if constraints else ())
    return best


def on_one(graph: KernelGraph, costs: Costs, machine: Machine) -> PlacedPlan:
    """The plan on the user's device alone."""
    return PlacedPlan(insert_copies(graph, [machine.home] * len(graph.kernels), machine.home), costs, machine)


def _describe_memory(machine: Machine) -> str:
    bounds = machine.memory_bytes or ()
    if len({*bounds}) == 1:
        return f"room for {bounds[0]} bytes on each of {len(bounds)} devices"
    told = (f"{bound} bytes on {device}" for device, bound in zip(machine.devices, bounds, strict=True))
    return f"room for {', '.join(told)}"


class _PlacementSearch:
    """The placements that have been looked at so far."""

    def __init__(self, graph: KernelGraph, costs: Costs, machine: Machine, constraints: Constraints) -> None:
        self.graph, self.costs, self.machine = graph, costs, machine
        self.units, self.order_only = find_units(graph, constraints), constraints.order_only
        self.known: dict[tuple[int, ...], PlacedPlan] = {}
        self.kernels_left = MOST_KERNELS

    def run(self) -> PlacedPlan:
        starts = [(0,) * self.units.num_units]
        for number in range(2, len(self.machine.devices) + 1):
            some = replace(self.machine, devices=self.machine.devices[:number], memory_bytes=None)
            starts.append(place_by_urgency(self.graph, self.costs, some, self.units, self.order_only))
        if min(self.assess(chosen).excess_bytes for chosen in starts):
            starts += place_in_stages(self.graph, self.units, len(self.machine.devices), self._fullness)
        starts = sorted(dict.fromkeys(starts), key=lambda chosen: self.assess(chosen).merit)
        num_tried = 1 if not self.assess(starts[0]).excess_bytes else MOST_STARTS
        groups = list(self._groups())
        found = []
        for start in starts[:num_tried]:
            self.kernels_left = MOST_KERNELS // num_tried
            found.append(self.assess(self._improve(start, groups)))
        return min(found, key=lambda placed: placed.merit)

    def _improve(self, best: tuple[int, ...], groups: Sequence[frozenset[int]]) -> tuple[int, ...]:
        """Move groups as long as that helps."""
        improved = len(self.machine.devices) > 1
        while improved:
            improved = False
            for group in groups:
                for device in range(len(self.machine.devices)):
                    moved = tuple(device if unit in group else old for unit, old in enumerate(best))
                    if self.kernels_left <= 0:
                        return best
                    if self.assess(moved).merit < self.assess(best).merit:
                        best, improved = moved, True
        return best

    def assess(self, chosen: tuple[int, ...]) -> PlacedPlan:
        """The plan for a choice of a device for each unit."""
        if chosen not in self.known:
            device_of = [self.machine.devices[chosen[unit]] for unit in self.units.unit_of]
            placement = insert_copies(self.graph, device_of, self.machine.home, self.order_only)
            costs = placement.costs(self.costs, self.machine.link)
            self.known[chosen] = PlacedPlan(placement, costs, self.machine)
            self.kernels_left -= len(placement.graph.kernels)
        return self.known[chosen]

    def _fullness(self, chosen: tuple[int, ...]) -> list[float]:
        """What each device has to hold, in parts of what it may."""
        pairs = zip(self.machine.devices, self.machine.memory_bytes or (), strict=True)
        return [self.assess(chosen).bytes_on(device) / max(bound, 1) for device, bound in pairs]

    def _groups(self) -> Iterator[frozenset[int]]:
        """Yield what is moved at once, each group once: large ones first, which change most."""
        after = self._followers()
        before: list[set[int]] = [set() for _ in after]
        for unit, each in enumerate(after):
            for other in each:
                before[other].add(unit)
        found: list[Iterable[int]] = [*self._chains(after)]
        found += [_reached(unit, links) for links in (after, before) for unit in range(len(after))]
        found += [[unit] for unit in range(len(after))]
        groups = {frozenset(each) - self.units.fixed: None for each in found}
        yield from sorted(filter(None, groups), key=lambda group: (-len(group), sorted(group)))

    def _followers(self) -> list[set[int]]:
        """For each unit those that depend on it."""
        unit_of = self.units.unit_of
        after: list[set[int]] = [set() for _ in range(self.units.num_units)]
        for kernel, found in enumerate(derive_dependencies(self.graph)):
            for each in found:
                if unit_of[each.kernel] != unit_of[kernel]:
                    after[unit_of[each.kernel]].add(unit_of[kernel])
        return after

    def _chains(self, after: list[set[int]]) -> Iterator[list[int]]:
        """Units that follow each other, cut where a unit has a follower that another chain has."""
        taken: set[int] = set()
        for start in range(len(after)):
            chain, unit = [], start
            while unit not in taken and unit not in self.units.fixed:
                taken.add(unit)
                chain.append(unit)
                unit = min(after[unit] - taken - self.units.fixed, default=unit)
            yield chain


def _reached(unit: int, links: list[set[int]]) -> set[int]:
    """A unit, and all that one comes to from it."""
    found, left = {unit}, [unit]
    while left:
        new = links[left.pop()] - found
        found |= new
        left += new
    return found
