"""The devices that a graph is placed on, and the parts of the graph that have no choice."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from millstream.cost import Link
from millstream.graph import KernelGraph, KernelKind, Role


@dataclass(frozen=True)
class Machine:
    """Devices of one process.

    Attributes:
        devices: Their names. The first is the user's: there are the inputs, parameters and other state, and there the
            results are wanted.
        link: Between any two of them, each way.
        streams: For kernels, on each device; each link has one more.
        memory_bytes: That temporaries and outputs may take, for each device; ``None`` sets no bounds.
    """

    devices: tuple[str, ...]
    link: Link
    streams: int = 1
    memory_bytes: tuple[int, ...] | None = None

    @property
    def home(self) -> str:
        """The user's device."""
        return self.devices[0]


@dataclass(frozen=True)
class Constraints:
    """Constraints that the kernel graph does not state.

    Attributes:
        fixed: Kernels that stay on the user's device.
        immovable: Storages that cannot be copied.
        order_only: Storages that are no memory: they are there for the order of kernels, on whichever device.
    """

    fixed: Collection[int] = frozenset()
    immovable: Collection[str] = frozenset()
    order_only: Collection[str] = frozenset()


@dataclass(frozen=True)
class Units:
    """Kernels that are on one device, whichever that is.

    Attributes:
        unit_of: By kernel; numbered in the order of the program.
        fixed: Units that stay on the user's device.
    """

    unit_of: tuple[int, ...]
    fixed: frozenset[int]

    @property
    def num_units(self) -> int:
        return 1 + max(self.unit_of, default=-1)


def find_units(graph: KernelGraph, constraints: Constraints) -> Units:
    """Find what has to stay together.

    Contract:
        - Whatever writes one storage is one unit: a storage changes in one place alone.
        - Collectives and what decides on the host stay on the user's device.
        - Whatever touches a storage that cannot be copied, or of which an operator has returned a view, is one unit;
          where its memory is the user's, or is returned to them, that stays on their device.
    """
    aliased = {graph.storage_of[buffer.id] for buffer in graph.buffers if buffer.alias_of is not None}
    immovable = aliased | set(constraints.immovable)
    parent = list(range(len(graph.kernels)))

    def root(kernel: int) -> int:
        while parent[kernel] != kernel:
            parent[kernel] = kernel = parent[parent[kernel]]
        return kernel

    first: dict[str, int] = {}
    fixed = set(constraints.fixed)
    for kernel in graph.kernels:
        reads, writes = graph.touched_by[kernel.id]
        if kernel.kind in (KernelKind.COLLECTIVE, KernelKind.CONTROL):
            fixed.add(kernel.id)
        for storage in (*writes, *(each for each in reads if each in immovable)):
            if storage in constraints.order_only:
                continue
            parent[root(kernel.id)] = root(first.setdefault(storage, kernel.id))
            if storage in immovable and graph.buffer_of[storage].role is not Role.TEMPORARY:
                fixed.add(kernel.id)
    number: dict[int, int] = {}
    unit_of = tuple(number.setdefault(root(kernel.id), len(number)) for kernel in graph.kernels)
    return Units(unit_of, frozenset(unit_of[kernel] for kernel in fixed))
