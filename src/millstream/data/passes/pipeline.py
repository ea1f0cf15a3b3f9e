"""The state machine of a pass over a source, which decides what is done next: no threads, clocks or tensors.

Events go in (a batch was asked for, memory came back, the source ended), instructions come out. Whoever carries them
out is one thread; the consumer's events reach it as messages. For each batch in order::

    PULL ──▶ STAGE ──▶ SEND ──▶ (ready) ──▶ handed out when it is asked for

**Contract**

- Batches are staged and sent in the order in which they were pulled.
- At most ``depth`` batches, of at most ``max_bytes`` in all, are staged and not handed out; one more may be pulled. One
  batch alone may always be staged.
- A batch is sent when there may be memory for it. A worker that finds none says so, and a message tells when some came
  back.
- The first batches, ``IN_STEP`` if not told otherwise, and all of a source that stays *in step*, are pulled only when
  the consumer waits for them: then a source sees the world as it would in a plain loop.
- ``WAIT`` comes only when a message can still change something: there is no state that nobody leaves.
- After the source's end, or an error, what was pulled before is still sent. After ``close`` nothing is.
"""

from __future__ import annotations

import math
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
    SEND = auto()  #: start its copy; or take it back, as there is no room
    WAIT = auto()  #: for a message
    END = auto()  #: everything was sent, or nothing is wanted any more


class Message(Enum):
    """An event elsewhere."""

    ASKED = auto()  #: the consumer asks for the next batch, and so is done with the one before
    FREED = auto()  #: memory for a batch came back
    CLOSED = auto()  #: the consumer has left
    LOOK = auto()  #: nothing by itself; whoever sleeps is to see what was noted


class Pipeline:
    """The state of one pass.

    Instructions count as done when they are given: a thread that does not carry one out takes it back.

    Args:
        depth: How many batches may be staged and not handed out.
        max_bytes: How many bytes they may have in all; ``None`` for any number.
        look_ahead: How many batches may be pulled before they are asked for, apart from those bounds; ``None`` for any
            number.
        in_step: How many batches are pulled in step at first.
        num_buffers: For how many batches there is memory to send them to, at most.

    Attributes:
        asked, pulled, staged, sent: How many batches.
        is_over: Whether nothing more will be pulled.
        is_closed: Whether nothing more is wanted.
        stays_in_step: Whether only what is waited for is pulled from now on.
        waits_for_memory: Whether a batch is staged that can be sent when memory comes back, which a message tells.
    """

    def __init__(
        self,
        depth: int,
        max_bytes: int | None = None,
        look_ahead: int | None = None,
        in_step: int = IN_STEP,
        num_buffers: float = math.inf,
    ) -> None:
        self.asked = self.pulled = self.staged = self.sent = 0
        self.is_over = self.is_closed = self.stays_in_step = self.waits_for_memory = False
        self._depth, self._look_ahead, self._in_step = depth, look_ahead, in_step
        self._num_buffers = num_buffers
        self._room = num_buffers  # no more batches can be sent; perhaps fewer, if the user holds some of a pass before
        self._keeps_source = False  # whether the batch that is staged needs the source's memory until it is sent
        self.max_bytes = max_bytes
        self._sizes: deque[int] = deque()  # bytes of the batches from ``_first`` on; only if they are bounded
        self._first = 0

    def anew(self) -> Pipeline:
        """One like this, at the beginning."""
        anew = Pipeline(self._depth, self.max_bytes, self._look_ahead, self._in_step, self._num_buffers)
        anew.stays_in_step = self.stays_in_step
        return anew

    # --- events ------------------------------------------------------------------------------------------------------

    def next(self, messages: Sequence[Message] = ()) -> Sequence[Do]:
        """Take in what has happened, and say what to do, in order; then ask again."""
        for message in messages:
            if message is Message.ASKED:
                self.asked += 1
            elif message is Message.FREED:
                self._room += 1
            elif message is Message.CLOSED:
                self.is_closed = True
        todo: list[Do] = []
        while True:
            if self.is_closed:
                todo.append(Do.END)
            elif self.can_send():
                self.sent += 1
                self._room -= 1
                self._keeps_source = False
                todo.append(Do.SEND)
                continue
            elif self.staged == self.sent and self.pulled > self.staged and self._has_room():
                self.staged += 1
                todo.append(Do.STAGE)
                continue
            elif self.pulled == self.staged and self._may_pull():
                self.pulled += 1
                todo.append(Do.PULL)
                if self.staged > self.sent or self._is_full():
                    todo.append(Do.WAIT)  # whatever comes of that; else what is next depends on it
            elif self.is_over and self.sent == self.pulled:
                todo.append(Do.END)
            else:
                todo.append(Do.WAIT)
            self.waits_for_memory = self.staged > self.sent and self._room <= 0
            return todo

    def pulled_bytes(self, num_bytes: int) -> None:
        """The batch pulled last has so many bytes.

        Raises:
            ArgumentError: It has more than all may have.
        """
        if self.max_bytes is None:
            return
        if num_bytes > self.max_bytes:
            raise ArgumentError(
                f"A batch of {num_bytes:,} bytes does not fit into max_bytes={self.max_bytes:,}; allow more, or make "
                "batches smaller."
            )
        self._sizes.append(num_bytes)

    def take_back(self, left: Sequence[Do], *, no_room: bool = False, keeps_source: bool = False) -> None:
        """Some of the instructions given last, from one of them on, were not carried out.

        Args:
            left: They.
            no_room: Whether that is because there is no memory for the batch; a message tells when there is.
            keeps_source: Whether it is because the batch that is staged needs the source's memory until it is sent.
        """
        for do in left:
            if do is Do.PULL:
                self.pulled -= 1
            elif do is Do.STAGE:
                self.staged -= 1
            elif do is Do.SEND:
                self.sent -= 1
                self._room += 1
        if no_room:
            self._room = 0
        self._keeps_source |= keeps_source

    def send_meanwhile(self) -> bool:
        """Whether a batch is to be sent now, while whoever carries out is inside the source, if there is memory."""
        if self.is_closed or self.staged == self.sent or not self._may_send():
            return False
        self.sent += 1
        self._room -= 1
        return True

    def end(self, lost: Do = Do.PULL) -> None:
        """Nothing more is pulled.

        Args:
            lost: The instruction that has failed, and was taken back: what had come so far does not come any more.
        """
        self.is_over = True
        if lost is Do.SEND:
            self.staged = self.sent
        if lost is not Do.PULL:
            self.pulled = self.staged

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _may_pull(self) -> bool:
        if self.is_over or self._keeps_source:
            return False
        if self.pulled < self.asked:
            return True
        if self.stays_in_step or self.pulled < self._in_step:
            return False
        return self._look_ahead is None or self.pulled < self.asked + self._look_ahead

    def can_send(self) -> bool:
        """Return whether a batch is staged that may be sent, if there is memory for it."""
        return self.staged > self.sent and self._room > 0 and self._may_send()

    def _may_send(self) -> bool:
        # Without a thread a batch that is not asked for is not sent: helpers stage it while the loop computes.
        return self._look_ahead is None or self.sent < self.asked

    def _is_full(self) -> bool:
        under_way = self.staged - min(self.asked, self.sent)
        return under_way >= self._depth and under_way > 0

    def _has_room(self) -> bool:
        if self._is_full():
            return False
        handed = min(self.asked, self.sent)
        if self.max_bytes is None or self.staged == handed:
            return True
        while self._first < handed:
            self._sizes.popleft()
            self._first += 1
        return sum(self._sizes) <= self.max_bytes  # the one that waits is the last of them
