"""The Python side of a step: what it changes, and how to put everything back.

Tracing runs the user's function once on tensors without values. Whatever it writes into Python objects meanwhile must
not stay, and what it would have changed in every call must be found, because a replayed graph changes tensors only.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from millstream._torch.tensors import FakeTensor
from millstream.capture.effects.values import Later, holds_token
from millstream.capture.lines import is_millstreams, is_users
from millstream.capture.record.location import MISSING, Attributes, Location
from millstream.capture.record.paths import PLACES, is_namespace, location_of, path_of
from millstream.capture.record.reads import MISSING as NOTHING
from millstream.capture.record.reads import Kind as Kinds
from millstream.capture.record.reads import Write
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.contents import content_of, has_content, is_bytes, is_comparable, is_container, put_back
from millstream.capture.state.discover import Found
from millstream.capture.state.executed import others_may_write
from millstream.capture.state.generators import StandsForGenerator
from millstream.capture.state.relevant import counts
from millstream.capture.state.signature import is_same


class Kind(Enum):
    """What a holder belongs to."""

    PLAIN = "an object of the user's"
    MODULE = "a module"
    OPTIMIZER = "an optimizer's own attributes"
    GROUP = "hyperparameters"
    STATE = "optimizer state"
    SCALER = "a gradient scaler"


@dataclass(frozen=True, slots=True)
class Change:
    """An entry that the traced function changed."""

    kind: Kind  # what the holder belongs to
    location: Location  # the entry; or a whole container, where its length or order changed
    before: Any  # what was there, or ``MISSING``
    after: Any  # what is there now, or ``MISSING``

    @property
    def is_entry(self) -> bool:
        """Whether one entry changed, rather than the length or order of a container."""
        return isinstance(self.location.holder, CellType) or self.location.key is not None


class Snapshot:
    """The content of every holder that a step reaches, to compare with and to go back to.

    Other threads may write to the same holders meanwhile. What the step has not written is theirs: it is no
    change, and stays.

    Args:
        found: What the step reaches.
        record: What it reads and writes.
    """

    def __init__(self, found: Found, record: Recorder) -> None:
        self._record = record
        self._found: Found | None = None  # what was noted last
        self._noted: dict[str, int] = {}  # how much of it, by kind
        self._copies: dict[int, tuple[Kind, str, Any, Any]] = {}
        self._links: dict[Location, Any] = {}
        self._of_modules: set[int] = set()  # by id, holders into which PyTorch's code puts what the user's gives it
        self._containers: set[int] = set()  # by id, holders that are no attributes of an object's
        self._whole: set[int] = set()  # by id, long containers, of which no entry is told from the others
        self.add(found)

    def add(self, found: Found) -> None:
        """Note what else a step reaches, as it is now; of what a search has found before only what came since."""
        if found is not self._found:
            self._found, self._noted = found, {}
        # Attributes of optimizers are kept below.
        optimizers = {id(vars(optimizer)) for _, optimizer in found.optimizers}
        for location in self._new("links"):
            if id(location.holder) not in optimizers:
                self._links.setdefault(location, location.get())
        for name, root in self._new("modules"):
            for prefix, module in root.named_modules(prefix=name):
                parts = (module._parameters, module._buffers, module._modules)
                self._of_modules |= {*map(id, parts)}
                for holder in (vars(module), *parts):
                    self._keep(Kind.MODULE, prefix, holder)
        for name, optimizer in self._new("optimizers"):
            self._keep_optimizer(name, optimizer)
        for name, scaler in self._new("scalers"):
            for part in (vars(scaler), scaler._per_optimizer_states, *scaler._per_optimizer_states.values()):
                self._keep(Kind.SCALER, name, part)
        objects, containers, long = map(self._new, ("objects", "containers", "long"))
        self._containers |= {id(container) for _, container in (*containers, *long)}
        self._whole |= {id(container) for _, container in long}
        for name, container in (*objects, *containers, *long):
            self._keep(Kind.PLAIN, name, container)

    def add_written(self, write: Write) -> None:
        """Note what is there where the step is about to write, if no search has found that."""
        holder = write.holder
        is_other = not is_container(holder) and write.kind is Kinds.CONTENTS
        if id(holder) in self._copies or is_other or not counts(write, self._record):
            return
        name = path_of(write, self._record)
        if is_container(holder) and write.owner is holder and not is_namespace(holder):
            self._containers.add(id(holder))
            self._keep(Kind.PLAIN, name, holder)
        elif (place := location_of(write, self._record)) is not None:
            self._links.setdefault(place, MISSING if write.value is NOTHING else write.value)

    def _new(self, kind: str) -> list[Any]:
        """What was found of a kind since the last time."""
        found = getattr(self._found, kind)
        start, self._noted[kind] = self._noted.get(kind, 0), len(found)
        return [*islice(found, start, None)]

    def _keep_optimizer(self, name: str, optimizer: Optimizer) -> None:
        self._containers |= set(map(id, optimizer.param_groups))
        self._keep(Kind.OPTIMIZER, name, vars(optimizer))
        self._keep(Kind.GROUP, f"{name}.param_groups", optimizer.param_groups)
        for number, group in enumerate(optimizer.param_groups):
            self._keep(Kind.GROUP, f"{name}.param_groups[{number}]", group)
            self._keep(Kind.GROUP, f"{name}.param_groups[{number}]", group["params"])
        for entry in (optimizer.state, *optimizer.state.values()):
            self._keep(Kind.STATE, f"{name}.state", entry)

    def _keep(self, kind: Kind, name: str, holder: Any) -> None:
        is_huge = is_bytes(holder) and not is_comparable(holder)
        if is_container(holder) and not is_huge and id(holder) not in self._copies:
            self._copies[id(holder)] = (kind, name, holder, content_of(holder))

    def changes(self) -> list[Change]:
        """Everything that the step has changed, but for what caches keep by the type of a traced tensor."""
        differences = self._differences()
        others = self._of_others(differences)
        return [change for change in differences if change.location not in others]

    def _differences(self) -> list[Change]:
        """Everything that differs now."""
        found: dict[Location, Change] = {}
        for location, before in self._links.items():
            after = location.get()
            if _is_changed(after, before):
                found[location] = Change(Kind.PLAIN, location, before, after)
        for kind, name, holder, copy in self._copies.values():
            has_entries = id(holder) not in self._whole
            if has_entries and isinstance(holder, dict | Attributes):
                for key in [*copy, *(key for key in [*holder] if key not in copy)]:
                    before, after = copy.get(key, MISSING), holder.get(key, MISSING)
                    if _is_changed(after, before) and (not is_type_of_tracing(key) or _is_of_trace(after)):
                        location = Location(holder, key, f"{name}.{key}" if isinstance(key, str) else name)
                        found.setdefault(location, Change(kind, location, before, after))
            elif has_entries and isinstance(holder, list) and len(holder) == len(copy):
                for index in (index for index, value in enumerate(copy) if _is_changed(holder[index], value)):
                    location = Location(holder, index, f"{name}[{index}]")
                    found.setdefault(location, Change(kind, location, copy[index], holder[index]))
            elif {*copy} != holder if isinstance(holder, set) else not has_content(holder, copy):
                location = Location(holder, None, name)
                found[location] = Change(kind, location, copy, holder)
        return list(found.values())

    def _of_others(self, differences: list[Change]) -> dict[Location, Change]:
        """Those of them that other threads have made."""
        if not others_may_write():
            return {}
        return {change.location: change for change in differences if self._is_of_others(change)}

    def _is_of_others(self, change: Change) -> bool:
        """Whether the step has not made a change, so that another thread has."""
        kind, holder, key = change.kind, change.location.holder, change.location.key
        if kind not in (Kind.PLAIN, Kind.MODULE, Kind.GROUP) or _is_of_trace(change.after):
            return False
        if self.is_written_over(change):
            return True
        if isinstance(holder, CellType):
            is_recorded = True
        elif id(holder) not in self._containers:
            is_recorded = isinstance(key, str) and id(holder) not in self._of_modules
        else:  # of which reading may make items, or not
            is_recorded = isinstance(holder, list | dict | set | deque) and not hasattr(type(holder), "__missing__")
        return is_recorded and not self._record.has_written(change.location)

    def is_written_over(self, change: Change) -> bool:
        """Whether a plain number stands where the step counts on a number that a graph reads."""
        is_plain = _stands_for_number(change.before) and not _is_of_trace(change.after)
        may_be = is_plain and self._record.has_written(change.location)
        return may_be and not self._record.has_put_plain(change.location)

    def others(self) -> list[Change]:
        """What other threads have changed."""
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
        for location, before in self._links.items():
            if location not in others and location.get() is not before:
                location.set(before)
        for _, _, holder, copy in self._copies.values():
            left = [place.key for place in others if place.holder is holder]
            if all(key is not None for key in left):
                put_back(holder, copy, left)

    def places_of(self, held: Any) -> list[Location]:
        """Where an object stands, of all that the step reaches."""
        places = [location for location in self._links if location.get() is held]
        for _, name, holder, copy in self._copies.values():
            if isinstance(copy, dict | list | tuple):
                entries = copy.items() if isinstance(copy, dict) else enumerate(copy)
                places += [Location(holder, key, name) for key, value in entries if value is held]
        return [*dict.fromkeys(places)]

    def disturbed(self, unread: Container[Location]) -> Location | None:
        """A place that the step has read, and where another thread has put something since, if there is one.

        To be asked when everything is put back that the step has changed; not about ``unread``.
        """
        for read in self._record.reads:
            kind = self._copies.get(id(read.holder), (Kind.PLAIN,))[0]
            is_theirs = is_users(read.code.co_filename)  # what PyTorch's has read, ours may change meanwhile
            if not is_theirs or kind not in (Kind.PLAIN, Kind.MODULE) or not counts(read, self._record):
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
    """Whether only tracing can have made it: a tensor, a number or a text that has no value yet."""
    if type(value) in (tuple, list, dict):
        return any(map(_is_of_trace, value.values() if type(value) is dict else value))
    if _stands_for_number(value) or isinstance(value, FakeTensor) or issubclass(type(value), Later):
        return True
    return isinstance(value, str) and holds_token(value)


def _stands_for_number(value: Any) -> bool:
    return issubclass(type(value), (torch.SymFloat, torch.SymInt))


def _are_unchanged(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether a container has what it had; numbers that a graph reads anew may be others."""
    return len(now) == len(before) and all(map(_is_unchanged, now, before))


def _is_unchanged(now: Any, before: Any) -> bool:
    return _stands_for_number(before) or not (_is_changed(now, before) and _is_changed(before, now))


def is_type_of_tracing(key: Any) -> bool:
    """Whether it is a type that tensors have while they are traced only, or a weak reference to one."""
    key = key() if isinstance(key, weakref.ref) else key
    return isinstance(key, type) and issubclass(key, FakeTensor)


def _is_wrapper(value: Any) -> bool:
    """Whether it is a function of ours that stands for another one while a step is traced."""
    function = value.__func__ if type(value) is MethodType else value
    return type(function) is FunctionType and is_millstreams(function.__code__.co_filename)


def _is_changed(after: Any, before: Any) -> bool:
    # While tracing, FX puts wrappers in the place of functions marked by torch.fx.wrap; so do our own patches.
    may_be = type(after) is FunctionType or issubclass(type(after), StandsForGenerator)
    is_wrapper = may_be and vars(after).get("__wrapped__", after) is before
    return not is_wrapper and not is_same(after, before)
