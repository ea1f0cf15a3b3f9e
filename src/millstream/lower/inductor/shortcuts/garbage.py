"""Python does not look for garbage while a graph is lowered."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

from millstream._torch.workarounds import is_off

_postponed: list[int] = []
"""The thresholds to be set again at the end of ``no_collections``."""


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Let Python not look for garbage inside the ``with`` block, in the whole process.

    Lowering makes millions of objects, nearly all of which stay until its end, and every so often Python looks through
    all of them: a twentieth of the time (a training step of a GPT-2 with two layers), for as much of the memory.

    A threshold of zero does that, too, and leaves ``gc.disable()`` to the user. Processes forked meanwhile look again.
    """
    if is_off("shortcuts") or not (threshold := gc.get_threshold()[0]):
        yield
        return
    _postponed.append(threshold)
    gc.set_threshold(0)
    try:
        yield
    finally:
        _collect_again()


def collect_meanwhile() -> None:
    """Look for garbage at once where that is postponed, as while others compile: afterwards it would be waited for.

    What the trace and the graph have left is most of it, and what is found alive now is not looked through again soon.
    """
    if _postponed and gc.isenabled():
        gc.collect()


def _collect_again() -> None:
    if _postponed:
        threshold = _postponed.pop()
        if not gc.get_threshold()[0]:  # nobody else has set one
            gc.set_threshold(threshold)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collect_again)
