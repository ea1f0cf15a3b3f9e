"""Copies that must not wait for the interpreter: see ``_native/copies.cpp``.

Without compiled code PyTorch's own operators do the same, more slowly.
"""

from __future__ import annotations

import ctypes
import functools
import os
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from millstream import _native

MAX_THREADS = 16
"""Fill pinned memory: more than a PCIe 5 bus needs."""


@functools.cache
def filler() -> Filler | None:
    """The compiled code that fills memory; ``None`` where it cannot be had."""
    core = _native.load("core")
    return None if core is None else Filler(core)


@functools.cache
def enqueuer() -> Enqueuer | None:
    """The compiled code that enqueues copies on CUDA's streams; ``None`` where it, or CUDA's driver, cannot be had."""
    core = _native.load("core")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        functions = driver.cuMemcpyAsync, driver.cuEventRecord, driver.cuStreamWaitEvent
        return None if core is None else Enqueuer(core, *functions)
    except (OSError, AttributeError):
        return None


def with_pointer(function: Any, argument: Any) -> Callable[[], int]:
    """A function of CUDA's driver that takes a pointer to ``argument``, as one that takes nothing.

    Args:
        function: Of ``ctypes``, which takes several times as long to call it.
        argument: Of ``ctypes``.
    """
    core = _native.load("core")
    if core is None:
        return functools.partial(function, ctypes.byref(argument))
    address = ctypes.cast(function, ctypes.c_void_p).value
    return functools.partial(
        core.call, address, ctypes.addressof(argument), function, argument
    )  # which both stay alive


class Filler:
    """Copies host memory with several threads, which all callers in the process share.

    Args:
        core: The compiled code.
    """

    def __init__(self, core: Any) -> None:
        self.num_threads = min(num_processors(), MAX_THREADS)
        self._begin = functools.partial(core.begin, core.make_team(self.num_threads - 1))
        self._finish = core.finish

    def prepare(
        self, to: array[int], num_bytes: array[int], num_threads: int | None, *, past_caches: bool = False
    ) -> Callable[[int, object], object | None]:
        """Return what begins to fill pieces of memory, again and again, and returns at once; it keeps these arrays.

        It takes the address of the sources' addresses, and an owner, which keeps the memory on both sides until all is
        copied; it gives what ``follow`` takes, which is ``None`` where all was copied at once.

        Args:
            to: Addresses, of 64 bits each.
            num_bytes: As many lengths.
            num_threads: How many threads may take part, the one that finishes included; ``None`` for as many as help.
            past_caches: Whether the processors' caches shall keep nothing of it, where that is possible.
        """
        addresses = to.buffer_info()[0], num_bytes.buffer_info()[0]
        begin = functools.partial(self._begin, len(to), *addresses, num_threads or self.num_threads, past_caches)
        begin.arrays = to, num_bytes  # type: ignore[attr-defined]  only their addresses are among the arguments
        return begin

    def follow(self, started: object | None) -> Filling:
        """Return what was started, to be finished."""
        return Filling(started, self._finish)


class Filling:
    """Memory that is being filled; or that has been, if it is short. When it is dropped, all is copied."""

    __slots__ = ("_capsule", "_finish")

    def __init__(self, capsule: object | None, finish: Callable[[object], None]) -> None:
        self._capsule = capsule
        self._finish = finish

    def finish(self) -> None:
        """Return when all is copied; the calling thread helps."""
        if self._capsule is not None:
            self._finish(self._capsule)
            self._capsule = None


def num_processors() -> int:
    """Processors that this process may use: a container may be granted the time of few of those that it sees."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        number = min(number, max(int(quota) // int(period), 1))  # "max" is no number
    return number


class Enqueuer:
    """Enqueues waits, copies and records of events in one call: the device waits for no line of Python between.

    Args:
        core: The compiled code.
        copy: The driver's function that copies between any two addresses on a stream.
        record: The driver's function that records an event.
        wait: The driver's function that lets a stream wait for an event.
    """

    def __init__(self, core: Any, copy: Any, record: Any, wait: Any) -> None:
        self._functions = copy, record, wait
        self._driver = (ctypes.c_void_p * 3)(*(ctypes.cast(each, ctypes.c_void_p).value for each in self._functions))
        self._enqueue = functools.partial(core.enqueue, ctypes.addressof(self._driver))

    def order(
        self,
        stream: int,
        waits: Sequence[int],
        before: Sequence[int],
        copies: Sequence[tuple[int, int, int]],
        after: Sequence[int],
    ) -> Callable[[], int]:
        """Return what waits for events, records events, copies, and records events, each time that it is called.

        It gives the driver's first error; 0 for none.

        Args:
            stream: Its handle.
            waits: Handles of events.
            before: Likewise.
            copies: Of each where to, where from, and how many bytes.
            after: Likewise.
        """
        counts = len(waits), len(before), len(copies), len(after)
        order = array("Q", (stream, *counts, *waits, *before, *chain.from_iterable(copies), *after))
        return functools.partial(self._enqueue, order.buffer_info()[0], order, self)  # which both must stay alive

    def prepare(self, num_bytes: Sequence[int]) -> FixedCopies:
        """Make ready for copies of these lengths, to be enqueued again and again."""
        return FixedCopies(self, num_bytes)


class FixedCopies:
    """Copies of fixed lengths that one call enqueues.

    Attributes:
        to: Addresses, to be written before.
        sources: Likewise.
    """

    __slots__ = ("_enqueue", "_enqueuer", "_order", "sources", "to")

    def __init__(self, enqueuer: Enqueuer, num_bytes: Sequence[int]) -> None:
        self._enqueue, self._enqueuer = enqueuer._enqueue, enqueuer
        copies = [(0, 0, each) for each in num_bytes]
        self._order = array("Q", (0, 0, 0, len(copies), 0, *chain.from_iterable(copies)))
        self.to, self.sources = (memoryview(self._order)[first::3] for first in (5, 6))

    def enqueue(self, stream: int) -> int:
        """Enqueue them on the stream with this handle; the driver's first error, 0 for none."""
        self._order[0] = stream
        return self._enqueue(self._order.buffer_info()[0])
