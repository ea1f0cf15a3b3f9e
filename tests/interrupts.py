"""Ctrl-C at every moment of a call, one after the other.

Python looks for interrupts where a function begins, where a loop turns back, and after calls of compiled code. A
profiler is called where functions begin and after such calls, and what it raises comes from there: so it can interrupt
at each of the moments that a signal would meet once in thousands of runs. Turns of loops are left out.

A moment is known by its line and by how often that was reached before: so each is met once, also where other threads
make calls differ from run to run.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupter:
    """Raises ``KeyboardInterrupt`` in this thread once, at the first moment in some files that is not in ``met``."""

    def __init__(self, met: set[Any], files: tuple[str, ...]) -> None:
        self.where = ""  # it came: the name of a function
        self._met = met
        self._files = files
        self._reached: Counter[Any] = Counter()

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
        if self.where or event not in ("call", "c_return") or not frame.f_code.co_filename.endswith(self._files):
            return
        line = (frame.f_code.co_filename, frame.f_lineno, event)
        self._reached[line] += 1
        moment = (line, self._reached[line])
        if moment not in self._met:
            self._met.add(moment)
            self.where = frame.f_code.co_qualname
            raise KeyboardInterrupt


def interrupt_everywhere(run: Callable[[Interrupter], None], *files: str) -> list[str]:
    """Call ``run`` with one interrupter after the other until there are no more moments; the function of each.

    Where threads are about, some moments come in some runs only, so the end is where several in a row bring none.
    """
    places: list[str] = []
    met: set[Any] = set()
    late = 0
    for _ in range(100_000):
        interrupter = Interrupter(met, files)
        run(interrupter)
        places += [interrupter.where] if interrupter.where else []
        late = 0 if interrupter.where else late + 1
        if late == 5:
            return places
    raise AssertionError("the moments did not come to an end")
