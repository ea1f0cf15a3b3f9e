"""Conditions from records: what the step has read of the user's objects, and no other condition looks at yet.

**Contract**
- A read is *covered* if the guards look at that very place, or if the graph is given anew what is there.
- What ``docs/limits.md`` says cannot be seen adds nothing; nor does what code of Python's and PyTorch's reads of
  its own modules, functions and classes.
"""

from __future__ import annotations

import builtins
import sys
from collections import deque
from collections.abc import Iterable
from types import (
    BuiltinFunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from millstream._torch.hooks import HOOKS_FOR_ALL
from millstream.capture.guards.guards import Guards
from millstream.capture.lines import is_users
from millstream.capture.record.reads import MISSING, Kind, Read, behind
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.code import is_users_module
from millstream.capture.state.contents import is_container
from millstream.capture.state.discover import MAX_ITEMS
from millstream.capture.state.location import MISSING as NOTHING
from millstream.capture.state.location import (
    Attributes,
    ClassAttributes,
    Items,
    Location,
    SequenceItems,
    Shared,
    SlotAttributes,
)
from millstream.capture.state.signature import is_same, kind_of, whole_form_of
from millstream.capture.step.request import Request, Traced

MAX_PATH = 8
"""So many steps of the way to what was read are told in its name."""


def add_recorded(guards: Guards, request: Request, traced: Traced) -> None:
    """Expect what was read to be as it was, where no other condition says so."""
    record = traced.record
    if record.failure:
        return
    for read in unguarded(record, request, guards):
        is_as_read = read.kind in _TIMELESS or is_same(read.now(), read.value)
        if is_as_read and id(read.holder) not in traced.effects.targets:
            _Adding(guards, record, read).add()


def unguarded(record: Recorder, request: Request, guards: Guards) -> list[Read]:
    """What was read of the user's objects, and could change unnoticed."""
    covered = _Covered(request, guards, record.given)
    return [
        read for read in record.reads if not (is_of_library(read, record) or _is_documented(read) or covered.has(read))
    ]


_TIMELESS = (Kind.TENSOR, Kind.TYPE, Kind.CODE, Kind.LENGTH)
"""What says nothing of what is there now."""


class _Adding:
    """One read that becomes a condition."""

    def __init__(self, guards: Guards, record: Recorder, read: Read) -> None:
        self._guards, self._record, self._read = guards, record, read

    def add(self) -> None:
        guards, read = self._guards, self._read
        holder, name = read.holder, path_of(read, self._record)
        if read.kind is Kind.TENSOR:
            origin = self._record.origin_of(holder)
            place = None if origin is None else location_of(origin, self._record)
            guards.expect_form(place or Location([holder], 0, name), whole_form_of)
        elif read.kind is Kind.TYPE or read.kind is Kind.CODE:
            guards.pin(holder)
        elif read.kind in (Kind.LENGTH, Kind.CONTENTS):
            if is_container(holder):
                guards.measure(name, holder, is_ordered=read.kind is Kind.CONTENTS)
                self._add_items(name)
        elif (place := location_of(read, self._record)) is not None:
            self._expect(place, NOTHING if read.value is MISSING else read.value)

    def _expect(self, place: Location, value: Any) -> None:
        if isinstance(value, Tensor):  # the graph does not read it, or it would be covered
            self._guards.expect_form(place, kind_of)
        else:
            self._guards.expect(place, value)

    def _add_items(self, name: str) -> None:
        holder = self._read.holder
        if self._read.kind is Kind.CONTENTS and isinstance(holder, list | dict) and len(holder) <= MAX_ITEMS:
            keys = dict.keys(holder) if isinstance(holder, dict) else range(len(holder))
            for key in [*keys]:
                value = dict.get(holder, key) if isinstance(holder, dict) else list.__getitem__(holder, key)
                place = Location(_items_of(holder), key, f"{name}[{key!r}]" if type(key) in (int, str) else name)
                self._expect(place, value)


def location_of(read: Read, record: Recorder) -> Location | None:
    """The place that was read; ``None`` where there is none."""
    holder, name = read.holder, path_of(read, record)
    if read.kind is Kind.CELL:
        return Location(holder, None, name)
    if read.kind is Kind.SLOT:
        return Location(SlotAttributes.of(holder), read.key, name)
    if read.kind is Kind.CLASS:
        return Location(ClassAttributes.of(holder), read.key, name)
    if read.kind is not Kind.ITEM:
        return None
    return Location(_items_of(holder), read.key, name)


def _items_of(holder: Any) -> Any:
    """A dict of a class of the user's is looked into past its methods."""
    has_own_methods = isinstance(holder, dict) and type(holder).__module__ not in ("builtins", "collections")
    return Items.of(holder) if has_own_methods else holder


def path_of(read: Read, record: Recorder) -> str:
    """How a user would write what was read, such as ``trainer.config['rate']``."""
    parts: list[str] = []
    each: Read | None = read
    while each is not None and len(parts) < MAX_PATH:
        holder, key = each.holder, each.key
        if each.kind is Kind.CELL:
            parts.append(str(each.owner))
            break
        if isinstance(holder, dict) and "__name__" in holder and "__spec__" in holder:  # a global variable
            parts.append(str(key))
            break
        if each.kind is Kind.CODE or each.kind is Kind.CLASS:
            parts.append(holder.__qualname__ if each.kind is Kind.CODE else f"{holder.__qualname__}.{key}")
            break
        if each.kind is Kind.ITEM and each.owner is holder:
            parts.append(f"[{key!r}]" if type(key) in (int, str, float, bool) else f"[<{type(key).__name__}>]")
        elif isinstance(key, str):
            parts.append(f".{key}")
        if (before := record.origin_of(each.owner)) is each or before is None:
            parts.append(type(each.owner).__qualname__)
            break
        each = before
    return "".join(reversed(parts))


def place_of(holder: Any, key: Any) -> tuple[Any, ...]:
    """What tells a place from others; both objects must be kept alive as long as it is used."""
    is_plain = isinstance(key, str | int | float | bytes)
    return identity_of(holder), type(key) if is_plain else None, key if is_plain else id(key)


def identity_of(holder: Any) -> int:
    """What tells a holder from others; attributes of a class are told by the dict that they are in."""
    if isinstance(holder, Items):
        return id(holder._owner)
    if isinstance(holder, SequenceItems):
        return id(holder.location.get())
    if isinstance(holder, Attributes):
        return identity_of(holder._owner)
    return id(behind(vars(holder))) if isinstance(holder, type) else id(behind(holder))


class _Covered:
    """All that the guards of a graph look at, by where it is."""

    def __init__(self, request: Request, guards: Guards, given: frozenset[int]) -> None:
        self._places: set[tuple[Any, ...]] = set()
        self._lengths: set[int] = set()
        self._contents: set[int] = set()
        self._pinned: set[int] = set()
        self._tensors = {id(entry.tensor) for entry in request.state} | {*map(id, request.arguments)}
        self._tensors |= {id(gradient) for gradient in guards.gradients if gradient is not None}
        self._given = given | {*map(id, request.arguments)}
        for check in (guards.entries, guards.absent, guards.cells):
            self._add(check.names)
        self._add(pair[1] for pair in guards.forms.things)
        self._add(number.location.entry for number in request.numbers)
        for check in (guards.sizes, guards.orders, guards.contents):
            self._lengths.update(map(identity_of, check.things))
        self._contents.update(map(identity_of, (*guards.orders.things, *guards.contents.things)))
        for check in (*guards.pins, guards.dicts):
            self._pinned.update(map(id, check.things))

    def _add(self, locations: Iterable[Location]) -> None:
        for location in locations:
            holder = location.holder
            for each in holder.owners if isinstance(holder, Shared) else (holder,):
                self._places.add(place_of(each, location.key))

    def has(self, read: Read) -> bool:
        """Whether a read would be noticed if it gave something else."""
        holder, kind, key, value = read.holder, read.kind, read.key, read.value
        if id(holder) in self._given or id(read.owner) in self._given:  # which calls are told apart by
            return True
        if type(read.owner).__module__.startswith("torch.backends"):  # switches, likewise
            return True
        if isinstance(read.owner, Tensor) and kind is Kind.ITEM:  # a traced one has another dict
            return place_of(vars(read.owner), key) in self._places
        if kind is Kind.TENSOR:
            return id(holder) in self._tensors
        if kind is Kind.CELL:
            return place_of(holder, None) in self._places
        if kind in (Kind.ITEM, Kind.SLOT, Kind.CLASS):
            is_counted = value is MISSING and identity_of(holder) in self._lengths  # nothing can be added unnoticed
            return is_counted or place_of(holder, key) in self._places or identity_of(holder) in self._contents
        if kind is Kind.LENGTH:
            has_entries = isinstance(holder, dict) and any(place_of(holder, each) in self._places for each in holder)
            return identity_of(holder) in self._lengths or (has_entries and not is_users(read.code.co_filename))
        if kind is Kind.CONTENTS:
            keys = [*holder] if isinstance(holder, dict) else range(len(holder))
            has_all = all(place_of(holder, each) in self._places for each in keys)
            return (has_all and identity_of(holder) in self._lengths) or identity_of(holder) in self._contents
        return id(holder) in self._pinned


def is_of_library(read: Read, record: Recorder) -> bool:
    """Whether what was read is code, a class or a variable of Python's or PyTorch's, or theirs alone to use."""
    holder, kind, owner = read.holder, read.kind, read.owner
    key = read.key if isinstance(read.key, str) else ""  # others may be compared by code of the user's
    if kind is Kind.CLASS:
        is_fixed = not holder.__flags__ & _IS_HEAP_TYPE or _is_library(holder.__module__)
        return is_fixed or key in ("__dataclass_fields__", "__match_args__")
    if kind is Kind.CODE:
        return not is_users(holder.__code__.co_filename)
    if kind is Kind.TYPE and (not type(holder).__flags__ & _IS_HEAP_TYPE or _is_library(type(holder).__module__)):
        return True
    if isinstance(owner, ModuleType):
        return _is_library(owner.__name__)
    if isinstance(holder, dict) and "__name__" in holder and "__spec__" in holder:
        return _is_library(holder["__name__"])
    if is_users(read.code.co_filename):
        return False
    if any(holder is hooks for hooks in HOOKS_FOR_ALL):  # which ``Guards`` compares
        return True
    if isinstance(owner, nn.Module | Optimizer):
        return key.startswith("_") or (isinstance(owner, Optimizer) and key in _OF_OPTIMIZERS)
    if key in _STATE or (read.value is MISSING and _is_library(type(owner).__module__)):
        return True
    origin = record.origin_of(holder)
    origin_key = origin.key if origin is not None and isinstance(origin.key, str) else ""
    if origin is not None and origin_key == "_modules" and not holder:  # a layer without submodules
        return _is_library(type(origin.owner).__module__)
    if isinstance(holder, list | dict | set | deque) and origin is not None and origin.holder is not holder:
        return origin_key not in _STATE and is_of_library(origin, record)
    return kind is Kind.CELL or (_is_library(type(owner).__module__) and not isinstance(owner, _LOOKED_INTO))


def _is_documented(read: Read) -> bool:
    """Whether ``docs/limits.md`` says that nobody looks there."""
    value, key, owner = read.value, read.key, read.owner
    if read.code.co_qualname.startswith("__create_fn__"):  # which makes data classes
        return True
    if isinstance(value, ModuleType) and is_users_module(value):
        return False
    if isinstance(value, _NEVER_REPLACED) or (isinstance(value, type) and _is_library(value.__module__)):
        return True
    if value is not MISSING or not isinstance(key, str):
        return False
    if isinstance(read.holder, dict) and "__builtins__" in read.holder:
        return hasattr(builtins, key)
    if isinstance(owner, nn.Module) and any(key in vars(owner)[each] for each in _STATE):
        return True
    kinds = (kind for kind in type(owner).__mro__ if key in vars(kind))
    is_pytorchs = next(kinds, object).__module__.startswith("torch.")  # a method, say
    return is_pytorchs and not is_users(read.code.co_filename)


_NEVER_REPLACED = (
    ModuleType,
    BuiltinFunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
"""What variables and classes hold that is not looked at in every call."""
_STATE = ("_parameters", "_buffers", "_modules")
"""Attributes of modules that hold what is the user's."""
_OF_OPTIMIZERS = ("defaults", "grad_scale", "found_inf")
"""Attributes that an optimizer's own code reads: the groups' values count, and a scaler's."""
_LOOKED_INTO = (nn.Module, Optimizer, LRScheduler, Distribution, list, dict, set, deque)
"""Classes of libraries whose objects hold what is the user's."""
_IS_HEAP_TYPE = 1 << 9  # of a class's flags: others cannot change


def _is_library(module: str) -> bool:
    """Whether a module is Python's, PyTorch's or ours."""
    root = str(module).partition(".")[0]
    return root in sys.stdlib_module_names or root in ("torch", "millstream", "pybind11_builtins")
