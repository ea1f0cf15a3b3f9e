"""Handlers of signals run after a trace and after what it gives was compiled, as if the signals had come then."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_put_back: list[Callable[[], None]] = []
"""While signals wait: what lets handlers find them again."""


@contextlib.contextmanager
def signals_wait(*, interrupts_wait: bool) -> Iterator[None]:
    """For the length of the context, signals that Python handles wait; at its end their handlers are called.

    A handler would find what stands for tensors and numbers, and what it writes would be taken for the step's; what it
    raises while PyTorch compiles would be taken for a failure of the compiler. Several signals of one kind come as one,
    as while they are blocked. A second Ctrl-C does not wait: a step may hang.

    The signals are not raised again: descriptors for wakeups, as asyncio has one, were written to when they came.

    Python runs handlers in the main thread only: a trace in another one needs none of this. A forked child finds the
    handlers that were there before, and none of its parent's signals.

    Args:
        interrupts_wait: Whether the first Ctrl-C waits, too, where Python's own handler raises ``KeyboardInterrupt``.
            If not it is raised at once, and once more at the end should somebody have caught it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: set[int] = set()

    def note(number: int, frame: FrameType | None) -> None:
        is_second = number in arrived
        arrived.add(number)
        if number == signal.SIGINT and (is_second or at_once):
            handlers[number](number, frame)

    def put_back() -> None:
        for number, handler in handlers.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)

    handlers: dict[int, Any] = {
        number: handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))
    }
    at_once = not interrupts_wait and handlers.get(signal.SIGINT) is signal.default_int_handler
    with contextlib.ExitStack() as after:
        try:
            _put_back.append(put_back)
            for number in handlers:
                signal.signal(number, note)
            yield
        except KeyboardInterrupt:
            if at_once:
                arrived.discard(signal.SIGINT)
            raise
        finally:
            put_back()
            if put_back in _put_back:  # or this is a child
                _put_back.remove(put_back)
                for number in sorted(arrived, reverse=True):  # what is added last runs first
                    after.callback(_handle, number)


def _find_again_after_fork() -> None:
    while _put_back:
        _put_back.pop()()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_find_again_after_fork)


def _handle(number: int) -> None:
    """Do what Python does for a signal, with the handler that there is by now."""
    if callable(handler := signal.getsignal(number)):
        handler(number, sys._getframe())
    else:
        signal.raise_signal(number)
