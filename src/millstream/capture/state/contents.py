"""The contents of a container as a whole: compared in each call, and restored after tracing."""

from __future__ import annotations

import array
import gc
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor

from millstream.capture.record.location import MISSING, Attributes, Location
from millstream.capture.record.reads import BUFFERS
from millstream.capture.state.signature import are_same

MAX_COMPARED = 10_000
"""Of longer containers only the length is compared in each call: one object takes 20 ns."""

MAX_BYTES = 1 << 20
"""Likewise of arrays: a mebibyte takes a tenth of a millisecond. Of longer ones no copy is kept at all."""


def is_buffer(value: Any) -> bool:
    """Return whether it holds bytes that may change: an array of Python's, shared memory, a value of C's."""
    return isinstance(value, BUFFERS)


def is_bytes(value: Any) -> bool:
    """The same, or an array of NumPy's."""
    return isinstance(value, np.ndarray) or is_buffer(value)


def is_element(value: Any) -> bool:
    """Return whether it is an element of a tree of XML."""
    module = sys.modules.get("xml.etree.ElementTree")
    return module is not None and isinstance(value, module.Element)


def without_cache(cache: Any) -> Any:
    """The function that ``functools.lru_cache`` has wrapped, or that of the method."""
    return getattr(cache.__wrapped__, "__func__", cache.__wrapped__)


class Answers:
    """The answers so far of a function behind ``functools.lru_cache``; one cache has one object of this kind.

    The cache is in C, but the garbage collector sees into it.

    Args:
        cache: The function, as the decorator has made it.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        dicts = [each for each in gc.get_referents(cache) if type(each) is dict and each is not vars(cache)]
        dicts.sort(key=lambda each: not any(map(_is_link, each.values())))  # an answer may be a dict, too
        self._kept: dict[Any, Any] = dicts[0]

    def __iter__(self) -> Iterator[Any]:
        """The answers, and maybe what was asked; no tensors: one that the step uses shows up while it is traced."""
        kept = [*self._kept.values()]
        if any(map(_is_link, kept)):
            own = (*kept, self._kept, vars(self._cache), self._cache.__wrapped__)
            kept = [each for each in gc.get_referents(self._cache) if not any(each is part for part in own)]
        return (each for each in kept if not isinstance(each, type | Tensor))

    def __len__(self) -> int:
        return len(self._kept)

    def items(self) -> tuple[list[Any], list[Any]]:
        """Return what it was asked, and where the answers are."""
        return [*self._kept], [*self._kept.values()]

    def has(self, asked: list[Any], answers: list[Any]) -> bool:
        """Return whether it still gives these answers.

        What had to make room for another was not forgotten by the user.
        """
        if all(map(is_, map(self._kept.get, asked), answers)):
            return True
        info = self._cache.cache_info()
        is_known = [self._kept.get(key, kept) is kept for key, kept in zip(asked, answers, strict=True)]
        return info.currsize == info.maxsize and all(is_known)


def _is_link(kept: Any) -> bool:
    """Return whether a cache of limited size keeps it, with an answer in it."""
    return type(kept).__name__ == "_lru_list_elem"


def is_container(value: Any) -> bool:
    """Return whether it is of a kind that all of this is for."""
    return isinstance(value, (list, dict, set, deque, Attributes, Answers)) or is_bytes(value) or is_element(value)


def size_of(container: Any) -> int:
    """Return how many items a container has, or how many bytes."""
    if is_element(container):
        return sum(1 for _ in container.iter())
    if isinstance(container, np.ndarray):
        return int(container.nbytes)
    return memoryview(container).nbytes if is_buffer(container) else len(container)


def is_comparable(container: Any) -> bool:
    """Return whether it is small enough to be compared in each call."""
    return size_of(container) <= (MAX_BYTES if is_bytes(container) else MAX_COMPARED)


def content_of(container: Any) -> Any:
    """Return what it holds now; of a set, in the order in which it is gone through."""
    if isinstance(container, np.ndarray):
        return np.ndarray.copy(container), np.ndarray.tobytes(container)  # and not a subclass's own
    if is_buffer(container):
        return memoryview(container).tobytes()
    if is_element(container):
        return [(each, each.tag, each.text, each.tail, {**each.attrib}, [*each]) for each in container.iter()]
    if isinstance(container, Answers):
        return container.items()
    return dict(container) if isinstance(container, dict | Attributes) else [*container]


def has_content(container: Any, content: Any) -> bool:
    """Return whether it holds the same objects, in the same order, or the same bytes."""
    try:
        if isinstance(container, dict | Attributes):
            return are_same(container, content) and are_same(container.values(), content.values())
        if isinstance(container, list | set | deque):
            return are_same(container, content)
    except RuntimeError:  # another thread changes it
        return False
    if isinstance(container, Answers):
        return container.has(*content)
    if isinstance(container, np.ndarray):
        copy, content = content
        is_alike = container.dtype == copy.dtype and container.shape == copy.shape
        return is_alike and np.ndarray.tobytes(container) == content
    return bool(content_of(container) == content)


def put_back(container: Any, content: Any, left: Collection[Any] = ()) -> None:
    """Let it hold what it held, if that is another now, but for the keys or indices in ``left``."""
    if has_content(container, content):
        return
    if isinstance(container, dict | Attributes):
        put_items_back(container, content, [key for key in (*content, *container) if key not in left])
    elif isinstance(container, list) and len(container) == len(content):
        put_items_back(container, content, [index for index in range(len(content)) if index not in left])
    elif isinstance(container, np.ndarray):
        if container.flags.writeable:
            container[...] = content[0]
    elif is_buffer(container):
        _fill(container, content)
    elif is_element(container):
        for each, each.tag, each.text, each.tail, attributes, children in content:
            each.attrib.clear()
            each.attrib.update(attributes)
            each[:] = children
    elif not isinstance(container, Answers):
        container.clear()
        container.update(content) if isinstance(container, set) else container.extend(content)


def put_items_back(holder: Any, content: Any, keys: Iterable[Any]) -> None:
    """Let it hold what it held at these keys or indices, one by one: another thread may be reading the others."""
    if isinstance(holder, list):
        for index in (index for index in keys if holder[index] is not content[index]):
            holder[index] = content[index]
        return
    for key in keys:
        if holder.get(key, MISSING) is not (before := content.get(key, MISSING)):
            Location(holder, key).set(before)
    is_whole = len(holder) == len(content) and all(holder.get(key, MISSING) is held for key, held in content.items())
    if is_whole and isinstance(holder, dict) and not all(map(is_, holder, content)):  # in another order
        holder.clear()
        holder.update(content)


def _fill(buffer: Any, content: bytes) -> None:
    view = memoryview(buffer)
    if view.readonly:
        return
    if view.nbytes == len(content):
        view.cast("B")[:] = content
    else:
        view.release()  # an array that is exported has a fixed length
        del buffer[:]
        buffer.frombytes(content) if isinstance(buffer, array.array) else buffer.extend(content)
