"""Python does not look through all objects of a process while a step is captured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from millstream._torch.workarounds import is_off

_NEVER = 2**30


@contextlib.contextmanager
def no_full_collections() -> Iterator[None]:
    """Let Python look through young objects alone inside the ``with`` block, in the whole process.

    A trace makes so many that it would look through all once or twice, a second with large libraries imported. Nearly
    all of them stay until the graph is compiled.
    """
    before = gc.get_threshold()
    if is_off("shortcuts") or not before[2]:
        yield
        return
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        if gc.get_threshold()[2] == _NEVER:  # nobody else has set one
            gc.set_threshold(*gc.get_threshold()[:2], before[2])
