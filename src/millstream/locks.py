"""Locks that a forked child does not inherit locked, and that what is called back does not keep locked.

At the moment of the fork another thread may hold them, and in the child nobody would release them. What the user has
called back may wait for another thread, which may wait for the lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet


class ForkSafeLock:
    """Holds a lock, and in a forked child another one: ``with holder.lock: ...``.

    It is not the same one, opened: the fork may come from within a call that holds it, and that goes on to release it.

    Attributes:
        lock: For one thread at a time; re-entrant.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _all.add(self)


_all: WeakSet[ForkSafeLock] = WeakSet()


class Tracing(ForkSafeLock):
    """The lock that is held while a step is traced: one thread at a time.

    Attributes:
        before: What was where the step has put something in this trace, for other threads that meet it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[Any], Any] = unknown_before
        self._undoing: list[tuple[int, Callable[[], object]]] = []

    def is_elsewhere(self) -> bool:
        """Return whether another thread traces now."""
        if self.lock.acquire(blocking=False):
            self.lock.release()
            return False
        return True

    @contextmanager
    def undoing(self, undo: Callable[[], object]) -> Iterator[None]:
        """Call ``undo`` at the end of the context; in a child that another thread forks meanwhile, there at once."""
        entry = threading.get_ident(), undo
        self._undoing.append(entry)
        try:
            yield
        finally:
            if entry in self._undoing:
                self._undoing.remove(entry)
                undo()

    def end_after_fork(self) -> None:
        """Undo what another thread, which the child does not have, has changed for a trace."""
        self.before = unknown_before
        while self._undoing and self._undoing[-1][0] != threading.get_ident():
            self._undoing.pop()[1]()


def unknown_before(_: Any) -> None:
    """What was there before, where nobody traces."""


TRACING = Tracing()


def _start_afresh_after_fork() -> None:
    for each in list(_all):
        each.lock = threading.RLock()
    TRACING.end_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh_after_fork)


_thread = threading.local()


class releasable:  # noqa: N801  a context that each call enters, in a tenth of a generator's time
    """For the length of the context, in which this thread holds the lock, ``released`` releases it."""

    __slots__ = ("_depth", "_lock", "_locks")

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._locks = vars(_thread).setdefault("releasable", [])
        self._depth = len(self._locks)
        try:
            self._locks.append(self._lock)
        except BaseException:  # Ctrl-C, after which nobody leaves this context
            del self._locks[self._depth :]
            raise

    def __exit__(self, *_: object) -> None:
        del self._locks[self._depth :]


@contextmanager
def released() -> Iterator[None]:
    """For the length of the context, let other threads have the locks that are ``releasable`` in this one."""
    locks = vars(_thread).get("releasable", [])
    held, free = [*locks], list[Any]()
    try:
        locks.clear()
        for lock in held:
            if not lock._is_owned():  # Ctrl-C came where its context was left
                continue
            try:
                lock.release()
            except KeyboardInterrupt:  # once it is released
                free.append(lock)
                raise
            free.append(lock)
        yield
    finally:
        interrupt = None
        for lock in free:
            try:
                lock.acquire()
            except KeyboardInterrupt as error:  # it must not keep from locking what is to be released after it
                interrupt = error
                if not lock._is_owned():
                    lock.acquire()
        locks[:] = held
        if interrupt is not None:
            raise interrupt
