"""Memory for results on their way to the host: stretches of one buffer, given out in order and bounded in number."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


class PoolClosed(Exception):  # noqa: N818 - a fact about the pool
    """Nothing is given out any more."""


@dataclass(slots=True, eq=False)
class Stretch:
    """A part of the pool; of a result that travels by itself, no bytes of it.

    Attributes:
        start, end: Its first byte, and the one after its last.
        is_counted: Whether it is one of those that are bounded in number.
        is_over: Whether nobody uses it any more.
    """

    start: int = 0
    end: int = 0
    is_counted: bool = False
    is_over: bool = False


class ResultPool:
    """Gives out stretches; what is over is given out again when all before it is.

    An interrupt may meet ``take`` at any moment; what it has given out by then lies in the caller's stretch.

    Args:
        num_bytes: Its length.
        depth: How many stretches may be out.
    """

    def __init__(self, num_bytes: int, depth: int) -> None:
        self._size, self._depth = num_bytes, depth
        self._taken: deque[Stretch] = deque()  # with bytes, the oldest first
        self._num_counted = 0
        self._waiters: list[queue.SimpleQueue[None]] = []
        self._lock = threading.Lock()
        self.is_closed = False

    def count(self, stretch: Stretch) -> None:
        """Wait until one more may be out, and count it.

        Raises:
            PoolClosed: It is closed, and there is none.
        """
        self._wait_for(lambda: self._count(stretch))

    def _count(self, stretch: Stretch) -> bool:
        if self._num_counted == self._depth:
            return False
        self._num_counted += 1
        stretch.is_counted = True
        return True

    def take(self, stretch: Stretch, num_bytes: int) -> None:
        """Wait until there are so many bytes, and make them the stretch's.

        Raises:
            PoolClosed: It is closed, and there is no room.
        """
        self._wait_for(lambda: self._place(stretch, num_bytes))

    def _place(self, stretch: Stretch, num_bytes: int) -> bool:
        """After the last one or at the beginning; false when there is no room."""
        start = 0
        if self._taken:
            first, last = self._taken[0], self._taken[-1]
            wrapped = last.start < first.start
            limit = first.start if wrapped else self._size
            start = last.end if last.end + num_bytes <= limit else 0
            if start == 0 and (wrapped or num_bytes > first.start):
                return False
        stretch.start, stretch.end = start, start + num_bytes
        self._taken.append(stretch)
        return True

    def give_back(self, stretch: Stretch) -> None:
        """It is over; once is enough."""
        with self._lock:
            if not stretch.is_over:
                stretch.is_over = True
                self._num_counted -= stretch.is_counted
            while self._taken and self._taken[0].is_over:
                self._taken.popleft()
            self._wake()

    def close(self) -> None:
        """Give out nothing any more; whoever waits is told."""
        with self._lock:
            self.is_closed = True
            self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.put(None)

    def _wait_for(self, get: Callable[[], bool]) -> None:
        while True:
            waiter: queue.SimpleQueue[None] = queue.SimpleQueue()
            with self._lock:
                if get():
                    return
                if self.is_closed:
                    raise PoolClosed
                self._waiters.append(waiter)
            waiter.get()
