"""What functions behind ``functools.lru_cache`` have answered so far.

Their caches are in C, but Python's garbage collector sees into them, and lists what it sees in one order: of each entry
what was asked and the answer, the dict of all entries, the function, and what stands before names in what was asked.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from millstream.capture.lines import is_users

Entry = tuple[Any, Any]
"""A key of the cache, and the answer."""


def entries_of(cache: Any) -> tuple[Entry, ...] | None:
    """The entries of a cache, in no particular order; ``None`` where they are not where they should be."""
    parts = gc.get_referents(cache)
    dicts = [each for each in parts if type(each) is dict and each is not vars(cache)]
    if (kept := next(filter(_has_links, dicts), None)) is None:
        is_unlimited = functools._lru_cache_wrapper.cache_info(cache).maxsize is None
        return tuple(dicts[0].items()) if is_unlimited else None
    link = type(next(iter(kept.values())))
    ends = [at for at, each in enumerate(parts) if each is link][: len(kept)]
    entries = tuple((parts[at - 2], parts[at - 1]) for at in ends)
    return entries if {id(key) for key, _ in entries} == {*map(id, kept)} else None


def _has_links(kept: dict[Any, Any]) -> bool:
    """Return whether it is the dict of a cache of limited size, where an answer is in a link."""
    return bool(kept) and all(type(each).__name__ == "_lru_list_elem" for each in kept.values())


def content_of_cache(cache: Any) -> tuple[Any, ...]:
    """How often a cache had no answer so far, and its entries.

    Nothing where it is of Python's or PyTorch's, or nobody can say.
    """
    function = getattr(cache, "__wrapped__", None)
    function = getattr(function, "__func__", function)
    if not (type(function) is FunctionType and is_users(function.__code__.co_filename)):
        return ()
    entries = entries_of(cache)
    return () if entries is None else (functools._lru_cache_wrapper.cache_info(cache).misses, *entries)


def asked_of(cache: Any) -> Iterator[tuple[tuple[Any, Any], Any]]:
    """Yield what was asked of a cache and the answers: arguments by position, then names and values in turn.

    Nothing where nobody can say.
    """
    marks = {id(each) for each in gc.get_referents(cache) if type(each) is object}
    if len(marks) != 1:  # an answer is a plain object, too
        return
    for key, answer in entries_of(cache) or ():
        given = key if type(key) is tuple else (key,)
        at = next((number for number, each in enumerate(given) if id(each) in marks), len(given))
        yield (given[:at], given[at + 1 :]), answer
