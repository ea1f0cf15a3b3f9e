"""How many threads stage a batch: found by timing batches that are staged anyway.

One core moves 8 to 14 GB/s, a PCIe 5 bus 55. But how many cores it takes depends on the memory, which they share with
the copies under way, on what else they have to do, and on how long a thread that sleeps takes to wake up.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from statistics import median

import torch

MAX_THREADS = 16
"""More than a PCIe 5 bus needs."""

LARGE_BYTES = 4 << 20
"""From here on it is worth a trial: one core takes 0.4 ms."""

TRIES = 6
"""Batches for each number of threads; of these the first wakes threads up, and does not count."""


class ThreadChoice:
    """Chooses a number of threads, and lets PyTorch's copies use them. Serves one thread at a time.

    Args:
        number: Use this one; ``None`` to find the best.
    """

    def __init__(self, number: int | None = None) -> None:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        most = min(processors, MAX_THREADS)
        numbers = sorted({max(1, most * share // 4) for share in (1, 2, 3, 4)}) if number is None else [number]
        self._seconds_per_byte: dict[int, list[float]] = {each: [] for each in numbers}
        self._few = numbers[0]
        self.chosen: int | None = numbers[0] if len(numbers) == 1 else None

    @contextmanager
    def use(self, num_bytes: int) -> Iterator[None]:
        """Copy so many bytes in the body."""
        if self.chosen is not None or num_bytes < LARGE_BYTES:
            with openmp_threads(self.chosen or self._few):
                yield
            return
        number, times = next(each for each in self._seconds_per_byte.items() if len(each[1]) < TRIES)
        with openmp_threads(number):
            began = time.perf_counter()
            yield
            times.append((time.perf_counter() - began) / num_bytes)
        if all(len(each) == TRIES for each in self._seconds_per_byte.values()):
            self.chosen = min(self._seconds_per_byte, key=lambda each: median(self._seconds_per_byte[each][1:]))


@contextmanager
def openmp_threads(number: int) -> Iterator[None]:
    """Let PyTorch's operators use so many threads on the calling thread, in the body.

    Enough for copies. Not by ``torch.set_num_threads``, as the engine of the CPU must for the sake of other libraries:
    that also notes the number for all threads to come, and what the user computes there would round otherwise. Where
    PyTorch does without OpenMP, it uses as many as ever.
    """
    set_threads = _find_setter()
    before = torch.get_num_threads()
    if set_threads is None or number == before:
        yield
        return
    set_threads(number)
    try:
        yield
    finally:
        set_threads(before)


@cache
def _find_setter() -> Callable[[int], None] | None:
    """OpenMP's ``omp_set_num_threads``, which concerns the calling thread alone, if PyTorch goes by it."""
    try:
        setter: Callable[[int], None] = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):  # no such function; Windows has no library without a name
        return None
    return setter if "OpenMP" in torch.__config__.parallel_info() else None
