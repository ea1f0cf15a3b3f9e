"""A bounded, fair, closable queue between threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from millstream.errors import ArgumentError, FeedError

T = TypeVar("T")

_NOTHING: Any = object()


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
    - A call that times out or is interrupted by Ctrl-C has done nothing, and no thing is lost by it.

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
        self._held: deque[tuple[T, int]] = deque()
        self._held_bytes = 0
        self._senders: deque[_Party] = deque()  # who waits, the longest first
        self._receivers: deque[_Party] = deque()
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
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            raise ArgumentError(
                f"One thing of {num_bytes:,} bytes does not fit into a channel of max_bytes={self.max_bytes:,}."
            )
        with self._lock:
            if self._closed:
                raise ChannelClosed("The channel is closed; nothing can be sent any more.")
            if not self._senders and self._has_room(num_bytes):  # nearly always
                item = (thing, num_bytes)
                self._held += (item,)
                self._held_bytes += num_bytes
                if self._receivers:
                    try:
                        self._settle()
                    except BaseException:
                        if self._held and self._held[-1] is item:
                            self._held_bytes -= num_bytes
                            del self._held[-1]
                        raise
                return
            party = _Party(self._lock, thing, num_bytes)
            self._senders.append(party)
            self._settle()
            try:
                served = party.wait(timeout)
            except BaseException:
                _remove(self._senders, party)
                raise
            if not served:
                _remove(self._senders, party)
                if self._closed:
                    raise ChannelClosed("The channel was closed while a producer waited for room.")
                raise TimeoutError(f"There was no room in the channel within {timeout} s.")

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
        with self._lock:
            if self._held and not self._receivers:  # nearly always
                thing, num_bytes = self._held[0]
                self._held_bytes -= num_bytes
                del self._held[0]  # no call, which an interrupt could come behind
                if self._senders:
                    try:
                        self._settle()
                    except BaseException:
                        self._held.appendleft((thing, num_bytes))
                        self._held_bytes += num_bytes
                        raise
                return thing
            party = _Party(self._lock)
            self._receivers.append(party)
            self._settle()
            try:
                served = party.wait(timeout)
            except BaseException:
                _remove(self._receivers, party)
                if party.served:  # interrupted with the thing in hand: it is still the next one
                    self._held.appendleft((party.thing, party.num_bytes))
                    self._held_bytes += party.num_bytes
                    self._settle()
                raise
            if served:
                return party.thing  # type: ignore[no-any-return]  # no call, which an interrupt could come behind
            _remove(self._receivers, party)
            if not self._closed:
                raise TimeoutError(f"Nothing came through the channel within {timeout} s.")
            if self._error is None:
                raise ChannelClosed("The channel is closed and empty.")
            error, traceback = self._error
            raise error.with_traceback(traceback)

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
                self._settle()

    def cancel(self) -> list[T]:
        """Close, and take out what lies in the channel; who waits wakes up."""
        with self._lock:
            left = [thing for thing, _ in self._held]
            self._held.clear()
            self._held_bytes = 0
            self.close()
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
                sender = self._senders[0]
                item = (sender.thing, sender.num_bytes)
                sender.serve()
                self._held += (item,)  # from here on no call, which an interrupt could come behind
                self._held_bytes += item[1]
                del self._senders[0]
            elif self._receivers and self._held:
                thing, num_bytes = self._held[0]
                self._receivers[0].serve(thing, num_bytes)
                self._held_bytes -= num_bytes
                del self._held[0]
                del self._receivers[0]
            else:
                break
        if self._closed:
            for party in (*self._senders, *self._receivers):
                party.wake()

    def _has_room(self, num_bytes: int) -> bool:
        # Who waits to receive makes room: what is sent now does not stay.
        waiting = len(self._receivers)
        if len(self._held) >= self.capacity + waiting:
            return False
        return self.max_bytes is None or self._held_bytes + num_bytes <= self.max_bytes or waiting > len(self._held)


class _Party:
    """A thread that waits, with what it offers or what it was given. The channel's lock guards it."""

    __slots__ = ("_changed", "_woken", "num_bytes", "served", "thing")

    def __init__(self, lock: threading.RLock, thing: Any = _NOTHING, num_bytes: int = 0) -> None:
        self.thing = thing
        self.num_bytes = num_bytes
        self.served = False
        self._woken = False
        self._changed = threading.Condition(lock)

    def serve(self, thing: Any = _NOTHING, num_bytes: int = 0) -> None:
        self._changed.notify()  # first: after an interrupt who wakes up finds nothing, and waits on
        self.thing, self.num_bytes, self.served = thing, num_bytes, True

    def wake(self) -> None:
        self._woken = True
        self._changed.notify()

    def wait(self, timeout: float | None) -> bool:
        """Wait until served or woken, or until the time is over; whether it was served."""
        end = None if timeout is None else time.monotonic() + timeout
        while not (self.served or self._woken):
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                break
            self._changed.wait(left)
        return self.served


def _remove(parties: deque[_Party], party: _Party) -> None:
    if party in parties:
        parties.remove(party)
