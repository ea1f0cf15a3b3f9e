"""Progress of a capture for users: one line on a terminal, log records elsewhere.

The line is on the standard error output and is gone when the graph is there; what took over a second leaves a sentence.
Elsewhere each phase is a record of level ``INFO`` of the logger ``millstream``. ``MILLSTREAM_PROGRESS=0`` turns both
off. There is no thread: the line changes where the work is done.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOGGER = logging.getLogger("millstream")

REFRESH_S = 0.1
"""Between two changes of a count; a terminal far away is slow."""

WORTH_TELLING_S = 1.0
"""What took less leaves no sentence."""

_here = threading.local()


class Deferred(Exception):  # noqa: N818  no error: it goes on
    """What is shown goes on elsewhere; the message says so."""


@contextmanager
def showing(name: str, done: str) -> Iterator[None]:
    """Show what happens inside the ``with`` block, unless something is shown by this thread already.

    Args:
        name: What it is about.
        done: What is said at its end, before ``in 42 s``.
    """
    if getattr(_here, "shown", None) is not None or os.environ.get("MILLSTREAM_PROGRESS") == "0":
        yield
        return
    shown = _here.shown = (_RewrittenLine if _is_terminal() else _PhaseLog)(name)
    start = time.monotonic()
    try:
        yield
    except Deferred as deferred:
        shown.finish(str(deferred))
        raise
    except BaseException:
        shown.erase()
        raise
    else:
        seconds = time.monotonic() - start
        shown.finish(f"{done} in {seconds:.0f} s" if seconds >= WORTH_TELLING_S else "")
    finally:
        _here.shown = None


def phase(text: str) -> None:
    """Say what is done from now on, if anybody is shown that."""
    shown = getattr(_here, "shown", None)
    if shown is not None:
        shown.tell(text, text)


def count(verb: str, number: int, total: int, what: str) -> None:
    """Say how far it is: ``compiling 214 of 677 kernels``."""
    shown = getattr(_here, "shown", None)
    if shown is not None:
        shown.tell(f"{verb} {number} of {total} {what}".rstrip(), verb)


def _is_terminal() -> bool:
    stream = sys.stderr
    return stream is not None and not stream.closed and stream.isatty() and os.environ.get("TERM") != "dumb"


class _PhaseLog:
    """A record for each phase."""

    def __init__(self, name: str) -> None:
        self._name, self._phase = name, ""

    def tell(self, text: str, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            LOGGER.info("%s: %s", self._name, text)

    def finish(self, text: str) -> None:
        if text:
            LOGGER.info("%s: %s", self._name, text)

    def erase(self) -> None:
        """Nothing: what was logged stays."""


class _RewrittenLine:
    """A line that is written over."""

    def __init__(self, name: str) -> None:
        from rich.console import Console

        self._console: Any = Console(stderr=True)
        self._name, self._phase, self._last = name, "", 0.0

    def tell(self, text: str, phase: str) -> None:
        now = time.monotonic()
        if phase == self._phase and now - self._last < REFRESH_S:
            return
        self._phase, self._last = phase, now
        self.erase()
        self._write(text, end="")

    def finish(self, text: str) -> None:
        self.erase()
        if text:
            self._write(text, end="\n")

    def erase(self) -> None:
        """Take the line away, and stand at its begin."""
        from rich.control import Control, ControlType

        self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))

    def _write(self, text: str, end: str) -> None:
        from rich.text import Text

        line = Text.assemble((f"{self._name}: ", "bold"), text)
        line.truncate(self._console.width - 1, overflow="ellipsis")  # a full line would scroll
        self._console.print(line, end=end, soft_wrap=True)
