"""Handlers of signals that run later, as if the signals had come then."""

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


class Postponed:
    """Signals that Python handles, which wait from ``begin`` to ``end``; their handlers are called by ``handle``.

    Several signals of one kind come as one, as while they are blocked. A second Ctrl-C does not wait: a step may hang.

    The signals are not raised again: descriptors for wakeups, as asyncio has one, were written to when they came.

    Python runs handlers in the main thread only, so only what that thread does is any reason to postpone them. A forked
    child finds the handlers that were there before, and none of its parent's signals.

    Args:
        interrupts_wait: Whether the first Ctrl-C waits, too, where Python's own handler raises ``KeyboardInterrupt``.
            If not it is raised at once, and once more by ``handle`` should somebody have caught it.
    """

    def __init__(self, *, interrupts_wait: bool) -> None:
        self._interrupts_wait = interrupts_wait
        self._raises_interrupts = False
        self._handlers: dict[int, Any] = {}
        self._arrived: set[int] = set()

    def begin(self) -> None:
        """Let signals wait from now on."""
        self._handlers = {
            number: handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))
        }
        is_plain = self._handlers.get(signal.SIGINT) is signal.default_int_handler
        self._raises_interrupts = is_plain and not self._interrupts_wait
        _in_force.append(self)
        for number in self._handlers:
            signal.signal(number, self._note)

    def end(self) -> None:
        """Let signals that come from now on find their handlers."""
        try:
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, handler)
            self._handlers = {}
            if self in _in_force:
                _in_force.remove(self)
        except BaseException:  # of a handler that is there again
            self.end()
            raise

    def forget(self) -> None:
        """Forget what came."""
        self._arrived.clear()

    def forget_interrupt(self) -> None:
        """Forget a Ctrl-C that was raised at once, where that has reached the caller."""
        if self._raises_interrupts:
            self._arrived.discard(signal.SIGINT)

    def handle(self) -> None:
        """Call the handlers of the signals that came."""
        if self._arrived:
            numbers, self._arrived = self._arrived, set()
            _handle_all(numbers)

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_second = number in self._arrived
        self._arrived.add(number)
        if number == signal.SIGINT and (is_second or self._raises_interrupts):
            self._handlers[number](number, frame)


@contextlib.contextmanager
def signals_wait(*, interrupts_wait: bool) -> Iterator[None]:
    """For the length of the context, signals that Python handles wait, as in ``Postponed``; then they are handled.

    A handler would find what stands for tensors and numbers while a step is traced, and what it writes would be taken
    for the step's; what it raises while PyTorch compiles would be taken for a failure of the compiler.

    Within another such context they wait for the end of that one, unless this one alone lets interrupts wait.
    """
    if threading.current_thread() is not threading.main_thread() or (_in_force and not interrupts_wait):
        yield
        return
    postponed = Postponed(interrupts_wait=interrupts_wait)
    with contextlib.ExitStack() as after:
        after.callback(postponed.handle)
        try:
            postponed.begin()
            yield
        except KeyboardInterrupt:
            postponed.forget_interrupt()
            raise
        finally:
            postponed.end()


_in_force: list[Postponed] = []


def _find_again_after_fork() -> None:
    _here.forget()
    while _in_force:
        postponed = _in_force[-1]
        postponed.end()
        postponed.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_find_again_after_fork)


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


# --- calls that are over soon ----------------------------------------------------------------------------------------

_WAITING = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))
"""Signals with which people end what runs; to ask for the handlers of all would take too long."""

_native: Any = importlib.import_module("_signal")
_get, _set = _native.getsignal, _native.signal
"""Without the conversion into enumerations, which takes nine microseconds."""


class _Undisturbed:
    """Of the main thread: what handlers there were when something undisturbed began, and what has come meanwhile."""

    def __init__(self) -> None:
        self.main_thread = threading.main_thread().ident
        self.is_running = False
        self.handlers: dict[int, Any] = {}
        self.arrived: list[int] = []

    def note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self.arrived:
            self.handlers[number](number, frame)
        else:
            self.arrived.append(number)

    def forget(self) -> None:
        """In a child that was forked meanwhile: what was there before is there again."""
        for number, handler in self.handlers.items():
            if _get(number) == self.note:
                _set(number, handler)
        self.is_running, self.main_thread = False, threading.get_ident()
        self.arrived.clear()

    def handle(self) -> None:
        numbers, self.arrived = self.arrived, []
        _handle_all(numbers)


_here = _Undisturbed()


def undisturbed(function: Callable[[T], R], argument: T) -> R:
    """``function(argument)``; in the main thread, handlers of signals that come meanwhile are called after it.

    For what must not end half-way, is over soon, and is called often: it takes a microsecond. A second Ctrl-C does not
    wait.
    """
    if threading.get_ident() != _here.main_thread or _here.is_running:
        return function(argument)
    handlers = {number: handler for number in _WAITING if callable(handler := _get(number))}
    if not handlers:
        return function(argument)
    try:
        _here.handlers, _here.is_running = handlers, True
        for number in handlers:
            _set(number, _here.note)
        return function(argument)
    finally:  # without calls, but for what has come
        _here.is_running = False
        for number in reversed(handlers):  # SIGINT last: its handler may raise at once
            if _get(number) == _here.note:
                _set(number, handlers[number])
        if _here.arrived:
            _here.handle()
