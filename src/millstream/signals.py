"""Code that must not be interrupted is marked: handlers of signals that come meanwhile are called after it.

**Contract**
- Python calls handlers in the main thread only, so only what that thread runs is marked. Marked code within marked code
  is over when the outermost is.
- Several signals of one kind come as one, as while they are blocked. A second Ctrl-C does not wait: a step may hang.
- Where marked code may take minutes, as compiling does, the first Ctrl-C does not wait either, if Python's own handler
  raises ``KeyboardInterrupt``; and it is raised once more afterwards, should somebody have caught it.
- Signals are not raised again: descriptors for wakeups, as asyncio has one, were written to when they came.
- Between marked code the user's handlers are in place: asyncio, for one, asks for them.
- A forked child finds the handlers that were there before, and none of its parent's signals.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_native: Any = importlib.import_module("_signal")
_get, _set = _native.getsignal, _native.signal
"""Without the conversion into enumerations, which takes nine microseconds."""

_ALL = tuple(map(int, signal.valid_signals()))
_ENDING = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))
"""Signals with which people end what runs; to ask for the handlers of all would take too long in each call."""


class Marked:
    """The marked code that the main thread runs at present, and the signals that have come meanwhile."""

    def __init__(self) -> None:
        self.main_thread = threading.main_thread().ident
        self.levels: list[bool] = []  # of marked code, the outermost first: whether the first Ctrl-C waits, too
        self.handlers: dict[int, Any] = {}  # that are replaced
        self.arrived: set[int] = set()
        self._has_raised = False  # whether a Ctrl-C that is in ``arrived`` was handled at once

    @property
    def is_here(self) -> bool:
        """Whether this is the main thread."""
        return threading.get_ident() == self.main_thread

    def begin(self, *, interrupts_wait: bool) -> None:
        """Marked code begins."""
        self.levels.append(interrupts_wait)
        for number in _ALL:
            if number not in self.handlers and callable(handler := _get(number)):
                self.handlers[number] = handler
                _set(number, self.note)

    def end(self) -> None:
        """Marked code is over; ``handle`` is to follow."""
        if self.levels:  # none in a child that was forked within
            self.levels.pop()
        if not self.levels:
            self._restore()

    def note(self, number: int, frame: FrameType | None) -> None:
        """Take the place of all handlers."""
        is_second = number in self.arrived
        self.arrived.add(number)
        if number == signal.SIGINT and (is_second or self._lets_interrupts_through):
            self._has_raised = True
            self.handlers[number](number, frame)

    def forget_interrupt(self) -> None:
        """Forget a Ctrl-C that was handled at once, where what it raised has reached the caller."""
        if self._has_raised:
            self.arrived.discard(signal.SIGINT)

    def handle(self) -> None:
        """Call the handlers of what came, if no marked code is around this."""
        if self.levels and signal.SIGINT in self.arrived and self._lets_interrupts_through:
            self._has_raised = True
            self.handlers[signal.SIGINT](signal.SIGINT, sys._getframe())
        elif self.arrived and not self.levels:
            numbers, self.arrived, self._has_raised = self.arrived, set(), False
            _handle_all(numbers)

    def forget(self) -> None:
        """Begin anew, in a forked child."""
        self.main_thread = threading.get_ident()
        self.levels.clear()
        self._restore()
        self.arrived.clear()

    @property
    def _lets_interrupts_through(self) -> bool:
        return not any(self.levels) and self.handlers.get(signal.SIGINT) is signal.default_int_handler

    def _restore(self) -> None:
        try:
            for number, handler in sorted(self.handlers.items(), reverse=True):
                if signal.getsignal(number) == self.note:
                    signal.signal(number, handler)
            self.handlers = {}
        except BaseException:  # of a handler that is there again
            self._restore()
            raise


MARKED = Marked()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=MARKED.forget)


@contextlib.contextmanager
def signals_wait(*, interrupts_wait: bool) -> Iterator[None]:
    """Mark what is in the context.

    A handler would find what stands for tensors and numbers while a step is traced, and what it writes would be taken
    for the step's; what it raises while PyTorch compiles would be taken for a failure of the compiler.

    Args:
        interrupts_wait: Whether the first Ctrl-C waits, too.
    """
    if not MARKED.is_here or (MARKED.levels and not interrupts_wait):
        yield
        return
    with contextlib.ExitStack() as after:
        after.callback(MARKED.handle)
        try:
            MARKED.begin(interrupts_wait=interrupts_wait)
            yield
        except KeyboardInterrupt:
            MARKED.forget_interrupt()
            raise
        finally:
            MARKED.end()


def undisturbed(function: Callable[[T], R], argument: T) -> R:
    """``function(argument)``, marked: for what is over soon and called often, as it takes a microsecond.

    Only signals with which people end what runs wait.
    """
    levels = MARKED.levels
    if threading.get_ident() != MARKED.main_thread or True in levels:
        return function(argument)
    if levels:
        with signals_wait(interrupts_wait=True):
            return function(argument)
    handlers = {number: handler for number in _ENDING if callable(handler := _get(number))}
    if not handlers:
        return function(argument)
    note = MARKED.note
    try:
        MARKED.handlers = handlers
        levels.append(True)
        for number in handlers:
            _set(number, note)
        return function(argument)
    finally:  # without calls, but for what has come
        levels.clear()
        for number in reversed(handlers):  # SIGINT last: its handler may raise at once
            if _get(number) == note:
                _set(number, handlers[number])
        MARKED.handlers = {}
        if MARKED.arrived:
            MARKED.handle()


def _handle_all(numbers: Iterable[int]) -> None:
    """Do what Python does for signals, with the handlers that there are by now."""
    with contextlib.ExitStack() as calls:
        for number in sorted(numbers, reverse=True):  # what is added last runs first
            calls.callback(_handle, number)


def _handle(number: int) -> None:
    if callable(handler := signal.getsignal(number)):
        handler(number, sys._getframe())
    else:
        signal.raise_signal(number)
