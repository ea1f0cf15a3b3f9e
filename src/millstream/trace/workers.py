"""Clocks of a DataLoader's workers for each batch, in memory that they share with the parent.

Made before workers are forked; spawned ones do not have it, and their times stay unknown.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

NUM_SLOTS, NUM_TIMES = 256, 32  # processes, and batches kept of each
_SLOT = struct.Struct(f"<{2 + 3 * NUM_TIMES}q")  # process id, number of batches, the last of them in nanoseconds


class BatchClocks(NamedTuple):
    """The times of a batch or of the process that makes it: in all, on a processor, and waiting for one."""

    took_ns: int
    ran_ns: int
    queued_ns: int


def now() -> BatchClocks:
    """This process's clocks; without Linux's count of waiting, none is known of."""
    try:
        queued_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        queued_ns = 0
    return BatchClocks(time.perf_counter_ns(), time.process_time_ns(), queued_ns)


class WorkerTimes:
    """Times of batches, by worker process."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, NUM_SLOTS * _SLOT.size)

    def add(self, before: BatchClocks) -> None:
        """This process, a worker, has made a batch since then."""
        spent = (int(after - then) for after, then in zip(now(), before, strict=True))
        start = os.getpid() % NUM_SLOTS * _SLOT.size
        pid, number, *times = _SLOT.unpack_from(self._memory, start)
        if pid != os.getpid():  # of a worker that is gone, as a rule
            number, times = 0, [0] * (3 * NUM_TIMES)
        at = 3 * (number % NUM_TIMES)
        times[at : at + 3] = spent
        _SLOT.pack_into(self._memory, start, os.getpid(), number + 1, *times)

    def usual(self) -> BatchClocks | None:
        """Medians over all workers; ``None`` where none has written."""
        found: list[int] = []
        for slot in range(NUM_SLOTS):
            pid, number, *times = _SLOT.unpack_from(self._memory, slot * _SLOT.size)
            if pid:
                found += times[: 3 * min(number, NUM_TIMES)]
        return BatchClocks(*(int(median(found[i::3])) for i in range(3))) if found else None

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
