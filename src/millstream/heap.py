"""Objects of this process by their type, found without disturbing other threads.

A list of all objects holds tuples that other threads are still filling, and Python's own code fails on a tuple that
somebody else holds meanwhile (``SystemError: bad argument to internal function``). So nothing but C code of Python's
runs from the moment that the list is made until it is gone: no other thread gets a turn.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any


def objects_of_types(kinds: Iterable[type]) -> list[Any]:
    """All objects whose type is one of ``kinds`` itself, as far as the collector knows them."""
    once, again, last = itertools.tee(map(gc.get_objects, (None,)), 3)
    flat = itertools.chain.from_iterable
    chosen = itertools.compress(flat(once), map(frozenset(kinds).__contains__, map(type, flat(again))))
    found = list(itertools.chain(chosen, map(list.clear, last)))  # the list has these iterators in it: a cycle
    found.pop()  # what ``clear`` gave
    return found


@contextlib.contextmanager
def frames_of_threads() -> Iterator[dict[int, FrameType]]:
    """Yield the innermost frame of each thread by its ident; theirs are found until the end of the context.

    Before Python 3.12 a collection may begin when a frame becomes an object, other threads get a turn meanwhile, and
    the frame that has ended by then is used nevertheless. So none begins within the context.
    """
    threshold = gc.get_threshold()[0] if sys.version_info < (3, 12) else 0
    if threshold:
        gc.set_threshold(0)
    try:
        yield sys._current_frames()
    finally:
        if threshold and not gc.get_threshold()[0]:  # nobody else has set one
            gc.set_threshold(threshold)


def instances(kinds: Iterable[type]) -> list[Any]:
    """All instances of ``kinds`` and of their subclasses, also those that ``gc.freeze()`` has hidden."""
    known: dict[type, None] = {}
    waiting = [*kinds]
    while waiting:
        kind = waiting.pop()
        if kind not in known:
            known[kind] = None
            waiting += type.__subclasses__(kind)
    if not gc.get_freeze_count():
        return objects_of_types(known)
    gc.unfreeze()
    try:
        return objects_of_types(known)
    finally:
        gc.freeze()
