"""Records of what was read and written, and how Python finds an attribute, without running any code of the user's."""

from __future__ import annotations

import builtins
import ctypes
import gc
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from types import (
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np

from millstream.capture.record.location import slots_of

IS_HEAP_TYPE = 1 << 9  # of a class's flags: made by a class statement, or by a module in C that could be one
MISSING: Any = object()
"""Stands for what was not there."""


class Kind(Enum):
    """The part of a holder that was read or written."""

    ITEM = "an item"  # of a dict or list, by its key; attributes are items of their object's dict
    SLOT = "a slot"  # of an object, by its name
    CLASS = "an attribute of a class"  # as it stands there, by its name
    CELL = "a variable of a closure"
    CONTEXT = "a context variable"  # what it gives here, under the key ``value``
    LENGTH = "the length"
    CONTENTS = "all that it holds"  # keys and items, in their order
    TYPE = "the class of an object"
    CODE = "code and defaults of a function"
    TENSOR = "an attribute of a tensor"  # by its name; the value is not kept

    __hash__ = object.__hash__  # in C, as each read is looked up by it


@dataclass(slots=True, eq=False)
class Read:
    """Something that was read; nobody changes it, but objects that cannot be changed take thrice as long to make.

    Attributes:
        holder: The dict, list, cell, object, class or function.
        kind: What of it.
        key: Which item.
        value: What was there, or ``MISSING``.
        owner: The object whose dict the holder is, or the holder.
        code: What has read it.
        unit: Where in the code, in units of two bytes.
    """

    holder: Any
    kind: Kind
    key: Any
    value: Any
    owner: Any
    code: CodeType
    unit: int

    @property
    def line(self) -> int:
        """The line of the code's file."""
        positions = enumerate(self.code.co_positions())
        return next((line for unit, (line, *_) in positions if unit == self.unit and line), self.code.co_firstlineno)

    def __str__(self) -> str:
        key = "" if self.key is None else f" {self.key!r}" if is_a(self.key, str | int) else " by an object"
        kind = self.owner.__name__ if is_a(self.owner, type | ModuleType) else type(self.owner).__qualname__
        where = f"{self.code.co_filename}:{self.line}, in {self.code.co_qualname}"
        return f"{self.kind.value}{key} of {kind} ({where})"

    def held(self) -> tuple[Any, ...]:
        """The objects that were there."""
        return self.value if self.kind is Kind.CONTENTS else (self.value,)

    def now(self) -> Any:
        """Return what is there now."""
        holder, kind, key = self.holder, self.kind, self.key
        if kind is Kind.CELL:
            return content_of_cell(holder)
        if kind is Kind.CONTENTS:
            return next((found[3] for found in find_contents(holder)), self.value)
        if kind is Kind.CONTEXT:
            return next(find_in_context(holder))[3]
        if kind is Kind.CLASS:
            return _space_of(holder).get(key, MISSING)
        if kind is Kind.SLOT:
            return read_slot(find_in_class(type(holder), key)[1], holder)
        if is_a(holder, dict):
            return dict.get(holder, key, MISSING)
        return list.__getitem__(holder, key) if is_a(holder, list) and key < list.__len__(holder) else MISSING


@dataclass(slots=True, eq=False)
class Write(Read):
    """Something that was written: ``value`` is what was there before."""


def content_of_cell(cell: Any) -> Any:
    """Return what a variable of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


Found = tuple[Any, Kind, Any, Any, Any]
"""Holder, kind, key, value and owner of what is read."""

CONTAINERS = (list, tuple, dict, set, frozenset, deque, MappingProxyType, OrderedDict)
VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
BUFFERS = (array, bytearray, memoryview, ctypes.Array, ctypes.Structure, ctypes._SimpleCData)
"""Classes of objects that hold bytes which may change; arrays of NumPy's apart."""
WHOLE = (*BUFFERS, np.ndarray, Element)
"""Classes in C of whose objects anything that is read counts as all."""
SHOWING = (*VIEWS, MappingProxyType)
"""What shows a dict that it does not let out."""
PLAIN_ATTRIBUTES = (SimpleNamespace,)
"""Classes in C whose objects' attributes methods in C read."""
_OPENED = (*CONTAINERS, *VIEWS, *PLAIN_ATTRIBUTES, *WHOLE)


def is_a(value: Any, kinds: Any) -> bool:
    """``isinstance`` that does not ask the value, which might answer by code of the user's."""
    return issubclass(type(value), kinds)


_mro_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_space_of: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__


def own_dict(value: Any) -> dict[str, Any] | None:
    """The dict with an object's attributes."""
    if is_a(value, type):
        return None
    kind: Any = threading.local if is_a(value, threading.local) else object  # which has another in each thread
    try:
        held = kind.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return held if is_a(held, dict) else None


def find_global(frame: FrameType, name: str) -> Iterator[Found]:
    """A variable of a module, or what Python has by that name."""
    space = frame.f_globals
    value = space.get(name, MISSING)
    yield space, Kind.ITEM, name, value, space
    if value is MISSING and (held := vars(builtins)) is frame.f_builtins:
        yield held, Kind.ITEM, name, held.get(name, MISSING), builtins


def find_in_class(kind: type, name: str) -> tuple[list[Found], Any]:
    """Look a name up in a class and its bases: what is read on the way, and what is found."""
    found: list[Found] = []
    for base in _mro_of(kind):
        value = _space_of(base).get(name, MISSING)
        found.append((base, Kind.CLASS, name, value, base))
        if value is not MISSING:
            return found, value
    return found, MISSING


LookUp = Callable[[type, str], tuple[list[Found], Any]]


def find_attribute(value: Any, name: str, look_up: LookUp = find_in_class) -> Iterator[Found]:
    """Yield what Python reads to find an attribute of an object, a class or a module.

    Args:
        value: It.
        name: The attribute's.
        look_up: Gives what is read of a class, and what is found there.
    """
    kind = type(value)
    yield value, Kind.TYPE, None, kind, value
    if issubclass(kind, WHOLE):  # any may be about what it holds
        yield value, Kind.CONTENTS, None, (), value
    if issubclass(kind, ModuleType):
        space = own_dict(value) or {}
        yield space, Kind.ITEM, name, space.get(name, MISSING), value
        return
    of_class, raw = look_up(kind, name)
    is_data = raw is not MISSING and hasattr(type(raw), "__set__")
    yield from of_class
    if is_a(value, type):
        yield from look_up(value, name)[0]
        if is_data and name in _OF_CLASSES:
            yield value, Kind.SLOT, name, read_slot(raw, value), value
    elif name == "cell_contents" and is_a(value, CellType):
        yield value, Kind.CELL, None, content_of_cell(value), name
    elif name != "__dict__" and (type(raw) is MemberDescriptorType or is_a(value, _HELD_IN_C.get(name, ()))):
        yield value, Kind.SLOT, name, read_slot(raw, value), value
    elif not is_data:
        held = own_dict(value)
        own = MISSING if held is None else dict.get(held, name, MISSING)
        if held is not None:
            yield held, Kind.ITEM, name, own, value
        if raw is MISSING and own is MISSING:
            yield from look_up(kind, "__getattr__")[0]


_HELD_IN_C: dict[str, type] = {
    **dict.fromkeys("__code__ __name__ __qualname__ __annotations__ __defaults__ __kwdefaults__".split(), FunctionType),
    "args": BaseException,
}
"""Attributes, by name, that objects of a class in C keep though they are no slots: asked again, the same object."""
_OF_CLASSES = ("__name__", "__qualname__")
"""Likewise, of classes."""


def find_own(value: Any) -> Iterator[Found]:
    """All attributes of an object itself, as it is the one that was there before: its dict may be made only now."""
    if (held := own_dict(value)) is not None:
        yield held, Kind.CONTENTS, None, (*dict.keys(held), *dict.values(held)), value
    for name, slot in slots_of(type(value)).items() if not is_a(value, type) else ():
        yield value, Kind.SLOT, name, read_slot(slot, value), value


def read_slot(slot: Any, value: Any) -> Any:
    """Return what an object has in a slot."""
    try:
        return slot.__get__(value)
    except AttributeError:
        return MISSING


def find_item(value: Any, key: Any) -> Iterator[Found]:
    """Yield what Python reads to find an item of a container."""
    kind = type(value)
    value = behind(value)
    if is_a(value, dict):
        try:
            yield value, Kind.ITEM, key, dict.get(value, key, MISSING), value
        except Exception:  # noqa: BLE001  no key, or code of the user's for keys: it runs, and is recorded by itself
            yield from find_contents(value)
    elif is_a(value, list) and type(key) is int:
        size = list.__len__(value)
        inside = -size <= key < size
        yield value, Kind.ITEM, key + size * (key < 0), list.__getitem__(value, key) if inside else MISSING, value
        if key < 0 or not inside:
            yield value, Kind.LENGTH, None, size, value
    elif is_a(value, (*CONTAINERS, *WHOLE)) and not is_a(value, tuple):
        yield from find_contents(value)
    elif not is_a(value, tuple):
        yield from find_in_class(kind, "__getitem__")[0]


def behind(view: Any) -> Any:
    """The dict that a view shows; what is no view is given back."""
    if not is_a(view, SHOWING):
        return view
    return next((each for each in gc.get_referents(view) if is_a(each, dict)), view)


def find_in_context(variable: ContextVar[Any]) -> Iterator[Found]:
    """Yield what is read of a context variable."""
    try:
        value = variable.get()
    except LookupError:
        value = MISSING
    yield variable, Kind.CONTEXT, "value", value, variable


def find_length(value: Any) -> Iterator[Found]:
    """Yield what ``len`` reads, and what asks whether something is empty."""
    value = behind(value)
    if is_a(value, CONTAINERS):
        if not is_a(value, tuple | frozenset):
            yield value, Kind.LENGTH, None, len_of(value), value
    elif is_a(value, WHOLE):
        yield from find_contents(value)
    else:
        yield from find_in_class(type(value), "__len__")[0]


def len_of(value: Any) -> int:
    """The length of a container, past a method of the user's."""
    plain = next(each for each in CONTAINERS if is_a(value, each))
    return plain.__len__(value)  # type: ignore[arg-type]


def find_contents(value: Any, depth: int = 1) -> Iterator[Found]:
    """Yield what is read of something that is gone through, to some depth of what it holds."""
    if not is_a(value, _OPENED):
        return
    seen: set[int] = set()
    pending = [(value, depth, value)]
    while pending:
        each, left, owner = pending.pop()
        each = behind(each)
        if left == 0 or id(each) in seen:
            continue
        seen.add(id(each))
        parts: tuple[Any, ...] = ()
        if is_a(each, dict):
            parts = (*dict.keys(each), *dict.values(each))
            yield each, Kind.CONTENTS, None, parts, owner if is_a(owner, PLAIN_ATTRIBUTES) else each
        elif is_a(each, list | set | deque):
            parts = tuple(_plainly(each))
            yield each, Kind.CONTENTS, None, parts, each
        elif is_a(each, WHOLE):
            yield each, Kind.CONTENTS, None, (), each
        elif is_a(each, tuple | frozenset):
            parts = tuple(_plainly(each))
        elif is_a(each, PLAIN_ATTRIBUTES) and (held := own_dict(each)) is not None:
            pending.append((held, left, each))
        if left > 1:
            pending += [(part, left - 1, part) for part in parts if is_a(part, _OPENED)]


def _plainly(value: Any) -> Iterator[Any]:
    plain = next(each for each in CONTAINERS if is_a(value, each))
    return plain.__iter__(value)  # type: ignore[arg-type]
