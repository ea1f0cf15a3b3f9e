"""A pass over a feed in several processes at once: what is done when one has fewer batches than others.

Each process tells the others whether it has a batch before it gives one to its loop, so that all take the same number
of steps, and none waits in a collective for one whose epoch is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from millstream.data_parallel.board import NotTogetherError
from millstream.data_parallel.roll_call import RollCall
from millstream.errors import FeedError

CHOICES = ("drop", "pad", "error")
"""What may be done: end the pass in all; repeat the last batch where there is no other; raise in all."""

NOTHING, HAS_NONE, HAS_ONE = range(3)
"""Answers: no batch, and none before it; no further one; a batch."""

WHAT = "take the next batch of a feed"


class Together(Iterator[Any]):
    """Gives batches of a pass, as many as in all other processes.

    Args:
        batches: Of this process.
        roll_call: Of all.
        uneven: One of ``CHOICES``.
        finish: Called when the pass is over for all: what this process still has is left.
        repeat: Called when a batch is given again.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        roll_call: RollCall,
        uneven: str,
        finish: Callable[[], None],
        repeat: Callable[[], None],
    ) -> None:
        self._batches, self._roll_call, self._uneven = batches, roll_call, uneven
        self._finish, self._repeat = finish, repeat
        self._last: Any = None
        self._count = 0
        self._is_over = self._has_ended = False  # for all; for this process

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: The pass is over, in all processes.
            FeedError: Processes have other numbers of batches, and that is to be an error, or one of them has failed.
            DataParallelError: A process is gone.
        """
        if self._is_over:
            raise StopIteration
        answer, batch = HAS_ONE, self._last
        if not self._has_ended:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._has_ended = True
            except BaseException:
                self._is_over = True
                self._roll_call.fail()
                raise
        if self._has_ended:
            answer = HAS_NONE if self._count else NOTHING
        try:
            answers = self._roll_call.gather(answer, WHAT)
        except NotTogetherError as error:
            self._end()
            raise FeedError(f"The pass over the feed has ended in all processes: {error}.") from None
        self._count += 1
        if all(each == HAS_ONE for each in answers):
            self._last = batch if self._uneven == "pad" else None
            return batch
        if HAS_ONE in answers and self._uneven != "drop":
            if self._uneven == "error" or NOTHING in answers:
                self._end()
                raise self._error(answers)
            if self._has_ended:
                self._repeat()
            self._last = batch
            return batch
        self._end()
        raise StopIteration

    def _end(self) -> None:
        self._is_over, self._last = True, None
        self._finish()

    def _error(self, answers: list[int]) -> FeedError:
        out = ", ".join(str(rank) for rank, each in enumerate(answers) if each != HAS_ONE)
        return FeedError(
            f"Rank {out} has no batch number {self._count}, which others have. Deal as many to all, as a "
            "DistributedSampler does, or give the feed uneven='drop' to end the pass there, or 'pad' to have the last "
            "batch repeated."
        )
