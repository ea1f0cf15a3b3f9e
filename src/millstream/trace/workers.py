"""How long workers of a DataLoader take for a batch: they write it into memory that they share with the parent.

Made before workers are forked; spawned ones do not have it, and their times stay unknown.
"""

from __future__ import annotations

import mmap
import os
import struct
from statistics import median

NUM_SLOTS, NUM_TIMES = 256, 32  # processes, and times kept of each
_SLOT = struct.Struct(f"<{2 + NUM_TIMES}q")  # process id, number of times, the last of them in nanoseconds


class WorkerTimes:
    """Times of batches, by worker process."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, NUM_SLOTS * _SLOT.size)

    def add(self, took_ns: int) -> None:
        """This process, a worker, has made a batch."""
        start = os.getpid() % NUM_SLOTS * _SLOT.size
        pid, number, *times = _SLOT.unpack_from(self._memory, start)
        if pid != os.getpid():  # of a worker that is gone, as a rule
            number, times = 0, [0] * NUM_TIMES
        times[number % NUM_TIMES] = took_ns
        _SLOT.pack_into(self._memory, start, os.getpid(), number + 1, *times)

    def median_ns(self) -> int:
        """Median over all workers; 0 where none has written."""
        found: list[int] = []
        for slot in range(NUM_SLOTS):
            pid, number, *times = _SLOT.unpack_from(self._memory, slot * _SLOT.size)
            if pid:
                found += times[: min(number, NUM_TIMES)]
        return int(median(found)) if found else 0

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
