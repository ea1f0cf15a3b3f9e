"""The objects that a step has read, by the ways that lead to them: so that another process finds its own.

An object's *way* begins at the step's function, at an object among its arguments, at state, or at a module that was
imported; each further part of it is what was read of the object before, or what belongs to it for good, such as the
class of an object. What cannot change as long as an object is the same one, and so is never compared within a process,
is part of its *description*: the code of a function, the shape of a tensor.

**Contract**
- Two objects of one process have two ways; where two ways lead to one object, it is not the same step.
- What has neither a way nor a value that can be compared is refused, never left out.
"""

from __future__ import annotations

import ast
import functools
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from types import (
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from millstream.capture.guards.breaks import original_of
from millstream.capture.kept.descriptions import NAMED, TraceNotKept, describe, digest_of, is_plain
from millstream.capture.record.answers import asked_of
from millstream.capture.record.fleeting import of_native, of_order
from millstream.capture.record.location import MISSING as NOTHING
from millstream.capture.record.paths import is_namespace
from millstream.capture.record.reads import (
    MISSING,
    Kind,
    Read,
    behind,
    find_in_class,
    is_a,
    own_dict,
    read_slot,
)

Step: TypeAlias = tuple[Any, ...]
"""From one object to the next: what of it, and which, as a reference."""
Ref: TypeAlias = tuple[Any, ...]
"""What a value is: an object of the table by its number, or a plain value."""

ROOT, ARGUMENT, STATE, MODULE, CLASS, PART = "function", "argument", "state", "module", "class", "part"
MODULES, VARIABLES = "all modules", "variables of a module"


@dataclass
class Start:
    """The beginning of a way."""

    function: Any
    objects: Sequence[Any]  # among the arguments
    state: Sequence[Tensor]

    def roots(self) -> Iterator[tuple[Step, Any]]:
        """The objects, and how they are called."""
        yield (ROOT,), self.function
        yield from (((ARGUMENT, index), each) for index, each in enumerate(self.objects))

    def find(self, way: Step) -> Any:
        """Return what a way that is no part of another begins at.

        Raises:
            NotKept: There is no such thing here.
        """
        kind, *rest = way
        try:
            if kind == ROOT:
                return self.function
            if kind == MODULE:
                return sys.modules[rest[0]]
            if kind == CLASS:
                return _class_named(*rest)
            if kind == MODULES:
                return sys.modules
            if kind == VARIABLES:
                return vars(sys.modules[rest[0]])
            return (self.objects if kind == ARGUMENT else self.state)[rest[0]]
        except (LookupError, AttributeError) as error:
            raise TraceNotKept(f"there is no {kind} {rest}") from error


def _class_named(module: str, name: str) -> Any:
    return functools.reduce(lambda held, part: vars(held)[part], name.split("."), sys.modules[module])


def _original_of(value: Any) -> Any:
    """Return what is there when nothing of ours stands for it; other objects are asked nothing."""
    return original_of(value) if type(value) in (FunctionType, MethodType) else value


class _Table:
    """Says of values what they are, by the numbers of objects."""

    def number_of(self, value: Any) -> int:
        """The number of an object."""
        raise NotImplementedError

    def ref(self, value: Any) -> Ref:
        """Return what a value is.

        Raises:
            NotKept: Nobody can say.
        """
        value = _original_of(value)
        kind = type(value)
        if value is MISSING or value is NOTHING:
            return ("missing",)
        if is_plain(value):
            return "=", f"{kind.__module__}.{kind.__qualname__}", repr(value)  # with the sign of a zero, and a NaN
        if kind is MethodType:
            return "method", self.ref(value.__self__), self.ref(value.__func__)
        if is_a(value, tuple):
            return "tuple", self.ref(kind), tuple(map(self.ref, tuple.__iter__(value)))
        if kind is frozenset:
            return "frozenset", self.all_of(value, value)
        if kind is slice:
            return "slice", *map(self.ref, (value.start, value.stop, value.step))
        if kind is CodeType:
            return "code", digest_of(value)
        if is_a(value, np.ufunc) and getattr(np, value.__name__, None) is value:
            return "named", f"numpy.{value.__name__}"
        if is_a(value, NAMED):
            owner = getattr(value, "__self__", None)
            is_free = owner is None or is_a(owner, ModuleType | type) or type(owner).__module__ == "pybind11_builtins"
            place = getattr(owner, "__name__", "") or getattr(value, "__objclass__", kind).__qualname__
            name = f"{getattr(value, '__module__', None)}.{place}.{value.__name__}"
            if reason := of_native(value):
                raise TraceNotKept(f"it reads {reason}")
            return "named", name, None if is_free else self.ref(owner)
        return "object", self.number_of(value)

    def all_of(self, holder: Any, items: Iterable[Any]) -> tuple[Ref, ...]:
        """Return what the items of a container are.

        Without their order where another process would have another one.
        """
        found = tuple(map(self.ref, items))
        return tuple(sorted(found, key=repr)) if is_a(holder, set | frozenset) and of_order(holder) else found


class WayWriter(_Table):
    """Numbers the objects that a trace has to do with.

    Args:
        start: Where ways begin.
        reads: What the step has read.

    Attributes:
        entries: Way and description of each object.
    """

    def __init__(self, start: Start, reads: Sequence[Read]) -> None:
        self.entries: list[tuple[Step, Any]] = []
        self._number: dict[int, int] = {}  # by id
        self._ways: dict[int, tuple[Any, Step]] = {}  # by id: the object before, and what of it
        self._found: list[Any] = []  # in the order of their ways; held, so that ids stay unique
        self._asked = {
            id(each.holder) for each in reads if is_a(each.holder, _CACHE) and each.kind is Kind.CONTENTS and each.value
        }
        by_holder: dict[int, list[Read]] = {}
        for read in reads:
            by_holder.setdefault(id(read.holder), []).append(read)
        for way, value in start.roots():
            self._add(value, None, way)
        for read in reads:
            for each in (read.holder, read.owner):
                if (way := _way_by_name(each)) is not None:
                    self._add(each, None, way)
        done = 0
        for more in ((), start.state):  # state by its number only where no way leads there
            for index, value in enumerate(more):
                self._add(value, None, (STATE, index))
            while done < len(self._found):
                value = self._found[done]
                done += 1
                for step, part in _parts(value, by_holder.get(id(value), ())):
                    self._add(part, value, step)

    def _add(self, value: Any, before: Any, way: Step) -> None:
        value = _original_of(value)
        if not (id(value) in self._ways or is_plain(value) or value is MISSING):
            self._ways[id(value)] = before, way
            self._found.append(value)

    def number_of(self, value: Any) -> int:
        """The number of an object.

        Raises:
            NotKept: No way leads to it, or it cannot be described.
        """
        if (known := self._number.get(id(value))) is not None:
            return known
        before, way = None, _way_by_name(value)
        if way is None:
            if id(value) not in self._ways:
                raise TraceNotKept(f"no way leads to {_told(value)}")
            before, way = self._ways[id(value)]
        if before is not None:
            what, *which = way
            way = PART, self.number_of(before), what, *(map(self.ref, which) if what in _KEYED else which)
            if (known := self._number.get(id(value))) is not None:  # as it is part of how that one is described
                return known
        if is_a(value, _CACHE) and id(value) not in self._asked:  # C may ask it, and nobody sees that
            raise TraceNotKept("it reads a cache that it does not ask by itself")
        self._found.append(value)
        self._number[id(value)] = number = len(self.entries)
        self.entries.append((way, None))
        try:
            self.entries[number] = way, describe(value, self.ref)  # which may lead back to it
        except TraceNotKept:
            del self.entries[number:]
            self._number = {each: other for each, other in self._number.items() if other < number}
            raise
        return number

    def knows(self, value: Any) -> bool:
        """Return whether a way leads to an object."""
        return id(value) in self._number or id(value) in self._ways or _way_by_name(value) is not None

    def known(self) -> Iterable[Any]:
        """The objects to which ways lead."""
        return self._found


class Reader(_Table):
    """Finds the objects of a table in this process.

    Args:
        start: Where ways begin.
        entries: Of the table.

    Attributes:
        objects: By their numbers.

    Raises:
        NotKept: They are not what they were.
    """

    def __init__(self, start: Start, entries: Sequence[tuple[Step, Any]]) -> None:
        self.objects: list[Any] = []
        self._number: dict[int, int] = {}
        for way, _ in entries:
            value = _original_of(self._find(start, way))
            number = self._number.setdefault(id(value), len(self.objects))
            if number != len(self.objects) and not is_a(value, tuple):
                raise TraceNotKept(f"{_told(value)} is at two places")
            self.objects.append(value)
        for value, (_, description) in zip(self.objects, entries, strict=True):
            if describe(value, self.ref) != description:
                raise TraceNotKept(f"{_told(value)} is another than it was")

    def _find(self, start: Start, way: Step) -> Any:
        if way[0] != PART:
            return start.find(way)
        _, number, what, *which = way
        holder = self.objects[number]
        if what == "answer":
            return self._find_answer(holder, *which)
        try:
            found = _FIND[what](holder, *(map(self.value_of, which) if what in _KEYED else which))
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise TraceNotKept(f"{_told(holder)} has no {what} {which}") from error
        if found is MISSING:
            raise TraceNotKept(f"{_told(holder)} has no {what} {which}")
        return found

    def _find_answer(self, cache: Any, told: Ref) -> Any:
        for asked, answer in asked_of(cache):
            with suppress(TraceNotKept):  # of others, which need not be told
                if self.ref(asked) == told:
                    return answer
        raise TraceNotKept(f"the cache of {cache.__name__} has no answer for {told}")

    def number_of(self, value: Any) -> int:
        """The number of an object; -1 where it is another than those of the table."""
        return self._number.get(id(value), -1)

    def value_of(self, ref: Ref) -> Any:
        """Return what a reference stands for, where that is an object or the key of something."""
        kind, *rest = ref
        if kind == "object" and rest[0] >= 0:
            return self.objects[rest[0]]
        if kind == "tuple" and self.value_of(rest[0]) is tuple:
            return tuple(map(self.value_of, rest[1]))
        if kind == "=" and rest[0] == "torch.dtype":
            return getattr(torch, rest[1].removeprefix("torch."))
        if kind == "=" and rest[0] in _KEYS:
            return ast.literal_eval(rest[1])
        raise TraceNotKept(f"a key is {ref}")


_CACHE = functools._lru_cache_wrapper
_KEYS = ("builtins.str", "builtins.int", "builtins.bool", "builtins.bytes", "builtins.NoneType")
"""Classes of plain keys."""
_KEYED = frozenset({"item", "slot", "attribute", "answer"})
"""What of an object is found by a key."""


def _way_by_name(value: Any) -> Step | None:
    """Return how a module, or a class, is found wherever it is named; ``None`` of other objects."""
    if is_a(value, ModuleType):
        return (MODULE, value.__name__) if sys.modules.get(value.__name__) is value else None
    if is_a(value, type):
        try:
            is_found = _class_named(value.__module__, value.__qualname__) is value
        except (LookupError, AttributeError, TypeError):
            return None
        return (CLASS, value.__module__, value.__qualname__) if is_found else None
    if value is sys.modules:
        return (MODULES,)
    if is_namespace(value):
        module = sys.modules.get(value["__name__"])
        return (VARIABLES, value["__name__"]) if module is not None and vars(module) is value else None
    return None


def _parts(value: Any, reads: Iterable[Read]) -> Iterator[tuple[Step, Any]]:
    """Yield what belongs to an object for good, and what was read of it."""
    kind = type(value)
    for what, find in _OF_KIND.items():
        if is_a(value, what):
            for name in find:
                with suppress(AttributeError, ValueError, TypeError, LookupError):
                    yield (name,), _FIND[name](value)
    if is_a(value, FunctionType):
        yield from ((("cell", number), cell) for number, cell in enumerate(value.__closure__ or ()))
        yield from ((("keyword default", name), part) for name, part in (value.__kwdefaults__ or {}).items())
    if is_a(value, type):
        yield from ((("base", number), base) for number, base in enumerate(value.__mro__))
    if is_a(value, tuple):
        yield from ((("nth", number), part) for number, part in enumerate(tuple.__iter__(value)))
    if own_dict(value) is not None:
        yield ("dict",), own_dict(value)
    yield ("type",), kind
    for read in reads:
        if read.kind is Kind.CONTENTS:
            yield from _items_of(read.holder)
        elif read.kind in _BY_KEY:
            yield (_BY_KEY[read.kind], read.key), read.now()


def _items_of(value: Any) -> Iterator[tuple[Step, Any]]:
    if is_a(value, _CACHE):
        yield from ((("answer", asked), answer) for asked, answer in asked_of(value))
    elif is_a(value, dict):
        for number, (key, item) in enumerate(dict.items(value)):
            yield ("nth key", number), key
            yield ("nth item", number), item
    elif is_a(value, list | deque):
        yield from ((("nth", number), item) for number, item in enumerate(value))


_BY_KEY = {Kind.ITEM: "item", Kind.SLOT: "slot", Kind.CLASS: "attribute"}
_OF_KIND: dict[Any, tuple[str, ...]] = {
    FunctionType: ("globals", "defaults", "kwdefaults"),
    CellType: ("content",),
    MethodType: ("self", "function"),
    (staticmethod, classmethod): ("function",),
    functools.partial: ("partial", "args", "keywords"),
    property: ("getter", "setter"),
    functools.cached_property: ("partial",),
    functools._lru_cache_wrapper: ("wrapped",),
    ContextVar: ("content of context",),
    MappingProxyType: ("behind",),
    weakref.ref: ("referent",),
    defaultdict: ("factory",),
}
"""What belongs to objects of a class for good."""
_FIND: dict[str, Callable[..., Any]] = {
    "type": type,
    "dict": own_dict,
    "base": lambda kind, number: kind.__mro__[number],
    "nth": lambda items, number: type(items).__getitem__(items, number),
    "nth key": lambda items, number: next(islice(dict.keys(items), number, None)),
    "nth item": lambda items, number: next(islice(dict.values(items), number, None)),
    "item": lambda items, key: dict.__getitem__(items, key) if is_a(items, dict) else list.__getitem__(items, key),
    "slot": lambda value, key: read_slot(find_in_class(type(value), key)[1], value),
    "attribute": lambda kind, key: vars(kind)[key],
    "globals": lambda function: function.__globals__,
    "defaults": lambda function: function.__defaults__,
    "kwdefaults": lambda function: function.__kwdefaults__,
    "keyword default": lambda function, name: function.__kwdefaults__[name],
    "cell": lambda function, number: function.__closure__[number],
    "content": lambda cell: cell.cell_contents,
    "content of context": lambda variable: variable.get(),
    "self": lambda method: method.__self__,
    "function": lambda method: method.__func__,
    "partial": lambda value: value.func,
    "args": lambda value: value.args,
    "keywords": lambda value: value.keywords,
    "getter": lambda value: value.fget,
    "setter": lambda value: value.fset,
    "wrapped": lambda value: value.__wrapped__,
    "behind": behind,
    "factory": lambda items: items.default_factory,
    "referent": lambda reference: reference(),
}
"""How each part of an object is found."""


def _told(value: Any) -> str:
    """An object for people."""
    name = getattr(value, "__qualname__", "") if is_a(value, FunctionType | type) else ""
    return name or f"a {type(value).__module__}.{type(value).__qualname__}"
