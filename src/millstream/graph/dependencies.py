"""Derive which kernel must come after which from what they read and write."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from millstream.graph.kernel_graph import KernelGraph
from millstream.graph.plan import Launch, Step


class DependencyKind(StrEnum):
    """The reason why one kernel must wait for another."""

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
    return (), ()


def derive_dependencies(graph: KernelGraph) -> tuple[tuple[Dependency, ...], ...]:
    """Derive the direct predecessors of every kernel.

    Contract:
        - Two kernels that touch one storage, at least one of them writing, are joined by a path of dependencies from
          the earlier to the later one in program order, unless both write parts with no reader between. Aliases share a
          storage, so views are covered.
        - Per storage, a reader depends on the last writer, or on all that have written parts since; a writer depends on
          the readers since the last write, or on the last writers when there are none. Of writers of parts in a row
          each depends on what the first one does. What follows from these is not repeated.
        - Each predecessor appears once.

    Linear in the number of reads and writes, and of pairs of readers and writers of parts after them.

    Returns:
        For each kernel, in program order, its predecessors in the order in which its reads and writes meet them.
    """
    last_writers: dict[str, list[int]] = {}  # the last one; or those of parts, if they came last
    before_parts: dict[str, list[Dependency]] = {}  # what each of the latter depends on
    readers_since: dict[str, list[int]] = {}
    result = []
    for kernel in graph.kernels:
        found: dict[int, Dependency] = {}
        reads, writes = graph.touched_by[kernel.id]
        for storage in reads:
            for writer in last_writers.get(storage, ()):
                if writer not in found:
                    found[writer] = Dependency(writer, DependencyKind.RAW, storage)
        for storage in writes:
            readers, is_part = readers_since.get(storage), graph.writes_part(kernel.id, storage)
            is_one_more = is_part and not readers and storage in before_parts
            if is_one_more:
                needed = before_parts[storage]
            elif readers:
                needed = [Dependency(reader, DependencyKind.WAR, storage) for reader in readers]
            else:
                needed = [Dependency(writer, DependencyKind.WAW, storage) for writer in last_writers.get(storage, ())]
            for each in needed:
                found.setdefault(each.kernel, each)
            last_writers[storage] = [*(last_writers[storage] if is_one_more else ()), kernel.id]
            before_parts.pop(storage, None)
            if is_part:
                before_parts[storage] = needed
        for storage in reads:
            readers_since.setdefault(storage, []).append(kernel.id)
        for storage in writes:
            readers_since[storage] = []
        result.append(tuple(found.values()))
    return tuple(result)
