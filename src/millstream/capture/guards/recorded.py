"""Conditions from records: what the step has read of the user's objects, and no other condition looks at yet.

**Contract**
- A read is *covered* if the guards look at that very place, or if the graph is given anew what is there.
- What ``docs/limits.md`` says cannot be seen adds nothing; nor does what code of Python's and PyTorch's reads of
  its own modules, functions and classes.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from itertools import chain
from types import ModuleType
from typing import Any

from torch import Tensor

from millstream.capture.guards.breaks import original_of
from millstream.capture.guards.guards import Guards
from millstream.capture.lines import is_called_by_models, is_users
from millstream.capture.record.location import MISSING as NOTHING
from millstream.capture.record.location import Location
from millstream.capture.record.paths import (
    PLACES,
    identity_of,
    is_namespace,
    items_of,
    location_of,
    path_of,
    place_of,
    places_in,
)
from millstream.capture.record.reads import IS_HEAP_TYPE, MISSING, WHOLE, Kind, Read, Write, behind, is_a
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.contents import Answers, is_container
from millstream.capture.state.discover import MAX_ITEMS
from millstream.capture.state.relevant import counts, is_fixed, is_library
from millstream.capture.state.signature import SCALARS, is_same, kind_of, whole_form_of
from millstream.capture.trace.request import Request, Traced


def add_recorded(guards: Guards, request: Request, traced: Traced, used: Container[int]) -> None:
    """Expect what was read to be as it was, where no other condition says so.

    Args:
        guards: What is expected.
        request: What was traced.
        traced: The trace.
        used: By id, tensors that are state of the graph.
    """
    record, covered = traced.record, _Covered(request, guards, traced.record.given)
    left = places_in(write.location for write in traced.effects.writes)  # with what a call puts there
    for read in (*record.reads, *(write for write in record.writes if write.kind in PLACES)):
        if not counts(read, record) or covered.has(read) or id(read.holder) in traced.effects.targets:
            continue
        if is_a(read, Write) and place_of(read.holder, read.key) in left:
            continue
        if read.kind not in PLACES or is_same(read.now(), read.value):
            _Adding(guards, traced, read, used, covered).add()


def find_borrowed(record: Recorder) -> dict[Location, Any]:
    """What code of users, libraries and PyTorch's models took from PyTorch and from Python's library, and where it is.

    Notebooks and libraries replace such things: ``F.gelu = fast_gelu``, ``nn.Linear.forward = f``. Of values that are
    not called only flags count, and those that the user's code reads: others, such as counters, change by themselves.
    """
    found: dict[Location, Any] = {}
    for read in record.reads:
        file, holder, key = read.code.co_filename, read.holder, read.key
        is_theirs = is_users(file)
        if not (is_theirs or is_called_by_models(file)) or type(key) is not str:
            continue
        if is_a(holder, type) and holder.__module__.startswith("millstream"):
            continue
        if read.kind is Kind.CLASS and is_fixed(holder) and holder.__flags__ & IS_HEAP_TYPE:
            prefix, holder = holder.__qualname__, behind(vars(holder))
        elif read.kind is Kind.ITEM and is_namespace(holder) and is_library(holder["__name__"]):
            prefix = holder["__name__"]
        else:
            continue
        value = original_of(holder.get(key, NOTHING))
        is_absent = value is NOTHING and read.kind is Kind.CLASS
        if is_absent or _is_code(value) or (is_theirs and is_a(value, SCALARS)):
            found[Location(holder, key, f"{prefix}.{key}")] = value
    return found


def _is_code(value: Any) -> bool:
    """Return whether it is called, has attributes that are, or says in which way code goes."""
    return callable(value) or is_a(value, (ModuleType, bool)) or hasattr(type(value), "__get__")


class _Adding:
    """One read that becomes a condition."""

    def __init__(self, guards: Guards, traced: Traced, read: Read, used: Container[int], covered: _Covered) -> None:
        self._guards, self._record, self._read, self._used = guards, traced.record, read, used
        self._looked_at, self._covered = traced.looked_at, covered

    def add(self) -> None:
        guards, read = self._guards, self._read
        holder, name = read.holder, path_of(read, self._record)
        if read.kind is Kind.TENSOR:
            origin = self._record.origin_of(holder)
            place = None if origin is None else location_of(origin, self._record)
            guards.expect_form(place or Location([holder], 0, name), whole_form_of)
        elif read.kind is Kind.TYPE:
            guards.pin(holder)
            if not (is_a(holder, type) or is_library(type(holder).__module__)):
                guards.pin(type(holder))
        elif read.kind is Kind.CODE:
            guards.pin(holder)
            for key, value in (holder.__kwdefaults__ or {}).items():
                self._expect(Location(holder.__kwdefaults__, key, key), value)
        elif read.kind in (Kind.LENGTH, Kind.CONTENTS):
            if is_a(holder, functools._lru_cache_wrapper):
                guards.measure(f"{name}()", Answers(holder))
            elif is_container(holder):
                guards.measure(name, holder, is_ordered=read.kind is Kind.CONTENTS)
                self._add_items(name)
        elif (place := location_of(read, self._record)) is not None:
            self._expect(place, NOTHING if read.value is MISSING else read.value)

    def _expect(self, place: Location, value: Any) -> None:
        if is_a(value, Tensor) and id(value) not in self._used:  # the graph does not read it
            self._guards.expect_form(place, whole_form_of if id(value) in self._looked_at else kind_of)
        else:
            self._guards.expect(place, value)

    def _add_items(self, name: str) -> None:
        holder = self._read.holder
        if self._read.kind is Kind.CONTENTS and is_a(holder, list | dict) and len(holder) <= MAX_ITEMS:
            keys = dict.keys(holder) if is_a(holder, dict) else range(len(holder))
            for key in [*keys]:
                value = dict.get(holder, key) if is_a(holder, dict) else list.__getitem__(holder, key)
                place = Location(items_of(holder), key, f"{name}[{key!r}]" if type(key) in (int, str) else name)
                if not self._covered.has_place(place):  # such as of a number that the graph is given anew
                    self._expect(place, value)


class _Covered:
    """All that the guards of a graph look at, by where it is."""

    def __init__(self, request: Request, guards: Guards, given: frozenset[int]) -> None:
        self._lengths: set[int] = set()
        self._contents: set[int] = set()
        self._pinned: set[int] = set()
        self._tensors = {id(entry.tensor) for entry in request.state} | {*map(id, request.arguments)}
        self._tensors |= {id(gradient) for gradient in guards.gradients if gradient is not None}
        self._given = given | {*map(id, request.arguments)}
        known = (guards.entries.names, guards.absent.names, guards.cells.names)
        forms = (pair[1] for pair in guards.forms.things)
        self._places = places_in((*chain(*known), *forms, *(number.location.entry for number in request.numbers)))
        for check in (guards.sizes, guards.orders, guards.contents):
            self._lengths.update(map(identity_of, check.things))
        self._contents.update(map(identity_of, (*guards.orders.things, *guards.contents.things)))
        for check in (*guards.pins, guards.dicts):
            self._pinned.update(map(id, check.things))

    def has_place(self, place: Location) -> bool:
        """Return whether what is there is looked at, or given anew."""
        return place_of(place.holder, place.key) in self._places

    def has(self, read: Read) -> bool:
        """Return whether a read would be noticed if it gave something else."""
        holder, kind, key, value = read.holder, read.kind, read.key, read.value
        if id(holder) in self._given or id(read.owner) in self._given:  # which calls are told apart by
            return True
        if type(read.owner).__module__.startswith("torch.backends"):  # switches, likewise
            return True
        if is_a(read.owner, Tensor) and kind is Kind.ITEM:  # a traced one has another dict
            return place_of(vars(read.owner), key) in self._places
        if kind is Kind.TENSOR:
            return id(holder) in self._tensors
        if kind is Kind.CELL:
            return place_of(holder, None) in self._places
        if kind in PLACES:
            is_counted = value is MISSING and identity_of(holder) in self._lengths  # nothing can be added unnoticed
            return is_counted or place_of(holder, key) in self._places or identity_of(holder) in self._contents
        if kind is Kind.LENGTH:
            has_entries = is_a(holder, dict) and any(place_of(holder, each) in self._places for each in holder)
            return identity_of(holder) in self._lengths or (has_entries and not is_users(read.code.co_filename))
        if kind is Kind.CONTENTS:
            if is_a(holder, functools._lru_cache_wrapper):
                return False
            if is_a(holder, WHOLE):
                return identity_of(holder) in self._contents
            keys = [*holder] if is_a(holder, dict) else range(len(holder))
            has_all = all(place_of(holder, each) in self._places for each in keys)
            return (has_all and identity_of(holder) in self._lengths) or identity_of(holder) in self._contents
        return id(holder) in self._pinned
