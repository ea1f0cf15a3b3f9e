"""Memory for launches that are expected to happen at known times.

Streams that seldom wait for each other seldom know that a buffer is done with, so that little memory could be used
again. But the schedule says when each kernel is expected to run: memory is used again as soon as its last use is
expected to be over, and a wait makes sure of it. Such a wait seldom holds anything up, because what it waits for was
over anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millstream.graph import KernelGraph, MemoryLayout, OwnedRanges, Role, alignment_of
from millstream.schedule.assignment import Assignment
from millstream.schedule.memory.packing import best_fit

_SEVERAL = -1  # instead of a stream: uses end on more than one


@dataclass(frozen=True, slots=True)
class _Stay:
    """The time that a temporary is expected to be in use."""

    buffer: str
    num_bytes: int
    writer: int  # the kernel that writes it first
    start_ns: int
    end_ns: int
    end_stream: int
    last_uses: tuple[int, ...]  # the last kernel that uses it on each stream


def share_memory(
    graph: KernelGraph, assignment: Assignment, durations_ns: Sequence[int], wait_ns: int
) -> tuple[MemoryLayout | None, dict[int, set[int]]]:
    """Pack the temporaries by when they are expected to be in use, and say what must be waited for to make it safe.

    Contract:
        - Every temporary that some kernel writes has an offset, but for those that operators allocate themselves. The
          graph's temporaries must live on one device; otherwise nothing is packed.
        - Two buffers share bytes only if the last use of one is expected to be over before the first write of the other
          starts, by ``wait_ns`` where that is on another stream.
        - With the returned waits, and those for the graph's own dependencies, every use of the one happens before.

    Steps: take the buffers from the largest to the smallest, and put each into the smallest gap among those whose times
    are in its way (as ``assign_offsets`` does); then follow each range of bytes through its owners.

    O(buffers²) time in numpy's inner loops.

    Returns:
        The layout, and for kernels by id the kernels that they must wait for beside their predecessors.
    """
    stays = _find_stays(graph, assignment, durations_ns)
    devices = {graph.buffer_of[stay.buffer].device for stay in stays}
    if len(devices) != 1:
        return None, {}
    device = devices.pop()
    alignment = alignment_of(device)
    size_of = {stay.buffer: -(-stay.num_bytes // alignment) * alignment for stay in stays}
    arena = _TimedArena(len(stays), wait_ns)
    by_size = sorted(stays, key=lambda stay: (-size_of[stay.buffer], stay.writer, stay.buffer))
    offset_of = {stay.buffer: arena.place(size_of[stay.buffer], stay, assignment) for stay in by_size}
    layout = MemoryLayout(offset_of, arena.num_bytes, device)
    return layout, _find_waits(stays, offset_of, assignment)


def _find_stays(graph: KernelGraph, assignment: Assignment, durations_ns: Sequence[int]) -> list[_Stay]:
    """Return the temporaries to be packed, in the order of their first writes."""
    inside = {buffer for kernel in graph.kernels for buffer in kernel.allocates}
    wanted = {b.id for b in graph.buffers if b.role is Role.TEMPORARY and b.alias_of is None and b.id not in inside}
    users: dict[str, list[int]] = {}
    writer: dict[str, int] = {}
    for kernel in assignment.launch_order():
        reads, writes = graph.touched_by[kernel]
        for storage in dict.fromkeys((*reads, *writes)):
            if storage in wanted:
                users.setdefault(storage, []).append(kernel)
                if storage in writes:
                    writer.setdefault(storage, kernel)
    stays = []
    for buffer, first in writer.items():
        last_on: dict[int, int] = {}
        for kernel in users[buffer]:
            last_on[assignment.stream_of[kernel]] = kernel
        # At least 1 ns, so that every last use starts, and so is launched, before what takes the memory: a kernel can
        # wait only for what was launched before it.
        end_ns = max(assignment.start_ns[kernel] + max(durations_ns[kernel], 1) for kernel in last_on.values())
        stream = next(iter(last_on)) if len(last_on) == 1 else _SEVERAL
        num_bytes = graph.buffer_of[buffer].num_bytes
        stays.append(
            _Stay(buffer, num_bytes, first, assignment.start_ns[first], end_ns, stream, tuple(last_on.values()))
        )
    return stays


def _find_waits(stays: Sequence[_Stay], offset_of: dict[str, int], assignment: Assignment) -> dict[int, set[int]]:
    position = {kernel: index for index, kernel in enumerate(assignment.launch_order())}
    owners = OwnedRanges()
    stay_of = {stay.buffer: stay for stay in stays}
    waits: dict[int, set[int]] = {}
    for stay in sorted(stays, key=lambda stay: position[stay.writer]):
        start = offset_of[stay.buffer]
        for _, _, owner in owners.take(start, start + stay.num_bytes, stay.buffer):
            waits.setdefault(stay.writer, set()).update(stay_of[owner].last_uses)
    return waits


class _TimedArena:
    """The blocks that have been placed so far, in arrays sorted by offset."""

    def __init__(self, capacity: int, wait_ns: int) -> None:
        self.num_bytes = 0
        self._wait_ns = wait_ns
        self._count = 0
        self._offsets: NDArray[np.int64] = np.zeros((2, capacity), np.int64)
        self._times: NDArray[np.int64] = np.zeros((2, capacity), np.int64)
        self._streams: NDArray[np.int64] = np.zeros((2, capacity), np.int64)  # of the first write, of the last use

    def place(self, size: int, stay: _Stay, assignment: Assignment) -> int:
        """Find room for one more buffer and return its offset."""
        if size == 0:
            return 0
        stream = assignment.stream_of[stay.writer]
        in_the_way = self._in_the_way(stay, stream)
        starts, ends = self._offsets[:, : self._count][:, in_the_way]
        offset = best_fit(starts, ends, size)
        index = int(np.searchsorted(self._offsets[0, : self._count], offset))
        entries = ((offset, offset + size), (stay.start_ns, stay.end_ns), (stream, stay.end_stream))
        for array, entry in zip((self._offsets, self._times, self._streams), entries, strict=True):
            array[:, index + 1 : self._count + 1] = array[:, index : self._count]
            array[:, index] = entry
        self._count += 1
        self.num_bytes = max(self.num_bytes, offset + size)
        return offset

    def _in_the_way(self, stay: _Stay, stream: int) -> NDArray[np.bool_]:
        """Return which placed buffers are neither over before a stay begins nor begin after it is over."""
        (starts, ends), (first_streams, last_streams) = self._times[:, : self._count], self._streams[:, : self._count]
        over = ends + np.where(last_streams == stream, 0, self._wait_ns) <= stay.start_ns
        later = starts >= stay.end_ns + np.where(first_streams == stay.end_stream, 0, self._wait_ns)
        return ~(over | later)
