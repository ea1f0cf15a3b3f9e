"""Points on streams that somebody waits for, or measures from."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from millstream.device.context import DeviceContext
from millstream.device.handles import Event, Stream

FIRST_PAUSE_S = 50e-6
"""How long a thread first sleeps when an event is not reached: about the shortest sleep an operating system grants."""

LONGEST_PAUSE_S = 500e-6
"""How long at most: noticing this late costs nothing while other batches wait, and 2,000 questions a second to the
runtime take well under 1 % of the interpreter's time."""


class StreamMarker:
    """A point on a stream: an event that goes back to its context when nobody needs the marker any more.

    Attributes:
        stream: The stream.
        event: Recorded there.
        at_ns: When the host did so.
    """

    __slots__ = ("_context", "at_ns", "event", "stream")

    def __init__(self, context: DeviceContext, stream: Stream, *, timing: bool = True, record: bool = True) -> None:
        self._context = context
        self.stream = stream
        self.event = context.events.acquire(timing=timing)
        if record:  # or the caller does, at once
            self.event.record(stream)
        self.at_ns = time.perf_counter_ns()

    def __del__(self) -> None:
        with suppress(AttributeError):  # of which an interrupt may have kept it
            self._context.events.release(self.event)

    def until(self, later: StreamMarker) -> int:
        """Nanoseconds on the device; both points have been reached."""
        return round(self.event.elapsed_time(later.event) * 1e6)


def wait_until_reached(context: DeviceContext, event: Event, stopped: threading.Event) -> bool:
    """Block until the device has reached ``event``; false when stopped before.

    Asked in pauses rather than by ``synchronize``: the question is put under the capture lock, which must not be held
    for long, and whoever closes a feed need not wait for the device.
    """
    pause_s = FIRST_PAUSE_S
    while not stopped.is_set():
        with context.capture_lock:
            if event.query():
                return True
        stopped.wait(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return False
