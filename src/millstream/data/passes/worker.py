"""The thread of a feed, and how it leaves a source that waits for another thread.

In a plain loop nobody is inside the source when the loop is left. A feed's thread may be, reading ahead: in
``queue.get``, for instance, where it would take the next thing and have no use for it. Such a thread is told to leave
by a ``GeneratorExit``, as a generator is that is closed. Only where it waits in Python's own ``Condition``, as queues,
events and semaphores do: nothing is half done there, and nothing was taken.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet

from millstream.heap import frames_of_threads

JOIN_S = 5.0
"""Seconds that are waited for the thread at most; then it ends by itself when the source returns."""
LEAVE_S = 1.0
"""Seconds that the end of the interpreter waits for threads that were told to leave a source."""


class Forks:
    """How many forks lie between this process and the first one: asking for its number takes a system call."""

    count = 0


def _count_fork() -> None:
    Forks.count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Flag(threading.Event):
    """An event that an exception of a signal's handler cannot leave locked, wherever it is raised.

    Ctrl-C is one, and a DataLoader's news of a killed worker. Python's own event holds a lock in lines of Python.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._until_set = threading.Lock()
        self._until_set.acquire()

    def is_set(self) -> bool:
        """Return whether it was set; that is for good."""
        return self._is_set

    def set(self) -> None:
        """Set it; a second time does nothing."""
        if not self._is_set:
            self._is_set = True
            self._let_go()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, so many seconds at most; whether it is."""
        if not self._is_set and self._until_set.acquire(timeout=-1 if timeout is None else timeout):
            self._let_go()  # for others that wait
        return self._is_set

    def _let_go(self) -> None:
        with suppress(RuntimeError):  # two threads may do so at once
            self._until_set.release()


class Worker:
    """A thread that does one job after another, from the first until ``end``."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended = False
        self.num_forks = Forks.count

    def submit(self, job: Callable[[], None]) -> None:
        """Have a job done.

        Raises:
            RuntimeError: The system refuses the thread.
        """
        if self._thread is None:
            # A daemon: the interpreter waits for other threads *before* it runs the functions registered for its end,
            # among them the one that ends this.
            jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            thread = threading.Thread(target=_do_jobs, args=(jobs,), name="millstream-feed", daemon=True)
            try:
                thread.start()
            except BaseException:
                jobs.put(None)  # an interrupt may have come when it had begun
                raise
            self._jobs, self._thread = jobs, thread
        self._jobs.put(job)
        if self._has_ended:  # meanwhile, by another thread
            self._jobs.put(None)

    def is_current(self) -> bool:
        """Return whether this is called in the thread."""
        return threading.current_thread() is self._thread

    def is_usable(self) -> bool:
        """Return whether it takes jobs: it is of this process and has not ended."""
        return self.num_forks == Forks.count and not self._has_ended

    def end(self, *, waits: bool) -> None:
        """Have the thread end after what it was given, and wait for that if it takes no time."""
        self._has_ended = True
        self._jobs.put(None)
        if self._thread is None or self.is_current() or self.num_forks != Forks.count:
            return
        if waits:
            self._thread.join(JOIN_S)
        else:
            _leaving.add(self._thread)


_leaving: WeakSet[threading.Thread] = WeakSet()


@atexit.register
def _wait_for_leaving() -> None:
    """Let threads that leave a source be gone: Python ends those left over, within C++ by ending the process."""
    until = time.monotonic() + LEAVE_S
    for thread in [*_leaving]:
        thread.join(max(0.0, until - time.monotonic()))


def _do_jobs(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # which would be kept alive while this waits for the next


_WAIT = threading.Condition.wait.__code__


def raise_exit(thread: int) -> bool:
    """Raise ``GeneratorExit`` in a thread, when it continues, if it waits for another one; whether it does."""
    with frames_of_threads() as frames:
        frame = frames.get(thread)
    if frame is None or frame.f_code is not _WAIT:
        return False
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(GeneratorExit))
    return True


def absorb_exit() -> None:
    """In the thread that was told to leave: let what has not been raised yet be raised here, and go on.

    To take it back would leave Python's signal for it set for good, in all threads: it slows them, and in Python 3.11
    one that is profiled never continues.
    """
    with suppress(GeneratorExit):
        for _ in range(100):  # Python raises it where a loop begins again
            pass
