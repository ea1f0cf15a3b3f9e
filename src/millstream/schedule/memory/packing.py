"""Static packing of temporaries into one arena.

Source: Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (arXiv 2001.03288), "Greedy by
Size for Offset Calculation". Here two buffers are in each other's way unless the streams order all uses of one before
the first write of the other, so that plans with several streams are packed too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millstream.errors import ArgumentError
from millstream.graph import MemoryLayout, Plan, Role, alignment_of
from millstream.schedule.memory.lifetimes import Lifetime, derive_lifetimes


def assign_offsets(plan: Plan, device: str | None = None) -> MemoryLayout:
    """Pack the temporaries of one device into one arena.

    Contract:
        - Every temporary that the plan writes on that device has an offset; outputs and what operators allocate
          themselves (``kernel.allocates``) have none.
        - Offsets are multiples of 64 bytes on a CPU, of 512 elsewhere.
        - Two buffers overlap in the arena only if every use of one happens before the first write of the other.

    Steps:
        1. Take the buffers from the largest to the smallest; of equals, the one written first.
        2. Among the placed ones that are in its way, find the smallest gap that holds it; if none does, go after them.

    O(buffers²) time in numpy's inner loops: about a second for 10,000.

    Args:
        plan: A plan without races.
        device: Which device's temporaries; may be left out when all live on one.

    Raises:
        ArgumentError: The temporaries live on several devices and none is named.
    """
    temporaries = {b.id: b for b in plan.graph.buffers if b.role is Role.TEMPORARY and b.alias_of is None}
    for kernel in plan.graph.kernels:
        for buffer in kernel.allocates:
            temporaries.pop(buffer, None)
    if device is None:
        devices = sorted({buffer.device for buffer in temporaries.values()}) or ["cpu"]
        if len(devices) > 1:
            raise ArgumentError(f"temporaries of {plan.graph.name!r} live on {', '.join(devices)}: name one device")
        device = devices[0]
    alignment = alignment_of(device)
    sized = [
        (-(-temporaries[lifetime.buffer].num_bytes // alignment) * alignment, lifetime)
        for lifetime in derive_lifetimes(plan).values()
        if lifetime.buffer in temporaries and temporaries[lifetime.buffer].device == device
    ]
    sized.sort(key=lambda pair: (-pair[0], pair[1].first))
    arena = _Arena(len(sized), plan.num_streams)
    offset_of = {lifetime.buffer: arena.place(size, lifetime) for size, lifetime in sized}
    return MemoryLayout(offset_of, arena.num_bytes, device)


def best_fit(starts: NDArray[np.int64], ends: NDArray[np.int64], size: int) -> int:
    """The offset of the smallest gap that has room, or of the end.

    Args:
        starts: Of the blocks in the way, sorted. They may overlap: a gap begins after the end of all that start before.
        ends: Of the same.
        size: Bytes.
    """
    filled = np.concatenate(([0], np.maximum.accumulate(ends)))
    gaps = starts - filled[:-1]
    fitting = np.flatnonzero(gaps >= size)
    return int(filled[fitting[np.argmin(gaps[fitting])] if len(fitting) else -1])


class _Arena:
    """The blocks that have been placed so far, in arrays sorted by offset."""

    def __init__(self, capacity: int, num_streams: int) -> None:
        self.num_bytes = 0
        self._count = 0
        self._starts: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self._ends: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self._first: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self._stream: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self._reusable_from: NDArray[np.int64] = np.zeros((num_streams, capacity), np.int64)

    def place(self, size: int, lifetime: Lifetime) -> int:
        """Find room for one more buffer and return its offset."""
        if size == 0:
            return 0
        in_the_way = self._overlapping(lifetime)
        offset = best_fit(self._starts[: self._count][in_the_way], self._ends[: self._count][in_the_way], size)
        self._insert(offset, size, lifetime)
        return offset

    def _overlapping(self, lifetime: Lifetime) -> NDArray[np.bool_]:
        """``Lifetime.overlaps`` of all that has been placed."""
        count = self._count
        not_before = self._reusable_from[lifetime.stream, :count] > lifetime.first
        reusable_from = np.asarray(lifetime.reusable_from, np.int64)
        return not_before & (reusable_from[self._stream[:count]] > self._first[:count])

    def _insert(self, offset: int, size: int, lifetime: Lifetime) -> None:
        count = self._count
        index = int(np.searchsorted(self._starts[:count], offset))
        for array in (self._starts, self._ends, self._first, self._stream, self._reusable_from):
            array[..., index + 1 : count + 1] = array[..., index:count]
        self._starts[index] = offset
        self._ends[index] = offset + size
        self._first[index] = lifetime.first
        self._stream[index] = lifetime.stream
        self._reusable_from[:, index] = lifetime.reusable_from
        self._count += 1
        self.num_bytes = max(self.num_bytes, offset + size)
