"""Locks that a forked child does not inherit locked, and that what is called back does not keep locked.

At the moment of the fork another thread may hold them, and in the child nobody would release them. What the user has
called back may wait for another thread, which may wait for the lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

R = TypeVar("R")


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
    """Held while a step is traced: one thread at a time, for which tensors of the user's have no values meanwhile.

    Captured programs take tensors as they are. So a program that runs when a trace is about to begin is waited for,
    and one that comes later waits if it is given a tensor that is traced. Each says that it is there before it looks
    for the other.

    Attributes:
        kinds: Classes that tensors have while they are traced; empty where none is, or is about to be.
        tracer: The thread that traces then.
        running: Threads that run programs, once for each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.tracer, self.running = tuple[type, ...](), 0, list[int]()

    def is_elsewhere(self) -> bool:
        """Whether another thread traces now."""
        if self.lock.acquire(blocking=False):
            self.lock.release()
            return False
        return True

    def run(self, program: Callable[[list[Any]], R], inputs: list[Any]) -> R:
        """``program(inputs)``, when no other thread traces any of them."""
        thread = threading.get_ident()
        self.running.append(thread)
        try:
            while self.kinds and self.tracer != thread and any(type(each) in self.kinds for each in inputs):
                self.running.remove(thread)
                try:
                    with self.lock:
                        pass
                finally:
                    self.running.append(thread)
            return program(inputs)
        finally:
            self.running.remove(thread)


TRACING = Tracing()


def _start_afresh_after_fork() -> None:
    for each in list(_all):
        each.lock = threading.RLock()
    TRACING.kinds, TRACING.running = (), [each for each in TRACING.running if each == threading.get_ident()]


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
