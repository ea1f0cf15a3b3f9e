"""Compilations, recompilations and graph breaks of TorchDynamo. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_BREAKS = "torch._dynamo.symbolic_convert.__graph_breaks"


class Recompilation(NamedTuple):
    """A function that was compiled once more, when (Unix time in nanoseconds), and the guard that failed."""

    file: str
    line: int
    function: str
    at_ns: int
    reason: str


def is_loaded() -> bool:
    """Return whether Dynamo is there.

    Importing it takes seconds, and most scripts do so themselves at the first step.
    """
    return hasattr(sys.modules.get("torch._dynamo.callback"), "callback_handler")


def recompilations(since_ns: int) -> list[Recompilation]:
    """Functions that were compiled again since a moment (Unix time in nanoseconds); Dynamo remembers the last 64."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    found = []
    for metrics in utils.get_compilation_metrics() if utils is not None else ():
        at_ns = (getattr(metrics, "start_time_us", None) or 0) * 1000
        reason = getattr(metrics, "recompile_reason", None)
        if reason and at_ns >= since_ns:
            place = metrics.co_filename or "", metrics.co_firstlineno or 0, metrics.co_name or ""
            found.append(Recompilation(*place, at_ns, str(reason)))
    return found


class CompileWatch:
    """Calls back when Dynamo begins and ends to compile, and for each graph break.

    Args:
        begin: At the begin of a compilation, in the thread that compiles.
        end: At its end.
        on_break: Given the text of a graph break.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None], on_break: Callable[[str], None]) -> None:
        self._begin, self._end = (lambda _: begin()), (lambda _: end())
        self._log = _ArtifactLog(_BREAKS, on_break)
        handler: Any = sys.modules["torch._dynamo.callback"].callback_handler
        handler.register_start_callback(self._begin)
        handler.register_end_callback(self._end)

    def close(self) -> None:
        """Take everything back."""
        handler: Any = sys.modules["torch._dynamo.callback"].callback_handler
        for callbacks, mine in ((handler.start_callbacks, self._begin), (handler.end_callbacks, self._end)):
            if mine in callbacks:  # ``torch._dynamo.reset`` drops all of them
                callbacks.remove(mine)
        self._log.close()


class _ArtifactLog(logging.Handler):
    """Reads one of PyTorch's artifact logs without having it printed."""

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._tell = tell
        self._logger = logging.getLogger(name)
        self._before = self._logger.level, self._logger.propagate
        if not self._logger.isEnabledFor(logging.DEBUG):
            self._logger.propagate = False  # or torch's handler prints it, which the user did not ask for
        self._logger.setLevel(logging.DEBUG)
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before[0])
        self._logger.propagate = self._before[1]
        super().close()
