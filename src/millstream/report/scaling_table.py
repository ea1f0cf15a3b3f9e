"""A table of what a data-parallel step would take on other numbers of devices, with its assumptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from textwrap import wrap
from typing import Any

from millstream.cost import Network
from millstream.graph import KernelKind
from millstream.report.saved import SavedStep
from millstream.report.words import count, duration, percent, size, table
from millstream.simulate import ASSUMPTIONS, Prediction, bucket_bytes, plan_beside, predict

_WIDTH = 118  # characters of a line


@dataclass(frozen=True)
class ScalingReport:
    """A step on several numbers of devices.

    Attributes:
        step: As it was captured.
        network: Between devices.
        network_name: What the user calls it.
        counts: Numbers of devices.
    """

    step: SavedStep
    network: Network
    network_name: str
    counts: Sequence[int]

    @cached_property
    def predictions(self) -> list[Prediction]:
        """As one graph, collectives beside the kernels: by its own plan, where it ran so.

        Raises:
            ArgumentError: As ``predict``.
        """
        plan = self.step.plan if self.step.is_one_graph else plan_beside(self.step.plan.graph)
        return predict(plan, self.step.costs, self.network, self.counts)

    @cached_property
    def between(self) -> list[Prediction]:
        """In segments, each collective issued by the host after all of the backward pass.

        Raises:
            ArgumentError: As ``predict``.
        """
        plan = plan_beside(self.step.plan.graph, eager=True)
        return predict(plan, self.step.costs, self.network, self.counts)

    @property
    def bucket_sizes(self) -> list[int]:
        """Bytes of each collective, in the order in which they are issued."""
        graph = self.step.plan.graph
        return [bucket_bytes(graph, each) for each in graph.kernels if each.kind is KernelKind.COLLECTIVE]

    def text(self) -> str:
        """For a terminal."""
        graph, sizes = self.step.plan.graph, self.bucket_sizes
        of_one = "calculated from bytes and operations" if self.step.is_calculated else "measured kernel by kernel"
        lines = [
            f"{graph.name} on {self.network_name}: {count(len(graph.kernels) - len(sizes), 'kernel')}, {of_one}",
            f"  bucket plan: {size(sum(sizes))} in {count(len(sizes), 'collective')}: {', '.join(map(size, sizes))}",
            *table(
                ("devices", "step", "efficiency", "communication", "exposed", "by", "in segments", "", ""),
                [*map(self._row, self.predictions, self.between)],
                right={0, 1, 2, 3, 4, 6, 7},
            ),
        ]
        assumed = [
            *self.network.describe(),
            "each device has the same batch as the captured one (weak scaling), and the same buckets",
            *ASSUMPTIONS,
            "the step is one graph, collectives beside its kernels; between hosts steps run in segments today, with "
            "the collectives after the backward pass, and here with one kernel after another",
            "unverified: the links were not measured on so many devices",
        ]
        lines.append("  assumed:")
        for each in assumed:
            lines += wrap(each, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        return "\n".join(lines)

    def _row(self, one: Prediction, between: Prediction) -> tuple[str, ...]:
        ways = Counter(one.ways)
        return (
            str(one.num_devices),
            duration(one.step_ns),
            _percent(one.efficiency),
            duration(one.communication_ns) if one.transfers else "–",
            duration(one.exposed_ns) if one.transfers else "–",
            ", ".join(f"{number} x {way}" for way, number in sorted(ways.items())) or "–",
            duration(between.step_ns),
            _percent(between.efficiency),
            "" if one.is_verified else "unverified",
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data; sizes in bytes, times in nanoseconds."""
        return {
            "name": self.step.plan.graph.name,
            "network": self.network_name,
            "links": self.network.describe(),
            "assumptions": list(ASSUMPTIONS),
            "calculated": self.step.is_calculated,
            "bucket_bytes": self.bucket_sizes,
            "rows": [
                {
                    "devices": one.num_devices,
                    "step_ns": one.step_ns,
                    "efficiency": one.efficiency,
                    "communication_ns": one.communication_ns,
                    "exposed_ns": one.exposed_ns,
                    "collectives": [
                        {**asdict(each), "by": way} for each, way in zip(one.transfers, one.ways, strict=True)
                    ],
                    "segments_step_ns": between.step_ns,
                    "segments_efficiency": between.efficiency,
                    "verified": one.is_verified,
                }
                for one, between in zip(self.predictions, self.between, strict=True)
            ],
        }


def _percent(share: float) -> str:
    """Tenths of a percent: the difference that matters is small."""
    return percent(share, 1) if share == 1 else f"{share:.1%}".replace("%", " %")
