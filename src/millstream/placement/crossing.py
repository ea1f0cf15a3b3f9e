"""Kernels that have their devices become a graph with copies between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from millstream.cost import Costs, KernelCost, Link
from millstream.graph import CALLER_ROLES, Buffer, Kernel, KernelGraph, KernelKind, Role


@dataclass(frozen=True)
class Placement:
    """A graph on several devices.

    Attributes:
        graph: With copies as kernels, of the kind ``copy``.
        origin: For each of its kernels the one that it was; ``None`` for a copy.
        copy_of: Buffers that it has beside those it was made from, and the buffer that each is a copy of.
    """

    graph: KernelGraph
    origin: tuple[int | None, ...]
    copy_of: Mapping[str, str]

    def costs(self, costs: Costs, link: Link) -> Costs:
        """Return what its kernels cost: as before, and copies what the link says."""
        kernels = tuple(
            KernelCost(link.copy_ns(self.graph.buffer_of[kernel.writes[0]].num_bytes), 0.0, 0.0)
            if origin is None
            else costs.kernels[origin]
            for kernel, origin in zip(self.graph.kernels, self.origin, strict=True)
        )
        return replace(costs, kernels=kernels)


def insert_copies(
    graph: KernelGraph, device_of: Sequence[str], home: str, order_only: Collection[str] = ()
) -> Placement:
    """Put kernels on devices, and copies before what reads on another one.

    Contract:
        - A temporary is where it is written. Inputs, state, constants and results are on the user's device: what is
          changed of them elsewhere is a copy, which is copied back after its last write.
        - What is read elsewhere is copied there, once for each device, until it is written again.
        - Of a constant, other devices have constants of their own: nothing crosses in a run.

    Args:
        graph: A valid graph on one device.
        device_of: By kernel, as ``find_units`` allows.
        home: The user's device.
        order_only: Storages that are no memory; see ``Constraints``.
    """
    return _Crossing(graph, device_of, home, order_only).build()


class _Crossing:
    """A placement in the making."""

    def __init__(self, graph: KernelGraph, device_of: Sequence[str], home: str, order_only: Collection[str]) -> None:
        self.graph, self.device_of, self.home, self.order_only = graph, device_of, home, order_only
        self.kernels: list[Kernel] = []
        self.origin: list[int | None] = []
        self.device: dict[str, str] = {}  # of storages
        self.added: dict[str, Buffer] = {}
        self.copy_of: dict[str, str] = {}
        self.num_copies: Counter[str] = Counter()
        # Where a storage's present value is: by storage and device, a buffer.
        self.held: dict[str, dict[str, str]] = {}
        self.last_write = {storage: kernel.id for kernel in graph.kernels for storage in graph.touched_by[kernel.id][1]}

    def build(self) -> Placement:
        for kernel in self.graph.kernels:
            device = self.device_of[kernel.id]
            reads, writes = (
                [storage for storage in part if storage not in self.order_only]
                for part in self.graph.touched_by[kernel.id]
            )
            name = {storage: self._fetched(storage, device, kernel) for storage in reads if storage not in writes}
            name |= {storage: self._own(storage, device, kernel) for storage in writes}
            self._add_kernel(kernel, device, lambda buffer, name=name: name.get(buffer, buffer))
            for storage in writes:
                self.held[storage] = {device: name[storage]}
                if name[storage] != storage and self.last_write[storage] == kernel.id:
                    self._add_copy(name[storage], storage, kernel)
        storage_of = self.graph.storage_of
        buffers = [
            replace(buffer, device=self.device.get(storage_of[buffer.id], self.home)) for buffer in self.graph.buffers
        ]
        graph = replace(self.graph, kernels=tuple(self.kernels), buffers=(*buffers, *self.added.values()))
        return Placement(graph, tuple(self.origin), self.copy_of)

    def _own(self, storage: str, device: str, writer: Kernel) -> str:
        """The buffer that a kernel writes as this storage; it may write a part of what is there."""
        role = self.graph.buffer_of[storage].role
        if role is Role.TEMPORARY:
            self.device[storage] = device
        elif role in CALLER_ROLES:
            return self._fetched(storage, device, writer)
        elif device != self.home:
            return self._add_buffer(f"{storage}@{device}", storage, device)
        return storage

    def _fetched(self, storage: str, device: str, reader: Kernel) -> str:
        """The buffer in which a storage's value is on a device; a copy is added where there is none."""
        held = self.held.setdefault(storage, {self.home: storage})
        if device in held:
            return held[device]
        source, role = next(iter(held.values())), self.graph.buffer_of[storage].role
        if device == self.home and role is not Role.TEMPORARY:
            self._add_copy(source, storage, reader)
            return storage
        number = self.num_copies[storage]
        name = f"{storage}@{device}" + f".{number}" * bool(number)
        if role is Role.CONSTANT:
            held[device] = self._add_buffer(name, storage, device, role)
        else:
            self._add_copy(source, self._add_buffer(name, storage, device), reader)
            held[device] = name
        return held[device]

    def _add_buffer(self, name: str, storage: str, device: str, role: Role = Role.TEMPORARY) -> str:
        if name not in self.added:
            self.added[name] = Buffer(name, self.graph.buffer_of[storage].num_bytes, device, role)
            self.copy_of[name] = storage
            self.num_copies[storage] += 1
        return name

    def _add_copy(self, source: str, target: str, beside: Kernel) -> None:
        device = self.added[target].device if target in self.added else self.home
        self.held.setdefault(self.copy_of.get(target, target), {})[device] = target
        num_bytes = self.graph.buffer_of[self.copy_of.get(target, target)].num_bytes
        self.kernels.append(
            Kernel(
                len(self.kernels),
                f"copy_to_{device}",
                KernelKind.COPY,
                device,
                (source,),
                (target,),
                num_bytes=2 * num_bytes,
                ops=("copy",),
                source=beside.source,
                module=beside.module,
            )
        )
        self.origin.append(None)

    def _add_kernel(self, kernel: Kernel, device: str, rename: Callable[[str], str]) -> None:
        moved = replace(
            kernel,
            id=len(self.kernels),
            device=device,
            reads=tuple(map(rename, kernel.reads)),
            writes=tuple(map(rename, kernel.writes)),
            allocates=tuple(map(rename, kernel.allocates)),
            parts=tuple(map(rename, kernel.parts)),
        )
        self.kernels.append(moved)
        self.origin.append(kernel.id)
