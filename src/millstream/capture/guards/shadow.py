"""Shadow mode: what was recorded while a step was traced, beside what its guards look at and what was found changed.

**Contract**
- A read is *covered* if the guards look at that very place, or if the graph is given anew what is there.
- What ``docs/limits.md`` says cannot be seen is no difference; nor is what code of Python's and PyTorch's reads of its
  own modules, functions and classes.
"""

from __future__ import annotations

import builtins
import enum
import logging
import sys
from collections import deque, namedtuple
from collections.abc import Callable, Iterable
from types import (
    BuiltinFunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
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
from millstream.capture.record.shadow import Difference
from millstream.capture.state import snapshot as state
from millstream.capture.state.code import is_users_module
from millstream.capture.state.location import Attributes, Items, Location, SequenceItems, Shared
from millstream.capture.state.signature import is_same
from millstream.capture.state.snapshot import Change
from millstream.capture.step.request import Request, Traced
from millstream.capture.trace.patches.optimizers import is_schedulers

_log = logging.getLogger(__name__)


def report(request: Request, traced: Traced, guards: Guards) -> None:
    """Log the differences of a capture, if it was recorded."""
    if traced.record is not None:
        for difference in differences(traced.record, request, traced, guards):
            _log.warning("MILLSTREAM_RECORD: %s", difference)


def differences(record: Recorder, request: Request, traced: Traced, guards: Guards) -> list[Difference]:
    """Compare a record with the guards of a graph, and with what was found changed."""
    if record.failure:
        return [Difference("not recorded", record.failure)]
    covered = _Covered(request, guards, record.given)
    unseen = [
        read for read in record.reads if not (_is_of_library(read, record) or _is_documented(read) or covered.has(read))
    ]
    return [*(Difference("read, but not guarded", str(read)) for read in unseen), *traced.differences]


def compare_writes(record: Recorder | None, changes: Callable[[], list[Change]]) -> list[Difference]:
    """Compare what was written with the changes that are found, before they are taken back."""
    if record is None or record.failure:
        return []
    found = changes()
    places = {_place(change.location.holder, change.location.key) for change in found}
    holders = {_identity(change.location.holder) for change in found}
    written = {_place(write.holder, write.key) for write in record.writes}
    filled = {_identity(write.holder) for write in record.writes if write.kind is Kind.CONTENTS}
    unseen = [
        write
        for write in record.writes
        if not (_is_of_library(write, record) or _is_note(write) or is_same(write.now(), write.value))
        and _place(write.holder, write.key) not in places
        and not (write.kind is Kind.CONTENTS and _identity(write.holder) in holders)
    ]
    missed = [
        change
        for change in found
        # What optimizers and schedulers keep is put there by our own code.
        if change.kind in (state.Kind.PLAIN, state.Kind.MODULE)
        and not is_schedulers(change.after)
        and _place(change.location.holder, change.location.key) not in written
        and _identity(change.location.holder) not in filled
    ]
    return [
        *(Difference("written, but not found", str(write)) for write in unseen),
        *(Difference("found, but not written", f"{change.location}") for change in missed),
    ]


def _place(holder: Any, key: Any) -> tuple[Any, ...]:
    is_plain = isinstance(key, str | int | float | bytes)
    return _identity(holder), type(key) if is_plain else None, key if is_plain else id(key)


def _identity(holder: Any) -> int:
    """What tells a holder from others; attributes of a class are told by the dict that they are in."""
    if isinstance(holder, Items):
        return id(holder._owner)
    if isinstance(holder, SequenceItems):
        return id(holder.location.get())
    if isinstance(holder, Attributes):
        return _identity(holder._owner)
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
            self._lengths.update(map(_identity, check.things))
        self._contents.update(map(_identity, (*guards.orders.things, *guards.contents.things)))
        for check in (*guards.pins, guards.dicts):
            self._pinned.update(map(id, check.things))

    def _add(self, locations: Iterable[Location]) -> None:
        for location in locations:
            holder = location.holder
            for each in holder.owners if isinstance(holder, Shared) else (holder,):
                self._places.add(_place(each, location.key))

    def has(self, read: Read) -> bool:
        """Whether a read would be noticed if it gave something else."""
        holder, kind, key, value = read.holder, read.kind, read.key, read.value
        if id(holder) in self._given or id(read.owner) in self._given:  # which calls are told apart by
            return True
        if type(read.owner).__module__.startswith("torch.backends"):  # switches, likewise
            return True
        if isinstance(read.owner, Tensor) and kind is Kind.ITEM:  # a traced one has another dict
            return _place(vars(read.owner), key) in self._places
        if kind is Kind.TENSOR:
            return id(holder) in self._tensors
        if kind is Kind.CELL:
            return _place(holder, None) in self._places
        if kind in (Kind.ITEM, Kind.SLOT, Kind.CLASS):
            is_counted = value is MISSING and _identity(holder) in self._lengths  # nothing can be added unnoticed
            return is_counted or _place(holder, key) in self._places or _identity(holder) in self._contents
        if kind is Kind.LENGTH:
            has_entries = isinstance(holder, dict) and any(_place(holder, each) in self._places for each in holder)
            return _identity(holder) in self._lengths or (has_entries and not is_users(read.code.co_filename))
        if kind is Kind.CONTENTS:
            keys = [*holder] if isinstance(holder, dict) else range(len(holder))
            has_all = _identity(holder) in self._lengths and all(_place(holder, each) in self._places for each in keys)
            return has_all or _identity(holder) in self._contents
        return id(holder) in self._pinned


def _is_of_library(read: Read, record: Recorder) -> bool:
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
        return origin_key not in _STATE and _is_of_library(origin, record)
    return kind is Kind.CELL or (_is_library(type(owner).__module__) and not isinstance(owner, _LOOKED_INTO))


def _is_documented(read: Read) -> bool:
    """Whether ``docs/limits.md`` says that nobody looks there."""
    value, key, owner = read.value, read.key, read.owner
    is_enumeration = issubclass(owner if isinstance(owner, type) else type(owner), enum.Enum)
    if is_enumeration or read.code.co_qualname.startswith("__create_fn__"):  # the latter makes dataclasses
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
    return next(kinds, object).__module__.startswith("torch.")  # a method of PyTorch's


_NEVER_REPLACED = (
    ModuleType,
    BuiltinFunctionType,
    MemberDescriptorType,
    GetSetDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
    type(namedtuple("Named", "field").field),  # type: ignore[attr-defined]
)
"""What variables and classes hold that is not looked at in every call."""
_STATE = ("_parameters", "_buffers", "_modules")
"""Attributes of modules that hold what is the user's."""
_OF_OPTIMIZERS = ("defaults", "grad_scale", "found_inf")
"""Attributes that an optimizer's own code reads: the groups' values count, and a scaler's."""
_LOOKED_INTO = (nn.Module, Optimizer, LRScheduler, Distribution, list, dict, set, deque)
"""Classes of libraries whose objects hold what is the user's."""
_IS_HEAP_TYPE = 1 << 9  # of a class's flags: others cannot change


def _is_note(write: Read) -> bool:
    """Whether PyTorch notes something in an object of its own that does not matter to a graph."""
    return isinstance(write.owner, nn.Module | Optimizer | LRScheduler) and not is_users(write.code.co_filename)


def _is_library(module: str) -> bool:
    """Whether a module is Python's, PyTorch's or ours."""
    root = str(module).partition(".")[0]
    return root in sys.stdlib_module_names or root in ("torch", "millstream", "pybind11_builtins")
