"""How far a pass's worker may run ahead of its consumer."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable

from millstream.errors import ArgumentError


class Budget:
    """Batches that may be under way between two threads, bounded by number and by bytes.

    The account is the worker's. The consumer only says what he has got, which takes one call and no lock of Python's:
    he does so for every batch, in the middle of his loop.

    Args:
        depth: How many batches.
        max_bytes: How many bytes they may have in all; ``None`` for any number.
    """

    def __init__(self, depth: int, max_bytes: int | None) -> None:
        self._depth, self._max_bytes = depth, max_bytes
        self._taken: deque[tuple[int, int]] = deque()  # number and bytes of each batch under way; the worker's
        self._num_bytes = 0  # of these
        self._delivered: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # ``None``: cancelled
        self._is_cancelled = False
        #: Consumer: the batch of this number, and all before it, are under way no more. It may be said again.
        self.deliver: Callable[[int], None] = self._delivered.put

    def take(self, number: int, num_bytes: int) -> bool:
        """Worker: wait until one more batch may be under way, and count it; false when cancelled.

        Args:
            number: Of the batch; they rise.
            num_bytes: What it takes.

        Raises:
            ArgumentError: It has more bytes than all may have.
        """
        self.check_size(num_bytes)
        while not self._is_cancelled and self._is_full(num_bytes):
            delivered = self._delivered.get()
            while delivered is not None and self._taken and self._taken[0][0] <= delivered:
                self._num_bytes -= self._taken.popleft()[1]
        self._taken.append((number, num_bytes))
        self._num_bytes += num_bytes
        return not self._is_cancelled

    def _is_full(self, num_bytes: int) -> bool:
        if not self._taken:
            return False
        too_large = self._max_bytes is not None and self._num_bytes + num_bytes > self._max_bytes
        return too_large or len(self._taken) >= self._depth

    def check_size(self, num_bytes: int) -> None:
        """Refuse a batch that has more bytes than all may have.

        Raises:
            ArgumentError: It has.
        """
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            raise ArgumentError(
                f"A batch of {num_bytes:,} bytes does not fit into max_bytes={self._max_bytes:,}; allow more, or make "
                "batches smaller."
            )

    def cancel(self) -> None:
        """Any thread: nothing more is to be under way; who waits wakes up."""
        self._is_cancelled = True
        self._delivered.put(None)
