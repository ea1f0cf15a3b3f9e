"""What a pass over a source does next: a state machine without threads, clocks or tensors.

Events go in (a batch was asked for, memory came back, the source ended), instructions come out. Whoever carries them
out is one thread; the consumer's events reach it as messages. For each batch in order::

    PULL ──▶ STAGE ──▶ SEND ──▶ (ready) ──▶ handed out when it is asked for

**Contract**

- Batches are staged and sent in the order in which they were pulled.
- At most ``depth`` batches, of at most ``max_bytes`` in all, are staged and not handed out; one more may be pulled. One
  batch alone may always be staged.
- The first batches, ``IN_STEP`` if not told otherwise, and all of a source that stays *in step*, are pulled only when
  the consumer waits for them: then a source sees the world as it would in a plain loop.
- ``WAIT`` comes only when a message can still change something: there is no state that nobody leaves.
- After the source's end, or an error, what was pulled before is still sent. After ``close`` nothing is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

from millstream.errors import ArgumentError

IN_STEP = 2
"""Batches of each pass that are pulled in step: a sampler draws its seed in the first pull, and the second one tells
whether the source draws from global generators."""


class Do(Enum):
    """An instruction."""

    PULL = auto()  #: take the next batch from the source
    STAGE = auto()  #: begin to copy its bytes to where they are sent from
    SEND = auto()  #: start its copy; or say ``no_room``
    WAIT = auto()  #: for a message
    END = auto()  #: everything was sent, or nothing is wanted any more


class Message(Enum):
    """What happens elsewhere."""

    ASKED = auto()  #: the consumer asks for the next batch, and so is done with the one before
    FREED = auto()  #: memory for a batch came back
    CLOSED = auto()  #: the consumer has left


class Pipeline:
    """The state of one pass.

    Instructions count as done when they are given: who cannot carry one out says so.

    Args:
        depth: How many batches may be staged and not handed out.
        max_bytes: How many bytes they may have in all; ``None`` for any number.
        look_ahead: How many batches may be pulled before they are asked for, apart from those bounds; ``None`` for any
            number.
        in_step: How many batches are pulled in step at first.

    Attributes:
        asked, pulled, staged, sent: How many batches.
        is_over: Whether nothing more will be pulled.
        is_closed: Whether nothing more is wanted.
    """

    def __init__(
        self, depth: int, max_bytes: int | None = None, look_ahead: int | None = None, in_step: int = IN_STEP
    ) -> None:
        self.asked = self.pulled = self.staged = self.sent = 0
        self.is_over = self.is_closed = False
        self._depth, self._max_bytes, self._look_ahead, self._in_step = depth, max_bytes, look_ahead, in_step
        self._stays_in_step = False
        self._lacks_room = False  # the next batch to be sent waits for memory
        self._keeps_source = False  # and the source's memory is needed until then
        self._has_pulled = False  # whether the last instructions have a PULL
        self._sizes: deque[int] = deque()  # bytes of the batches from ``_first`` on; only if they are bounded
        self._first = 0

    # --- events ------------------------------------------------------------------------------------------------------

    def next(self, messages: Sequence[Message] = ()) -> Sequence[Do]:
        """Take in what has happened, and say what to do, in order; then ask again."""
        for message in messages:
            if message is Message.ASKED:
                self.asked += 1
            elif message is Message.FREED:
                self._lacks_room = False
            else:
                self.is_closed = True
        if self.is_closed:
            return _END
        key, self._has_pulled = 0, False
        # Without a thread a batch that is not asked for is not sent: helpers stage it while the loop computes.
        may_send = self._look_ahead is None or self.sent < self.asked
        if self.staged > self.sent:
            if may_send and not self._lacks_room:
                self.sent += 1
                self._keeps_source = False
                key = _SENDS
        elif self.pulled > self.staged and self._has_room():
            self.staged += 1
            self.sent += may_send
            key = _STAGES if may_send else _STAGES_ONLY
        if key != _STAGES_ONLY and self.pulled == self.staged and self._may_pull():
            self.pulled += 1
            self._has_pulled = True
            return _PULLING[key]
        if key:
            return _SENDING[key]
        return _END if self.is_over and self.sent == self.pulled else _WAIT

    def pulled_bytes(self, num_bytes: int) -> None:
        """The batch pulled last has so many bytes.

        Raises:
            ArgumentError: It has more than all may have.
        """
        if self._max_bytes is None:
            return
        if num_bytes > self._max_bytes:
            raise ArgumentError(
                f"A batch of {num_bytes:,} bytes does not fit into max_bytes={self._max_bytes:,}; allow more, or make "
                "batches smaller."
            )
        self._sizes.append(num_bytes)

    def no_room(self, *, keeps_source: bool = False) -> None:
        """The batch that was to be sent last waits for memory; what was to be done after that was left.

        Args:
            keeps_source: Whether the source must not be asked meanwhile.
        """
        self.sent -= 1
        self.pulled -= self._has_pulled
        self._lacks_room, self._keeps_source, self._has_pulled = True, keeps_source, False

    def retry(self) -> bool:
        """Whether the batch that waits for memory is to be sent now, while whoever carries out is inside the source."""
        if self.is_closed or not self._lacks_room:
            return False
        self.sent += 1
        self._lacks_room = self._keeps_source = self._has_pulled = False
        return True

    def end(self, lost: Do | None = None) -> None:
        """Nothing more is pulled.

        Args:
            lost: The instruction that could not be carried out: the source has ended, or something has failed. The
                batch that it was about, and what was pulled after it, do not come.
        """
        self.is_over = True
        if lost is Do.PULL:
            self.pulled -= 1
        elif lost is not None:
            self.pulled = self.staged = self.sent = min(self.sent, self.staged - 1)

    def stay_in_step(self, stays: bool = True) -> None:
        """From now on pull only what is waited for; or look ahead again."""
        self._stays_in_step = stays

    # --- decisions ---------------------------------------------------------------------------------------------------

    @property
    def is_in_step(self) -> bool:
        """Whether the consumer waits while the next batch is pulled."""
        return self._stays_in_step or self.pulled < self._in_step or self._look_ahead == 0

    def _may_pull(self) -> bool:
        if self.is_over or self._keeps_source:
            return False
        if self.pulled < self.asked:
            return True
        if self._stays_in_step or self.pulled < self._in_step:
            return False
        return self._look_ahead is None or self.pulled < self.asked + self._look_ahead

    def _has_room(self) -> bool:
        handed = min(self.asked, self.sent)
        under_way = self.staged - handed
        if not under_way:
            return True
        if under_way >= self._depth:
            return False
        if self._max_bytes is None:
            return True
        while self._first < handed:
            self._sizes.popleft()
            self._first += 1
        return sum(self._sizes) <= self._max_bytes  # the one that waits is the last of them


_STAGES, _SENDS, _STAGES_ONLY = 1, 2, 3
_WAIT, _END = (Do.WAIT,), (Do.END,)
_SENDING = {_STAGES: (Do.STAGE, Do.SEND), _SENDS: (Do.SEND,), _STAGES_ONLY: (Do.STAGE,)}
_PULLING = {0: (Do.PULL,), _STAGES: (Do.STAGE, Do.SEND, Do.PULL), _SENDS: (Do.SEND, Do.PULL)}
