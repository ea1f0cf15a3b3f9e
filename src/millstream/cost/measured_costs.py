"""Measured costs: a table that can be kept on disk, and the model that reads it.

The table is JSON, so that people can read and merge it::

    {
        "format": 1,
        "device": "NVIDIA H200",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "kernels": {"5f0c...": [12800, 0.25, 0.61]},
    }

A kernel's key is a digest of what it is and of the sizes it works on; its value is duration in ns, compute share,
memory share. Costs hold for one device and one set of versions only, so these are part of the table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from millstream.cost.cost_model import CostModel, Costs, KernelCost
from millstream.errors import ArgumentError
from millstream.graph import Kernel, KernelGraph

_FORMAT = 1
_MOST_NS = 1 << 42  # 73 minutes: more is a spoiled file, and a million of these is less than what schedules end by


@dataclass(frozen=True)
class CostTable:
    """Measured costs of kernels.

    Attributes:
        device: Name of the device's model.
        versions: Of everything that the times depend on, by name.
        costs: By kernel key.
    """

    device: str
    versions: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[str, KernelCost] = field(default_factory=dict)

    def fits(self, device: str, versions: Mapping[str, str]) -> bool:
        """Tell whether the table was measured on such a device with these versions."""
        return self.device == device and dict(self.versions) == dict(versions)

    def with_costs(self, costs: Mapping[str, KernelCost]) -> CostTable:
        """Return the table with more costs, which take the place of older ones."""
        return CostTable(self.device, self.versions, {**self.costs, **costs})


def kernel_key(graph: KernelGraph, kernel: Kernel, code: str = "") -> str:
    """Return the key of a kernel: equal for kernels that do the same work on buffers of the same sizes.

    Args:
        graph: The kernel's graph, which knows the buffers.
        kernel: Whose key.
        code: What tells what the kernel does, such as its generated source; by default its name.
    """
    sizes = [[graph.buffer_of[buffer].num_bytes for buffer in part] for part in (kernel.reads, kernel.writes)]
    what = [code or kernel.name, kernel.kind.value, kernel.num_bytes, kernel.flops, sizes]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def format_table(table: CostTable) -> str:
    """Write a table as JSON, sorted, so that equal tables are equal texts."""
    kernels = {key: [cost.duration_ns, cost.compute_share, cost.memory_share] for key, cost in table.costs.items()}
    content = {"format": _FORMAT, "device": table.device, "versions": dict(table.versions), "kernels": kernels}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def parse_table(text: str) -> CostTable:
    """Read what ``format_table`` wrote.

    Raises:
        ArgumentError: The text is not such a table, for instance because another version of the library wrote it; or no
            kernel can cost what it says.
    """
    try:
        content = json.loads(text)
        version = content["format"]
        costs = {key: KernelCost(int(ns), float(c), float(m)) for key, (ns, c, m) in content["kernels"].items()}
        table = CostTable(str(content["device"]), {str(k): str(v) for k, v in content["versions"].items()}, costs)
        for key, cost in costs.items():
            shares = cost.compute_share, cost.memory_share
            if not (0 <= cost.duration_ns < _MOST_NS and all(0 <= share <= 1 for share in shares)):
                raise ValueError(f"kernel {key} takes {cost.duration_ns} ns and the shares {shares}")
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise ArgumentError(f"this is not a cost table ({error!r}): measure again") from error
    if version != _FORMAT:
        raise ArgumentError(f"the cost table has format {version!r}, expected {_FORMAT}: measure again")
    return table


class MeasuredCosts:
    """Takes costs from a table, and asks another model for kernels that the table does not know.

    Args:
        table: What was measured.
        fallback: Asked for the rest, and for the cost of waits.
        code_of: What tells what a kernel does; see ``kernel_key``.
    """

    def __init__(self, table: CostTable, fallback: CostModel, code_of: Callable[[Kernel], str] = lambda _: "") -> None:
        self._table = table
        self._fallback = fallback
        self._code_of = code_of

    def key(self, graph: KernelGraph, kernel: Kernel) -> str:
        """Return the key under which a kernel stands in the table."""
        return kernel_key(graph, kernel, self._code_of(kernel))

    def missing(self, graph: KernelGraph) -> tuple[Kernel, ...]:
        """Return the kernels that the table does not know: those still to be measured."""
        return tuple(kernel for kernel in graph.kernels if self.key(graph, kernel) not in self._table.costs)

    def estimate(self, graph: KernelGraph) -> Costs:
        """Estimate the costs of every kernel of a graph."""
        calculated = self._fallback.estimate(graph)
        costs = (
            self._table.costs.get(self.key(graph, kernel), cost)
            for kernel, cost in zip(graph.kernels, calculated.kernels, strict=True)
        )
        return replace(calculated, kernels=tuple(costs))
