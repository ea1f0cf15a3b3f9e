"""Locks that a forked child does not inherit locked.

At the moment of the fork another thread may hold them, and in the child nobody would release them.
"""

from __future__ import annotations

import os
import threading
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
