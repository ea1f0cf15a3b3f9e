"""The lifetime of a context, and the lock that captures of CUDA graphs are made under."""

from __future__ import annotations

import threading

from millstream.device.place import Place
from millstream.errors import DeviceError
from millstream.locks import ForkSafeLock


class ContextLifetime:
    """Shared by a context and its pools.

    Attributes:
        place: The device.
        end: Why the context can no longer be used; empty while it can.
    """

    __slots__ = ("end", "place")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.end = ""

    def check(self) -> None:
        """Raise unless the context is open.

        Raises:
            DeviceError: It is not.
        """
        if self.end:
            raise DeviceError(f"The context of {self.place} {self.end}; ask ms.device.context for a new one.")


_capture = ForkSafeLock()


def capture_lock() -> threading.RLock:
    """The lock of all places for captures; see ``DeviceContext.capture_lock``."""
    return _capture.lock
