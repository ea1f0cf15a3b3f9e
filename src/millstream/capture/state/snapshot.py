"""The Python side of a step: what it changes, and how to put everything back.

Tracing runs the user's function once on tensors without values. Whatever it writes into Python objects meanwhile must
not stay, and what it would have changed in every call must be found, because a replayed graph changes tensors only.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from millstream._torch.tensors import FakeTensor
from millstream.capture.effects.host_generators import StandsForGenerator
from millstream.capture.effects.late_values import Later, holds_token
from millstream.capture.lines import is_millstreams, is_users
from millstream.capture.record.location import MISSING, Attributes, Location
from millstream.capture.record.paths import PLACES, identity_of, items_of, location_of, path_of
from millstream.capture.record.reads import MISSING as NOTHING
from millstream.capture.record.reads import Kind as Kinds
from millstream.capture.record.reads import Read, Write, is_a
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.contents import (
    Answers,
    content_of,
    has_content,
    is_bytes,
    is_comparable,
    is_container,
    put_back,
    put_items_back,
    without_cache,
)
from millstream.capture.state.discover import Found
from millstream.capture.state.executed import others_may_write
from millstream.capture.state.relevant import counts
from millstream.capture.state.signature import is_same

MAX_ENTRIES = 1000
"""Of longer lists no entry is told from the others."""


class HolderKind(Enum):
    """The kind of object that a holder belongs to."""

    PLAIN = "an object of the user's"
    MODULE = "a module"
    OPTIMIZER = "an optimizer's own attributes"
    GROUP = "hyperparameters"
    STATE = "optimizer state"
    SCALER = "a gradient scaler"


@dataclass(frozen=True, slots=True)
class Change:
    """An entry that the traced function changed."""

    kind: HolderKind  # what the holder belongs to
    location: Location  # the entry; or a whole container, where its length or order changed
    before: Any  # what was there, or ``MISSING``
    after: Any  # what is there now, or ``MISSING``

    @property
    def is_entry(self) -> bool:
        """Whether one entry changed, rather than the length or order of a container."""
        return self.after is not self.location.holder  # ``None`` may be a key


@dataclass(slots=True)
class _Kept:
    """A holder in which the step has written, or may have, and what it held before."""

    kind: HolderKind
    name: str
    holder: Any
    content: Any
    names: list[tuple[Any, str]] | None = None  # keys of what may be another now, with their names; ``None`` for all

    @property
    def has_entries(self) -> bool:
        """Whether entries are told from each other."""
        if isinstance(self.holder, dict | Attributes):
            return True
        return isinstance(self.holder, list) and len(self.holder) == len(self.content) <= MAX_ENTRIES

    def entries(self) -> Iterator[tuple[Any, str, Any, Any]]:
        """Key, name, what was there and what is there, of all that may be another now."""
        holder, content = self.holder, self.content
        if isinstance(holder, list):
            keys = self.names or ((index, f"{self.name}[{index}]") for index in range(len(content)))
            yield from ((key, name, content[key], holder[key]) for key, name in keys)
            return
        all_keys = (*content, *(key for key in [*holder] if key not in content)) if self.names is None else ()
        keys = self.names or ((key, f"{self.name}.{key}" if isinstance(key, str) else self.name) for key in all_keys)
        yield from ((key, name, content.get(key, MISSING), holder.get(key, MISSING)) for key, name in keys)


class StateSnapshot:
    """What was where the step has written, to compare with and to go back to: noted before it writes there first.

    Other threads may write to the same holders meanwhile. What the step has not written is theirs: it is no
    change, and stays. Optimizers and scalers are copied when the step begins, as code of ours writes to them, too.

    Args:
        found: What the step reaches.
        record: What it reads and writes.
    """

    def __init__(self, found: Found, record: Recorder) -> None:
        self._record = record
        self._kept: dict[int, _Kept] = {}  # by the holder's id
        self._places: dict[Location, Any] = {}  # variables of closures, slots, attributes of classes
        self._numbers: dict[Location, Any] = {}  # where we have put what stands for a number
        self._kinds: dict[int, tuple[HolderKind, str]] = {}  # by id, holders that are none of an object of the user's
        for name, root in found.modules:
            for prefix, module in root.named_modules(prefix=name):
                for holder in (vars(module), module._parameters, module._buffers, module._modules):
                    self._kinds[id(holder)] = HolderKind.MODULE, prefix
        for name, optimizer in found.optimizers:
            self._keep_optimizer(name, optimizer)
        for name, scaler in found.scalers:
            for part in (vars(scaler), scaler._per_optimizer_states, *scaler._per_optimizer_states.values()):
                self._copy(HolderKind.SCALER, name, part)

    def note_number(self, place: Location) -> None:
        """Note a place where something stands for a number now."""
        self._numbers[place] = place.get()

    def add_written(self, write: Write) -> None:
        """Note what is there where the step is about to write."""
        holder = items_of(write.holder)
        kind, prefix = self._kinds.get(id(write.holder), (HolderKind.PLAIN, ""))
        if kind is HolderKind.PLAIN and not counts(write, self._record):
            return
        name = path_of(write, self._record) if kind is HolderKind.PLAIN else f"{prefix}.{write.key}"
        if write.kind is Kinds.CONTENTS or (write.kind is Kinds.ITEM and isinstance(holder, dict | list | Attributes)):
            kept = self._keep(kind, name, holder)
            if kept is None or kept.names is None:
                return
            if write.kind is Kinds.CONTENTS:
                kept.name, kept.names = name, None
            else:
                kept.names.append((write.key, name))
        elif (place := location_of(write, self._record)) is not None:
            self._places.setdefault(place, MISSING if write.value is NOTHING else write.value)

    def add_exposed(self, read: Read) -> None:
        """Note what something holds that may be written unseen, in C."""
        holder = read.holder
        if is_a(holder, functools._lru_cache_wrapper):
            is_seen = isinstance(without_cache(holder), FunctionType)  # where it makes something for the cache
            if is_seen:
                return
            holder = Answers(holder)
        kind, _ = self._kinds.get(id(holder), (HolderKind.PLAIN, ""))
        if (kept := self._keep(kind, path_of(read, self._record), items_of(holder))) is not None:
            kept.names = None

    def _keep_optimizer(self, name: str, optimizer: Optimizer) -> None:
        self._copy(HolderKind.OPTIMIZER, name, vars(optimizer))
        self._copy(HolderKind.GROUP, f"{name}.param_groups", optimizer.param_groups)
        for number, group in enumerate(optimizer.param_groups):
            self._copy(HolderKind.GROUP, f"{name}.param_groups[{number}]", group)
            self._copy(HolderKind.GROUP, f"{name}.param_groups[{number}]", group["params"])
        for entry in (optimizer.state, *optimizer.state.values()):
            self._copy(HolderKind.STATE, f"{name}.state", entry)

    def _copy(self, kind: HolderKind, name: str, holder: Any) -> None:
        self._kinds[id(holder)] = kind, name
        self._keep(kind, name, holder)

    def _keep(self, kind: HolderKind, name: str, holder: Any) -> _Kept | None:
        """Note what a holder has, unless that is known; ``None`` for what is too large, or no container."""
        known = self._kept.get(identity_of(holder))
        if known is None and is_container(holder) and not (is_bytes(holder) and not is_comparable(holder)):
            names = [] if kind in (HolderKind.PLAIN, HolderKind.MODULE) else None
            known = self._kept[identity_of(holder)] = _Kept(kind, name, holder, content_of(holder), names)
        return known

    def changes(self) -> list[Change]:
        """Everything that the step has changed, but for what caches keep by the type of a traced tensor."""
        differences = self._differences()
        others = self._of_others(differences)
        return [change for change in differences if change.location not in others]

    def _differences(self) -> list[Change]:
        """Everything that differs now."""
        found: dict[Location, Change] = {}
        for location, before in (self._numbers | self._places).items():
            after = location.get()
            if _is_changed(after, before):
                found[location] = Change(self._kind_of(location), location, before, after)
        for kept in self._kept.values():
            holder, kind = kept.holder, kept.kind
            if kept.has_entries:
                for key, name, before, after in kept.entries():
                    if _is_changed(after, before) and (not is_type_of_tracing(key) or _is_of_trace(after)):
                        location = Location(holder, key, name)
                        found.setdefault(location, Change(kind, location, before, after))
            elif {*kept.content} != holder if isinstance(holder, set) else not has_content(holder, kept.content):
                location = Location(holder, None, kept.name)
                found[location] = Change(kind, location, kept.content, holder)
        return list(found.values())

    def _kind_of(self, location: Location) -> HolderKind:
        return self._kinds.get(id(location.holder), (HolderKind.PLAIN, ""))[0]

    def _of_others(self, differences: list[Change]) -> dict[Location, Change]:
        """Return those of them that other threads have made."""
        if not others_may_write():
            return {}
        return {change.location: change for change in differences if self._is_of_others(change)}

    def _is_of_others(self, change: Change) -> bool:
        """Return whether the step has not made a change, so that another thread has."""
        if _is_of_trace(change.after):
            return False
        if self._is_written_over(change):
            return True
        is_ours = change.kind is HolderKind.GROUP or change.location in self._numbers
        return is_ours and not self._record.has_written(change.location)

    def _is_written_over(self, change: Change) -> bool:
        """Return whether a plain number stands where the step counts on a number that a graph reads."""
        is_plain = _stands_for_number(change.before) and not _is_of_trace(change.after)
        may_be = is_plain and self._record.has_written(change.location)
        return may_be and not self._record.has_put_plain(change.location)

    def others(self) -> list[Change]:
        """Return what other threads have changed."""
        return [*self._of_others(self._differences()).values()]

    def restore(self) -> None:
        """Put everything back that the step has changed, but for numbers that others may count on meanwhile.

        Those are put back where they were replaced, if no other thread has put its own there by then.
        """
        differences = self._differences()
        others = self._of_others(differences)
        if others_may_write():
            numbers = (each for each in differences if all(map(_stands_for_number, (each.before, each.after))))
            others |= {change.location: change for change in numbers}
        for location, before in self._places.items():
            if location not in others and location.get() is not before:
                location.set(before)
        for kept in self._kept.values():
            left = [place.key for place in others if place.holder is kept.holder]
            if kept.names is not None and kept.has_entries:
                keys = [key for key, _ in kept.names if key not in left]
                put_items_back(kept.holder, kept.content, keys)
            elif all(key is not None for key in left):
                put_back(kept.holder, kept.content, left)

    def disturbed(self, unread: Container[Location]) -> Location | None:
        """A place that the step has read, and where another thread has put something since, if there is one.

        To be asked when everything is put back that the step has changed; not about ``unread``.
        """
        for read in self._record.reads:
            kind = self._kinds.get(id(read.holder), (HolderKind.PLAIN, ""))[0]
            is_theirs = is_users(read.code.co_filename)  # what PyTorch's has read, ours may change meanwhile
            if not is_theirs or kind not in (HolderKind.PLAIN, HolderKind.MODULE) or not counts(read, self._record):
                continue
            if read.kind is Kinds.CONTENTS and is_container(read.holder):
                place = Location(read.holder, None, path_of(read, self._record))
                is_kept = _are_unchanged(read.now(), read.value)
            elif read.kind in PLACES and (known := location_of(read, self._record)) is not None:
                place, before = known, MISSING if read.value is NOTHING else read.value
                is_kept = _is_unchanged(place.get(), before) or _is_wrapper(before)
            else:
                continue
            if not is_kept and place not in unread:
                return place
        return None


def _is_of_trace(value: Any) -> bool:
    """Return whether only tracing can have made it: a tensor, a number or a text that has no value yet."""
    if type(value) in (tuple, list, dict):
        return any(map(_is_of_trace, value.values() if type(value) is dict else value))
    if _stands_for_number(value) or isinstance(value, FakeTensor) or issubclass(type(value), Later):
        return True
    return isinstance(value, str) and holds_token(value)


def _stands_for_number(value: Any) -> bool:
    return issubclass(type(value), (torch.SymFloat, torch.SymInt))


def _are_unchanged(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return whether a container has what it had; numbers that a graph reads anew may be others."""
    return len(now) == len(before) and all(map(_is_unchanged, now, before))


def _is_unchanged(now: Any, before: Any) -> bool:
    return _stands_for_number(before) or not (_is_changed(now, before) and _is_changed(before, now))


def is_type_of_tracing(key: Any) -> bool:
    """Return whether it is a type that tensors have while they are traced only, or a weak reference to one."""
    key = key() if isinstance(key, weakref.ref) else key
    return isinstance(key, type) and issubclass(key, FakeTensor)


def _is_wrapper(value: Any) -> bool:
    """Return whether it is a function of ours that stands for another one while a step is traced."""
    function = value.__func__ if type(value) is MethodType else value
    return type(function) is FunctionType and is_millstreams(function.__code__.co_filename)


def _is_changed(after: Any, before: Any) -> bool:
    # While tracing, FX puts wrappers in the place of functions marked by torch.fx.wrap; so do our own patches.
    may_be = type(after) is FunctionType or issubclass(type(after), StandsForGenerator)
    is_wrapper = may_be and vars(after).get("__wrapped__", after) is before
    return not is_wrapper and not is_same(after, before)
