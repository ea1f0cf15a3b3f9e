"""How often the code that runs changes file: what it takes to follow one batch, or one step.

A change is counted where a function of the library calls one in another file, and where it continues there after that
and calls again: so the way back through files that only return is not counted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_LIBRARY = str(Path(__file__).parents[1] / "src" / "millstream")


class FileChanges:
    """Counts in all threads that begin after it was made, and in this one, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self._ways: dict[int, list[str]] = {}  # by thread
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.is_on or event != "call":
            return
        way = self._ways.setdefault(threading.get_ident(), [])
        for each in (frame.f_back, frame):
            file = "" if each is None else each.f_code.co_filename
            if file.startswith(_LIBRARY) and (not way or way[-1] != file):
                way.append(file)

    @property
    def ways(self) -> list[list[str]]:
        """The files of each thread in order, relative to the library."""
        return [[file.removeprefix(f"{_LIBRARY}/") for file in way] for way in self._ways.values()]

    def count(self, run: Callable[[], object]) -> int:
        """Changes of file while ``run`` runs, in all threads together."""
        self._ways.clear()
        self.is_on = True
        try:
            run()
        finally:
            self.is_on = False
        return sum(map(len, self._ways.values()))

    def close(self) -> None:
        """Count no more."""
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)
