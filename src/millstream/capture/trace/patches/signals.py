"""Handlers of signals run after a trace, as if the signals had come then."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """For the length of the context, signals that Python handles wait; at its end their handlers are called.

    A handler would find what stands for tensors and numbers, and what it writes would be taken for the step's. Several
    signals of one kind come as one, as while they are blocked. A second Ctrl-C does not wait: a step may hang.

    The signals are not raised again: descriptors for wakeups, as asyncio has one, were written to when they came.

    Python runs handlers in the main thread only: a trace in another one needs none of this.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: set[int] = set()

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in arrived:
            handlers[number](number, frame)
        arrived.add(number)

    handlers: dict[int, Any] = {
        number: handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))
    }
    with contextlib.ExitStack() as after:
        try:
            for number in handlers:
                signal.signal(number, note)
            yield
        finally:
            for number, handler in handlers.items():
                if signal.getsignal(number) is note:
                    signal.signal(number, handler)
            for number in sorted(arrived, reverse=True):  # what is added last runs first
                after.callback(_handle, number)


def _handle(number: int) -> None:
    """Do what Python does for a signal, with the handler that there is by now."""
    if callable(handler := signal.getsignal(number)):
        handler(number, sys._getframe())
    else:
        signal.raise_signal(number)
