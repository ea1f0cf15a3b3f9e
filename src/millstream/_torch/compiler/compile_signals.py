"""Handlers of signals wait while Dynamo compiles. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import sys
import threading
from typing import Any

from torch._dynamo.callback import callback_handler

from millstream.signals import MARKED


class _CompileSignals(threading.local):
    """Signals that come while Dynamo compiles in a call of ours, in this thread.

    What a handler raises there Dynamo would take for a failure of its own. So handlers wait until the graph is about to
    run, which has changed nothing by then, or until the call is over, where there is no graph.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._is_marked = False

    def begin_call(self) -> None:
        """A call begins."""
        if _begin not in callback_handler.start_callbacks:  # at first, and after ``torch._dynamo.reset``
            callback_handler.register_start_callback(_begin)
            callback_handler.register_end_callback(_end)
        self._num_calls += 1

    def end_call(self) -> None:
        """It is over; handle what has come."""
        self._num_calls -= 1
        self.end_compiling()  # what Dynamo tells of its end is dropped by ``torch._dynamo.reset``
        if isinstance(sys.exception(), KeyboardInterrupt):
            MARKED.forget_interrupt()
        self.handle()

    def begin_compiling(self) -> None:
        if self._num_calls and MARKED.is_here and not self._is_marked:
            self._is_marked = True
            MARKED.begin(interrupts_wait=False)  # to compile may take minutes

    def end_compiling(self) -> None:
        if self._is_marked:
            self._is_marked = False
            MARKED.end()

    def handle(self) -> None:
        """Call the handlers of what has come."""
        if MARKED.is_here:
            MARKED.handle()


COMPILE_SIGNALS = _CompileSignals()


def _begin(_: Any) -> None:
    COMPILE_SIGNALS.begin_compiling()


def _end(_: Any) -> None:
    COMPILE_SIGNALS.end_compiling()
