"""A bounded, fair, closable queue between threads.

Ctrl-C may come at any moment, and nothing shall be lost or done twice by it. Python raises it behind calls, where
functions begin, where loops turn back, and inside calls that wait; but nowhere else. So whatever moves a thing is
written without a call until all of it is done, waiting is done without the lock (inside of ``threading.Condition`` an
interrupt can leave it to nobody), and who is interrupted leaves the channel settled.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Generic, TypeVar

from millstream.errors import ArgumentError, FeedError

T = TypeVar("T")


class ChannelClosed(FeedError):  # noqa: N818 - a fact about the channel, as in trio and Go
    """The channel is closed: nothing can be sent any more, and all that had been sent was received."""


class Channel(Generic[T]):
    """Things on their way from producers to consumers, bounded by number and by bytes.

    **Contract**

    - Things arrive in the order in which they were sent. Whoever waits longest is served first, on both sides.
    - At most ``capacity`` things of at most ``max_bytes`` in all lie in the channel. With ``capacity`` 0 nothing does:
      a send returns when a receiver has taken the thing (a *rendezvous*).
    - After ``close`` consumers still get what lies in the channel, then the end (or the error). What a blocked producer
      had offered was not sent: its call raises.
    - After ``cancel`` nothing more is handed out, and no call blocks.
    - A call that times out or is interrupted by Ctrl-C has done nothing, and no thing is lost by it; except that what
      has found its receiver is sent, and see ``receive_into``.

    Args:
        capacity: How many things may lie in the channel.
        max_bytes: How many bytes they may have in all; ``None`` for any number. Who sends says how many a thing has.

    Raises:
        ArgumentError: A bound is negative or not an integer.
    """

    def __init__(self, capacity: int, max_bytes: int | None = None) -> None:
        for name, value in (("capacity", capacity), ("max_bytes", 0 if max_bytes is None else max_bytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ArgumentError(f"{name} is {value!r}; it must be an integer of at least 0.")
        self.capacity = capacity
        self.max_bytes = max_bytes
        # Re-entrant, because a garbage collection inside a method may run a finalizer that closes this very channel.
        self._lock = threading.RLock()
        self._held: deque[_Offer[T]] = deque()
        self._held_bytes = 0
        self._senders: deque[_Offer[T]] = deque()  # who waits, the longest first
        self._receivers: deque[_Wish[T]] = deque()
        self._closed = False
        self._error: tuple[BaseException, TracebackType | None] | None = None

    # --- producers ---------------------------------------------------------------------------------------------------

    def send(self, thing: T, num_bytes: int = 0, timeout: float | None = None) -> None:
        """Put ``thing`` into the channel, waiting for room.

        Args:
            thing: What to send.
            num_bytes: What it counts against ``max_bytes``.
            timeout: Seconds to wait at most; ``None`` for ever.

        Raises:
            ArgumentError: The thing alone has more than ``max_bytes``.
            ChannelClosed: The channel is closed, or was closed while this waited.
            TimeoutError: There was no room in time.
        """
        self.check_size(num_bytes)
        offer = _Offer(thing, num_bytes)
        try:
            with self._lock:
                if self._closed:
                    raise ChannelClosed("The channel is closed; nothing can be sent any more.")
                self._senders.append(offer)
                self._settle()
                if offer not in self._senders:
                    return
                bell = offer.bell = _Bell()
            _wait(bell, timeout)
            with self._lock:
                if offer in self._senders:
                    self._senders.remove(offer)
                    if self._closed:
                        raise ChannelClosed("The channel was closed while a producer waited for room.")
                    raise TimeoutError(f"There was no room in the channel within {timeout} s.")
        except BaseException:
            with self._lock:
                if offer in self._senders:
                    self._senders.remove(offer)
                elif offer in self._held:  # interrupted on the way out
                    self._held.remove(offer)
                    self._held_bytes -= num_bytes
                self._settle()
            raise

    def check_size(self, num_bytes: int) -> None:
        """Raise what ``send`` would for a thing of so many bytes, whatever lies in the channel.

        Raises:
            ArgumentError: The thing alone has more than ``max_bytes``.
        """
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            raise ArgumentError(
                f"One thing of {num_bytes:,} bytes does not fit into a channel of max_bytes={self.max_bytes:,}."
            )

    # --- consumers ---------------------------------------------------------------------------------------------------

    def receive(self, timeout: float | None = None) -> T:
        """Take the next thing, waiting for it.

        Args:
            timeout: Seconds to wait at most; ``None`` for ever.

        Raises:
            ChannelClosed: The channel is closed and empty.
            TimeoutError: Nothing came in time.
            BaseException: What ``close`` was given, with its traceback, once the channel is empty; every time.
        """
        wish: _Wish[T] = _Wish([])
        try:
            self._take(wish, timeout)
            return wish.things[0]
        except BaseException:
            if wish.offer is not None:  # interrupted with the thing in hand: it is still the next one
                with self._lock:
                    self._held.appendleft(wish.offer)
                    self._held_bytes += wish.offer.num_bytes
                    self._settle()
            raise

    def receive_into(self, things: list[T] | deque[T], timeout: float | None = None) -> None:
        """Take the next thing, waiting for it, and append it to ``things``.

        What a function returns is lost when Ctrl-C comes before the caller has stored it. Here the thing leaves the
        channel and is among the caller's own in one: who is interrupted finds it there, or it still is the next one.

        Args:
            things: Where the thing goes. It must not be changed by anybody else meanwhile.
            timeout: Seconds to wait at most; ``None`` for ever.

        Raises:
            ChannelClosed, TimeoutError, BaseException: As ``receive`` does.
        """
        self._take(_Wish(things), timeout)

    def _take(self, wish: _Wish[T], timeout: float | None) -> None:
        try:
            with self._lock:
                self._receivers.append(wish)
                self._settle()
                if wish.offer is not None:
                    return
                if not self._closed:
                    wish.bell = _Bell()
            if wish.bell is not None:
                _wait(wish.bell, timeout)
            with self._lock:
                if wish.offer is not None:
                    return
                if wish in self._receivers:
                    self._receivers.remove(wish)
                if not self._closed:
                    raise TimeoutError(f"Nothing came through the channel within {timeout} s.")
                if self._error is None:
                    raise ChannelClosed("The channel is closed and empty.")
                error, traceback = self._error
                raise error.with_traceback(traceback)
        except BaseException:
            with self._lock:
                if wish in self._receivers:
                    self._receivers.remove(wish)
                self._settle()
            raise

    def __iter__(self) -> Iterator[T]:
        """Receive until the channel is closed and empty."""
        while True:
            try:
                thing = self.receive()
            except ChannelClosed:
                return
            yield thing
            del thing  # or it would be kept alive while this waits for the next

    # --- either side -------------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Say that nothing more will come. Closing again does nothing.

        Args:
            error: Raised in consumers when they have received everything.
        """
        with self._lock:
            if not self._closed:
                self._error = (error, error.__traceback__) if error is not None else None
                self._closed = True
            self._settle()  # again, too: an interrupt may have kept the first from waking everybody

    def cancel(self) -> list[T]:
        """Close, and take out what lies in the channel; who waits wakes up."""
        with self._lock:
            self.close()
            left = [thing for offer in self._held for thing in offer.things]
            self._held.clear()
            self._held_bytes = 0
            return left

    @property
    def closed(self) -> bool:
        """Whether ``close`` has been called; there may still be things to receive."""
        return self._closed

    def __len__(self) -> int:
        """Things in the channel."""
        return len(self._held)

    def _settle(self) -> None:
        """Move everything that can move, in order, and wake those it concerns."""
        while True:
            if self._senders and not self._closed and self._has_room(self._senders[0].num_bytes):
                offer = self._senders[0]
                self._held += (offer,)
                self._held_bytes += offer.num_bytes
                del self._senders[0]
                if offer.bell is not None:  # and no function is called in between, where an interrupt could come
                    offer.bell.put(None)
            elif self._receivers and self._held:
                wish, offer = self._receivers[0], self._held[0]
                wish.things += offer.things
                wish.offer = offer
                self._held_bytes -= offer.num_bytes
                del self._held[0], self._receivers[0]
                if wish.bell is not None:
                    wish.bell.put(None)
            else:
                break
        if self._closed:
            for party in (*self._senders, *self._receivers):
                if party.bell is not None:
                    party.bell.put(None)

    def _has_room(self, num_bytes: int) -> bool:
        # Who waits to receive makes room: what is sent now does not stay.
        waiting = len(self._receivers)
        if len(self._held) >= self.capacity + waiting:
            return False
        return self.max_bytes is None or self._held_bytes + num_bytes <= self.max_bytes or waiting > len(self._held)


class _Offer(Generic[T]):
    """Something that is sent. It waits among the senders, then it lies in the channel."""

    __slots__ = ("bell", "num_bytes", "things")

    def __init__(self, thing: T, num_bytes: int) -> None:
        # Made here, because making a tuple may begin a collection, and so run a finalizer that moves things, too.
        self.things = (thing,)
        self.num_bytes = num_bytes
        self.bell: _Bell | None = None  # of who waits


class _Wish(Generic[T]):
    """Somebody who receives."""

    __slots__ = ("bell", "offer", "things")

    def __init__(self, things: list[T] | deque[T]) -> None:
        self.things = things  # what comes is added to them
        self.offer: _Offer[T] | None = None  # what has come
        self.bell: _Bell | None = None


_Bell = queue.SimpleQueue  # rung when who waits was served, or the channel was closed


def _wait(bell: queue.SimpleQueue[None], timeout: float | None) -> None:
    with suppress(queue.Empty):
        bell.get(timeout=None if timeout is None else max(timeout, 0))
