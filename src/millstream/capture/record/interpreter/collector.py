"""What Python's garbage collector calls while a step is recorded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import cast

from millstream import _native

Callback = Callable[..., None]


@contextmanager
def around_collections(starts: Callback, stops: Callback, of_thread: int | None = None) -> Iterator[None]:
    """For the length of the context, have functions called around all else that the collector calls.

    Args:
        starts: Called before a collection.
        stops: Called after it.
        of_thread: Count the collections in this thread alone.
    """
    before, after = _of_phase("start", of_thread, starts), _of_phase("stop", of_thread, stops)
    gc.callbacks.append(after)
    gc.callbacks.insert(0, before)
    try:
        yield
    finally:
        gc.callbacks.remove(before)
        gc.callbacks.remove(after)


@contextmanager
def young_noted(ids: set[int]) -> Iterator[Callback]:
    """For the length of the context, add the ids of all objects of the youngest generation before a collection.

    Yields:
        What adds them now.
    """
    library = _native.load("core")
    note = (
        library.note_young(gc.get_objects, ids)
        if library is not None
        else lambda: ids.update(map(id, gc.get_objects(generation=0)))
    )
    starts = _of_phase("start", None, note)
    gc.callbacks.append(starts)
    try:
        yield note
    finally:
        gc.callbacks.remove(starts)


def _of_phase(phase: str, thread: int | None, function: Callback) -> Callback:
    """Return what the collector is to call. It gives other threads no turn unless ``function`` does."""
    if (library := _native.load("core")) is not None:
        return cast(Callback, library.of_phase(phase, thread, function))

    def call(now: str, _: dict[str, int]) -> None:
        if now == phase and thread in (None, get_ident()):
            function()

    return call
