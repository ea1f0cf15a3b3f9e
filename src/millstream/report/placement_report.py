"""A program on several devices, and what several would give: rows for people, plain data for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from textwrap import wrap
from typing import Any

from millstream.cost import Costs, Link
from millstream.graph import KernelGraph, Plan
from millstream.placement import Constraints, Machine, PlacedPlan, on_one, place
from millstream.report.words import count, duration, percent, size, table
from millstream.schedule import peak_bytes

_WIDTH = 118  # characters of a line
ASSUMPTIONS = (
    "all devices are equally quick, and those of one process; the host is ahead of them",
    "a link takes one copy at a time each way, beside all kernels",
    "parameters, inputs and results stay on the first device; what others read of them crosses in every run",
)


@dataclass(frozen=True)
class Crossing:
    """The traffic of a run from one device to another.

    Attributes:
        source: From there.
        target: To there.
        copies: So many.
        num_bytes: Of all.
        time_ns: Of all, one after another; ``None`` without costs.
    """

    source: str
    target: str
    copies: int
    num_bytes: int
    time_ns: int | None

    def text(self) -> str:
        """In words."""
        took = "" if self.time_ns is None else f", {duration(self.time_ns)}"
        return f"crosses {self.source} → {self.target}: {size(self.num_bytes)} in {count(self.copies, 'buffer')}{took}"


@dataclass(frozen=True)
class OnDevice:
    """The part of a run on one device.

    Attributes:
        device: Its name.
        kernels: So many, without copies.
        busy_ns: What they take; ``None`` without costs.
        peak_bytes: Most memory that temporaries and results take there.
    """

    device: str
    kernels: int
    busy_ns: int | None
    peak_bytes: int


def find_crossings(graph: KernelGraph, costs: Costs | None) -> list[Crossing]:
    """Return what crosses each link, in the order of first use."""
    copies: dict[tuple[str, str], list[int]] = {}
    for kernel, link in graph.links.items():
        copies.setdefault(link, []).append(kernel)
    return [
        Crossing(
            *link,
            len(each),
            sum(graph.buffer_of[graph.kernels[kernel].writes[0]].num_bytes for kernel in each),
            None if costs is None else sum(costs.kernels[kernel].duration_ns for kernel in each),
        )
        for link, each in copies.items()
    ]


def find_devices(plan: Plan, costs: Costs | None) -> list[OnDevice]:
    """Return what runs where."""
    graph, found = plan.graph, []
    for device in sorted({buffer.device for buffer in graph.buffers} | {*graph.devices}):
        own = [kernel.id for kernel in graph.kernels if kernel.device == device and kernel.id not in graph.links]
        busy_ns = None if costs is None else sum(costs.kernels[kernel].duration_ns for kernel in own)
        found.append(OnDevice(device, len(own), busy_ns, peak_bytes(plan, device)))
    return found


def device_lines(plan: Plan, costs: Costs | None) -> list[str]:
    """A row for each device, and a line for each link; nothing where there is one device."""
    if len(plan.graph.devices) < 2:
        return []
    devices = find_devices(plan, costs)
    rows = [(each.device, str(each.kernels), duration(each.busy_ns), size(each.peak_bytes)) for each in devices]
    lines = table(("device", "kernels", "busy", "temporaries and outputs"), rows, right={1, 2, 3})
    return [*lines, *(f"  {each.text()}" for each in find_crossings(plan.graph, costs))]


def device_data(plan: Plan, costs: Costs | None) -> dict[str, Any]:
    """The same as plain data; nothing where there is one device."""
    if len(plan.graph.devices) < 2:
        return {"devices": [], "crossings": []}
    return {
        "devices": [asdict(each) for each in find_devices(plan, costs)],
        "crossings": [asdict(each) for each in find_crossings(plan.graph, costs)],
    }


@dataclass(frozen=True)
class PlacementReport:
    """One program on several numbers of devices of one process.

    Attributes:
        graph: On one device.
        costs: Of its kernels.
        is_calculated: No kernel was measured.
        constraints: What the graph does not say.
        link: Between devices.
        counts: Numbers of devices.
    """

    graph: KernelGraph
    costs: Costs
    is_calculated: bool
    constraints: Constraints
    link: Link
    counts: Sequence[int]

    @cached_property
    def placed(self) -> dict[int, PlacedPlan]:
        """The best plan that was found for each number of devices."""
        return {
            number: place(self.graph, self.costs, self._machine(number), self.constraints) for number in self.counts
        }

    @cached_property
    def one_ns(self) -> int:
        """On one device, one kernel after another."""
        return on_one(self.graph, self.costs, self._machine(1)).predicted_ns

    def _machine(self, number: int) -> Machine:
        kind = next(iter(self.graph.devices), "cpu").partition(":")[0]
        return Machine(tuple(f"{kind}:{each}" for each in range(number)), self.link)

    def text(self) -> str:
        """For a terminal."""
        of_one = "calculated from bytes and operations" if self.is_calculated else "measured kernel by kernel"
        rows = []
        for number, placed in self.placed.items():
            crossings = find_crossings(placed.graph, placed.costs)
            rows.append(
                (
                    str(number),
                    str(len(placed.devices)),
                    duration(placed.predicted_ns),
                    f"{self.one_ns / max(placed.predicted_ns, 1):.2f} x",
                    size(sum(each.num_bytes for each in crossings)),
                    percent(max((each.time_ns or 0 for each in crossings), default=0), placed.predicted_ns),
                )
            )
        head = ("devices", "used", "run", "speed", "crosses", "of the time, on the busiest link")
        lines = [
            f"{self.graph.name} placed on devices of one process: {count(len(self.graph.kernels), 'kernel')}, {of_one}",
            *table(head, rows, right={0, 1, 2, 3, 4, 5}),
        ]
        if (most := max(self.placed.values(), key=lambda placed: len(placed.devices), default=None)) is not None:
            lines += device_lines(most.plan, most.costs)
        lines.append("  assumed:")
        for each in (self.link.describe(), *ASSUMPTIONS):
            lines += wrap(each, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data; sizes in bytes, times in nanoseconds."""
        return {
            "name": self.graph.name,
            "link": self.link.describe(),
            "assumptions": list(ASSUMPTIONS),
            "calculated": self.is_calculated,
            "one_ns": self.one_ns,
            "rows": [
                {"devices": number, "run_ns": placed.predicted_ns, "used": device_data(placed.plan, placed.costs)}
                for number, placed in self.placed.items()
            ],
        }
