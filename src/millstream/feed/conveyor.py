"""A bounded queue between one worker and one consumer, in which a thing stays until the consumer is done with it.

It knows nothing of batches and devices. What distinguishes it from ``queue.Queue``: the consumer *looks* at what is
waiting and removes the first only when it has dealt with it; an end, with or without an error, is seen after everything
that came before; and both sides can be woken for good.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Conveyor(Generic[T]):
    """The queue.

    **Contract**

    - Things arrive in the order in which they were put; at most ``capacity`` lie on the belt.
    - ``look`` never loses anything: until ``remove`` is called the same thing comes first again.
    - After ``finish`` the consumer still gets all that was put before, then sees the end.
    - After ``stop`` no call blocks, and what lies on the belt stays there for ``drain``.

    Args:
        capacity: How many things may wait.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._belt: deque[T] = deque()
        # The condition's lock is re-entrant. That matters: a garbage collection inside one of the methods below may
        # finalize a feed whose finalizer calls ``stop`` on this very conveyor, on this very thread.
        self._changed = threading.Condition()
        self._finished = False
        self.error: BaseException | None = None
        self.stopped = threading.Event()

    # --- the worker's side -------------------------------------------------------------------------------------------

    def wait_for_room(self) -> bool:
        """Block until one more thing may be put; false when the conveyor was stopped."""
        with self._changed:
            while len(self._belt) >= self._capacity and not self.stopped.is_set():
                self._changed.wait()
            return not self.stopped.is_set()

    def put(self, thing: T) -> None:
        """Put a thing; the worker has waited for room, and as the only one who puts, it still has it."""
        with self._changed:
            self._belt.append(thing)
            self._changed.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        """Say that nothing more will come, and why if it is an error."""
        with self._changed:
            self.error = error
            self._finished = True
            self._changed.notify_all()

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def look(self) -> tuple[T, ...]:
        """Block until something waits, and show all that waits; empty at the end, and after ``stop``."""
        with self._changed:
            while not (self._belt or self._finished or self.stopped.is_set()):
                self._changed.wait()
            return () if self.stopped.is_set() else tuple(self._belt)

    def remove(self) -> None:
        """Remove the first thing: only now may the worker reuse what it holds."""
        with self._changed:
            if self._belt:  # drained meanwhile, if someone else closed the feed
                self._belt.popleft()
            self._changed.notify_all()

    @property
    def finished(self) -> bool:
        """Whether the worker has said that nothing more will come."""
        return self._finished

    # --- either side -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Wake both sides for good."""
        with self._changed:
            self.stopped.set()
            self._changed.notify_all()

    def drain(self) -> list[T]:
        """Remove what is left."""
        with self._changed:
            left = list(self._belt)
            self._belt.clear()
            return left
