"""Sets that are put together at once, and sets of origins that are one where they are equal.

Private APIs of Inductor's graphs and loops; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch._inductor import graph, ir
from torch._inductor.dependencies import MemoryDep, ReadWrites
from torch._inductor.ir import IRNode
from torch.utils._ordered_set import OrderedSet

from millstream._torch.workarounds import replaced
from millstream.lower.inductor.shortcuts.leaves import LEAVES, leaves


@contextlib.contextmanager
def quick_sets() -> Iterator[None]:
    """Let ordered sets do in one what they do item by item, in the same order."""
    unite, intersect = OrderedSet.__or__, OrderedSet.__and__

    def unite_at_once(self: Any, other: Any) -> Any:
        if type(other) is not OrderedSet:
            return unite(self, other)
        united = self._dict.copy()  # which is quicker than ``{**self._dict}``
        united.update(other._dict)
        return OrderedSet._from_dict(united)

    def intersect_at_once(self: Any, other: Any) -> Any:
        if type(other) is not OrderedSet:
            return intersect(self, other)
        few, many = (self, other) if len(self) < len(other) else (other, self)
        return OrderedSet._from_dict({item: None for item in few._dict if item in many._dict})

    subtract = OrderedSet.__sub__

    def subtract_at_once(self: Any, other: Any) -> Any:
        if type(other) is not OrderedSet:
            return subtract(self, other)
        lost = other._dict
        if len(lost) >= len(self):
            return OrderedSet._from_dict({item: None for item in self._dict if item not in lost})
        left = self._dict.copy()  # which hashes none again
        for item in lost:
            left.pop(item, None)
        return OrderedSet._from_dict(left)

    with (
        _quick_dependencies(),
        replaced(OrderedSet, "__or__", unite_at_once),
        replaced(OrderedSet, "__and__", intersect_at_once),
        replaced(OrderedSet, "__sub__", subtract_at_once),
    ):
        yield


@contextlib.contextmanager
def _quick_dependencies() -> Iterator[None]:
    """Let what is read or written be hashed once, and names of all that a node reads or writes be found once."""
    names_anew = ReadWrites.buffer_names

    def names_once(self: Any, ignore_integer_index: bool = True) -> Any:
        key = len(self.reads), len(self.writes), ignore_integer_index
        known = self.__dict__.get("_names")
        if known is None or known[0] != key:
            known = self.__dict__["_names"] = key, names_anew(self, ignore_integer_index)
        return known[1].copy()

    hash_anew = MemoryDep.__hash__

    def hash_once(self: MemoryDep) -> int:
        known = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = hash_anew(self)  # of this process, which no other one is given
        return known  # type: ignore[no-any-return]

    with replaced(ReadWrites, "buffer_names", names_once), replaced(MemoryDep, "__hash__", hash_once):
        yield


@contextlib.contextmanager
def shared_origins() -> Iterator[None]:
    """Let what one node of the graph makes have one set of origins, which nothing changes."""
    begin = IRNode.__post_init__
    current: Any = None  # of whom the set has been copied last
    copied: Any = None

    def begin_with_shared(self: IRNode) -> None:
        nonlocal current, copied
        begin(self)
        if IRNode._current_origins is not current:
            current, copied = IRNode._current_origins, self.origins
        self._post_init_setattr("origins", copied)

    with (
        replaced(IRNode, "__post_init__", begin_with_shared),
        replaced(graph, "gather_origins", _gather_origins),
    ):
        yield


_BOXES = frozenset({ir.TensorBox, ir.StorageBox})
_REALIZED = (ir.ComputedBuffer, ir.InputsKernel, ir.InputBuffer, ir.TemplateBuffer)


def _gather_origins(args: Any, kwargs: Any) -> Any:
    """Return the nodes that unrealized arguments come from, as Inductor's function of this name does."""
    found: dict[Any, None] = {}
    known: set[int] = set()  # sets that are in it

    def gather(values: Iterable[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind in LEAVES:
                continue
            inner = value
            while type(inner) in _BOXES:
                inner = inner.data
            if kind in _BOXES or isinstance(value, IRNode):
                if _is_unrealized(type(inner)):
                    origins = value.origins
                    if id(origins) not in known:
                        known.add(id(origins))
                        found.update(origins._dict if type(origins) is OrderedSet else dict.fromkeys(origins))
            elif kind is list or kind is tuple:
                gather(value)
            else:
                gather(each for each in leaves(value) if each is not value)

    gather((args, kwargs))
    return OrderedSet._from_dict(found)


@functools.cache
def _is_unrealized(kind: type) -> bool:
    """Return whether what is of this class has no memory of its own."""
    return issubclass(kind, IRNode) and not issubclass(kind, _REALIZED)
