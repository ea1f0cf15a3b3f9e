"""Room for the frames of Python's functions.

Python keeps frames in pieces of memory of 16 KiB. A loop whose calls begin in one and end in the next maps and unmaps
memory in each turn: a trace took ten times as long where the stack happened to be so deep. A function that asks for a
large frame gets a larger piece, and what it calls has the rest of that.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


_ENTRIES = 40_000  # of 8 bytes: the next power of two leaves 192 KiB to what is called

with_room = cast(
    Callable[..., Any], FunctionType(_call.__code__.replace(co_stacksize=_ENTRIES), globals(), "with_room")
)
"""Call a function with arguments by position."""
