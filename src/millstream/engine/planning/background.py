"""The choice of a plan in pieces, between the calls of a program: ``tune="background"``.

**Contract**
- Pieces take at most a share of the time since the first of them was asked for, as far as the longest so far tells
  how long the next one takes.
- What a piece does leaves no trace: the choice itself sees to that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

Result = TypeVar("Result")

SHARE = 0.02  # of the time


class Background(Generic[Result]):
    """A worker that does its work piece by piece.

    Args:
        steps: The work; it yields before each piece.
        clock: Seconds.
        share: Of the time; ``SHARE`` if not given.
        longest: Seconds that the first piece is taken to last.

    Attributes:
        result: What the work came to; ``None`` before.
        is_over: Whether it is done.
    """

    def __init__(
        self,
        steps: Generator[None, None, Result],
        clock: Callable[[], float] = time.monotonic,
        *,
        share: float | None = None,
        longest: float = 0.0,
    ) -> None:
        self.result: Result | None = None
        self.is_over = False
        self._steps, self._clock = steps, clock
        self._since, self._share = clock(), SHARE if share is None else share
        self._spent, self._longest = 0.0, longest

    @property
    def is_due(self) -> bool:
        """Whether there has been time enough for one more piece."""
        return not self.is_over and self._spent + self._longest <= self._share * (self._clock() - self._since)

    def advance(self) -> None:
        """Do the next piece.

        Raises:
            Exception: What the work raises; it is over then.
        """
        start = self._clock()
        try:
            next(self._steps)
        except StopIteration as done:
            self.result, self.is_over = done.value, True
        except BaseException:
            self.is_over = True
            raise
        took = self._clock() - start
        self._spent, self._longest = self._spent + took, max(self._longest, took)
