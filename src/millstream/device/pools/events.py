"""The events of a context."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from millstream.device.handles import Event, Stream
from millstream.device.pools.lifetime import ContextLifetime
from millstream.errors import DeviceError


class EventPool:
    """Events that are lent, come back and are lent again. Any thread may call its methods, and so may finalizers.

    Args:
        make: Makes an event, which measures time where ``timing`` is true.
        lifetime: Of the context.
    """

    def __init__(self, make: Callable[..., Event], lifetime: ContextLifetime) -> None:
        self._make = make
        self._lifetime = lifetime
        # Deques without a lock: append and pop are atomic, so a finalizer can give events back at any moment, even
        # while this thread is inside ``acquire``.
        self._idle: dict[bool, deque[Event]] = {False: deque(), True: deque()}
        self._lent: dict[int, bool] = {}  # by identity: whether it measures time

    @property
    def num_lent(self) -> int:
        """Events that are out."""
        return len(self._lent)

    def acquire(self, *, timing: bool = False) -> Event:
        """Lend an event. Record it before anything waits for it: it still stands where its last user recorded it.

        Raises:
            DeviceError: The context is closed.
        """
        if self._lifetime.end:
            self._lifetime.check()
        try:
            event = self._idle[timing].pop()
        except IndexError:
            event = self._make(timing=timing)
        self._lent[id(event)] = timing
        return event

    def release(self, event: Event) -> None:
        """Take a lent event back. Waits that were enqueued on it stay right: they hold what was recorded *then*.

        Raises:
            DeviceError: The event is not lent. Two users of one event would order their work by each other's records.
        """
        if self._lifetime.end:
            return
        timing = self._lent.pop(id(event), None)
        if timing is None:
            raise DeviceError(
                f"This event is not one that {self._lifetime.place} has lent: it was released before, or comes from "
                "elsewhere."
            )
        self._idle[timing].append(event)

    def forget(self, event: Event) -> None:
        """Give a lent event up, as somebody may still record it: it is lent to nobody again."""
        self._lent.pop(id(event), None)

    def order(self, first: Stream, then: Stream) -> None:
        """Let ``then`` wait for what has been enqueued on ``first``."""
        event = self.acquire()
        event.record(first)
        then.wait_event(event)
        self.release(event)

    def clear(self) -> None:
        """Drop all events, those that are out included."""
        for idle in self._idle.values():
            idle.clear()
        self._lent.clear()
