"""Streams and events: what the rest of the library may ask of them, and the ones of the CPU.

``torch.cuda.Stream`` and ``torch.cuda.Event`` satisfy the two protocols as they are. On the CPU every operation has
happened by the time the call that asked for it returns, so the CPU's stream is always idle, its event always reached,
and waiting for either is nothing: code written for streams runs there unchanged.
"""

from __future__ import annotations

import time
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Event(Protocol):
    """A point in a stream that other streams and the host can wait for."""

    def record(self, stream: Any) -> None:
        """Set the event to the present end of ``stream``, forgetting where it was before."""
        ...

    def wait(self, stream: Any) -> None:
        """What ``stream.wait_event`` does, with one call of Python's less."""
        ...

    def query(self) -> bool:
        """Tell whether the recorded point has been reached (true for an event that was never recorded)."""
        ...

    def synchronize(self) -> None:
        """Block the host until the recorded point has been reached."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds between this point and that of ``end_event``; both must have been made with ``timing``."""
        ...


@runtime_checkable
class Stream(Protocol):
    """An ordered queue of work on a device."""

    def wait_event(self, event: Any) -> None:
        """Hold later work of this stream back until the event's *present* record is reached. The host does not wait."""
        ...

    def query(self) -> bool:
        """Tell whether all work given to the stream so far is done."""
        ...

    def synchronize(self) -> None:
        """Block the host until all work given to the stream so far is done."""
        ...


class NullStream:
    """A stream of the CPU: never holds anything back, because nothing is ever outstanding."""

    __slots__ = ("name",)

    def __init__(self, name: str = "default") -> None:
        self.name = name

    def wait_event(self, event: Any) -> None:
        """Do nothing: whatever the event stands for has happened."""

    def query(self) -> bool:
        """Always true."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the stream is idle."""

    def __repr__(self) -> str:
        return f"NullStream({self.name!r})"


class NullEvent:
    """An event of the CPU: reached as soon as it is recorded. With ``timing`` it remembers the host's clock."""

    __slots__ = ("_recorded_ns", "timing")

    def __init__(self, timing: bool = False) -> None:
        self.timing = timing
        self._recorded_ns: int | None = None

    def record(self, stream: Any) -> None:  # noqa: ARG002 - every stream of the CPU is at its end already
        """Remember the present time."""
        self._recorded_ns = time.perf_counter_ns() if self.timing else None

    def wait(self, stream: Any) -> None:
        """Do nothing: whatever the event stands for has happened."""

    def query(self) -> bool:
        """Always true."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the event is reached."""

    def elapsed_time(self, end_event: NullEvent) -> float:
        """Milliseconds of host time between the two records.

        Raises:
            RuntimeError: One of the events does not time or was not recorded (as ``torch.cuda.Event`` does).
        """
        if self._recorded_ns is None or end_event._recorded_ns is None:
            raise RuntimeError(
                "Both events must be made with timing and be recorded before their distance is asked for."
            )
        return (end_event._recorded_ns - self._recorded_ns) / 1e6
