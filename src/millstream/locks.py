"""Locks that a forked child does not inherit locked, and that what is called back does not keep locked.

At the moment of the fork another thread may hold them, and in the child nobody would release them. What the user has
called back may wait for another thread, which may wait for the lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
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


def _start_afresh_after_fork() -> None:
    for each in list(_all):
        each.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh_after_fork)


_thread = threading.local()


@contextmanager
def releasable(lock: Any) -> Iterator[None]:
    """For the length of the context, in which this thread holds the lock, ``released`` releases it."""
    locks = vars(_thread).setdefault("releasable", [])
    locks.append(lock)
    try:
        yield
    finally:
        locks.pop()


@contextmanager
def released() -> Iterator[None]:
    """For the length of the context, let other threads have the locks that are ``releasable`` in this one."""
    locks = vars(_thread).get("releasable", [])
    held = [*locks]
    locks.clear()
    for lock in held:
        lock.release()
    try:
        yield
    finally:
        for lock in held:
            try:
                lock.acquire()
            except BaseException:  # Ctrl-C, which must not keep from locking what is to be released after it
                lock.acquire()
                raise
        locks += held
