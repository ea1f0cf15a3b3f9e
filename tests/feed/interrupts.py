"""Ctrl-C at every moment of a call, one after the other.

Python looks for interrupts where a function begins, where a loop turns back, and behind calls of compiled code. A
profiler is called where functions begin and behind such calls, and what it raises comes from there: so it can interrupt
at each of the moments that a signal would meet once in thousands of runs. Turns of loops are left out.
"""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupter:
    """Raises ``KeyboardInterrupt`` in this thread once, at the ``moment``-th of the moments inside of some files."""

    def __init__(self, moment: int, files: tuple[str, ...]) -> None:
        self.where = ""  # it came: the name of a function
        self._left = moment
        self._files = files

    def run(self, call: Callable[[], Any]) -> Any:
        """Call, and interrupt it; no collection shall end what an earlier call has left meanwhile."""
        gc.disable()
        sys.setprofile(self._look)
        try:
            return call()
        finally:
            sys.setprofile(None)
            gc.enable()

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(self._files):
            self._left -= 1
            if self._left < 0:
                self.where = frame.f_code.co_qualname
                raise KeyboardInterrupt


def interrupt_everywhere(run: Callable[[Interrupter], None], *files: str) -> list[str]:
    """Call ``run`` with one interrupter after the other until there are no more moments; the function of each.

    How many there are differs by a few where threads are about, so the end is where several in a row have not come.
    """
    places: list[str] = []
    late = 0
    for moment in range(100_000):
        interrupter = Interrupter(moment, files)
        run(interrupter)
        places += [interrupter.where] if interrupter.where else []
        late = 0 if interrupter.where else late + 1
        if late == 5:
            return places
    raise AssertionError("the moments did not come to an end")
