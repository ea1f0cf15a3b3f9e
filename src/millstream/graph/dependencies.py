"""Which kernel must come after which, derived from what they read and write."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from millstream.graph.kernel_graph import KernelGraph
from millstream.graph.plan import Copy, Launch, Step


class DependencyKind(StrEnum):
    """Why one kernel must wait for another."""

    RAW = "RAW"  # it reads what the other wrote
    WAR = "WAR"  # it overwrites what the other still reads
    WAW = "WAW"  # it overwrites what the other wrote


@dataclass(frozen=True, slots=True)
class Dependency:
    """A predecessor of a kernel.

    Attributes:
        kernel: Id of the predecessor.
        kind: Why; RAW whenever that is one of the reasons.
        buffer: The storage that both touch.
    """

    kernel: int
    kind: DependencyKind
    buffer: str


def step_storages(graph: KernelGraph, step: Step) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the storages whose contents a step of a plan reads and those it writes; nothing but work has any."""
    if isinstance(step, Launch):
        return graph.touched_by[step.kernel]
    if isinstance(step, Copy):
        return (graph.storage_of[step.source],), (graph.storage_of[step.destination],)
    return (), ()


def derive_dependencies(graph: KernelGraph) -> tuple[tuple[Dependency, ...], ...]:
    """Derive the direct predecessors of every kernel.

    Contract:
        - Two kernels that touch one storage, at least one of them writing, are joined by a path of dependencies from
          the earlier to the later one in program order. Aliases share a storage, so views are covered.
        - Per storage, a reader depends on the last writer; a writer depends on the readers since the last write, or on
          the last writer when there are none. What follows from these is not repeated.
        - Each predecessor appears once.

    Linear in the number of reads and writes.

    Returns:
        For each kernel, in program order, its predecessors in the order in which its reads and writes meet them.
    """
    last_writer: dict[str, int] = {}
    readers_since: dict[str, list[int]] = {}
    result = []
    for kernel in graph.kernels:
        found: dict[int, Dependency] = {}
        reads, writes = graph.touched_by[kernel.id]
        for storage in reads:
            writer = last_writer.get(storage)
            if writer is not None and writer not in found:
                found[writer] = Dependency(writer, DependencyKind.RAW, storage)
        for storage in writes:
            readers = readers_since.get(storage)
            writer = last_writer.get(storage)
            if readers:
                for reader in readers:
                    found.setdefault(reader, Dependency(reader, DependencyKind.WAR, storage))
            elif writer is not None:
                found.setdefault(writer, Dependency(writer, DependencyKind.WAW, storage))
        for storage in reads:
            readers_since.setdefault(storage, []).append(kernel.id)
        for storage in writes:
            last_writer[storage] = kernel.id
            readers_since[storage] = []
        result.append(tuple(found.values()))
    return tuple(result)
