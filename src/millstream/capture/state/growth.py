"""Lists that a step lets grow and does nothing else with, as ``losses.append(loss.item())`` does.

What such a list holds is none of a graph's concern: it is not compared before a replay, and what is appended is
appended again in each call. Whether code looks into it is read from the code, by the names that the list has there;
what that does not show, a second trace does, with other things in the list.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from dataclasses import dataclass, field
from types import CellType, CodeType
from typing import Any

from millstream.capture.lines import is_part_of_project
from millstream.capture.state.code import instructions_of, is_method_load
from millstream.capture.state.executed import Ran, name_of
from millstream.capture.state.location import Attributes, Location
from millstream.capture.state.snapshot import Snapshot

_GROWING = ("append", "extend")
_NAMING = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
_NOTHING = ("PUSH_NULL", "PRECALL", "NOP", "RESUME")


@dataclass
class Uses:
    """What code does with values that it finds by name, other than to let them grow. Shared: not to be changed."""

    read: set[str] = field(default_factory=set)  # anything
    whole: set[str] = field(default_factory=set)  # anything but to read an item whose key stands in the code
    items: set[tuple[str, Any]] = field(default_factory=set)  # name and key of those


@functools.lru_cache(maxsize=65536)
def uses_of(code: CodeType) -> Uses:
    """What some code does with what it finds by name, functions within it apart."""
    found = Uses()
    items = [item for item in instructions_of(code) if item.opname not in _NOTHING]
    for position, item in enumerate(items):
        is_named = item.opname in _NAMING or item.opname.startswith(("LOAD_FROM_DICT", "LOAD_SUPER"))
        first, second, third = [*items[position + 1 : position + 4], None, None, None][:3]
        if not is_named or _lets_grow(first):
            continue
        found.read.add(item.argval)
        is_item = first is not None and second is not None and second.opname == "BINARY_SUBSCR"
        if not is_item or not first.opname.startswith("LOAD_"):  # type: ignore[union-attr]
            found.whole.add(item.argval)
        elif not _lets_grow(third):
            if first.opname == "LOAD_CONST":  # type: ignore[union-attr]
                found.items.add((item.argval, first.argval))  # type: ignore[union-attr]
            else:
                found.whole.add(item.argval)
    return found


def _lets_grow(item: Any) -> bool:
    return item is not None and is_method_load(item) and item.argval in _GROWING


def is_only_grown(held: list[Any], snapshot: Snapshot, ran: Ran, computed: Container[int]) -> bool:
    """Whether nothing that has run has looked into a list.

    Args:
        held: The list.
        snapshot: Has the places where it is.
        ran: What has run.
        computed: By id, objects whose attributes may have been read by names that do not stand in code.
    """
    sought = _Sought.of(held, snapshot, computed)
    if sought is None or ran.codes is None:
        return False
    for code in {*ran.codes}:  # what this calls is added
        if is_part_of_project(code.co_filename):
            continue
        named = (*code.co_names, *code.co_freevars, *code.co_cellvars)
        if not (sought.names | sought.whole).isdisjoint(named) and sought.is_in(uses_of(code)):
            return False
    return True


@dataclass
class _Sought:
    """By what names code finds a list, or a dict that has it."""

    names: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)  # of dicts
    items: set[tuple[str, Any]] = field(default_factory=set)  # and with the list's key in them

    @classmethod
    def of(cls, held: list[Any], snapshot: Snapshot, computed: Container[int]) -> _Sought | None:
        """``None`` where it may be found otherwise."""
        found = cls()
        for place in (places := snapshot.places_of(held)):
            if not isinstance(place.holder, CellType | dict | Attributes) or not isinstance(name_of(place), str):
                return None
            outers = snapshot.places_of(place.holder) if snapshot.is_item(place) else [place]
            if not outers or not all(_is_named(outer, snapshot, computed) for outer in outers):
                return None
            for outer in outers:
                if outer is place:
                    found.names.add(name_of(place))
                else:
                    found.whole.add(name_of(outer))
                    found.items.add((name_of(outer), place.key))
        return found if places else None

    def is_in(self, uses: Uses) -> bool:
        """Whether some code looks into it."""
        apart = self.names.isdisjoint(uses.read), self.whole.isdisjoint(uses.whole), self.items.isdisjoint(uses.items)
        return not all(apart)


def _is_named(place: Location, snapshot: Snapshot, computed: Container[int]) -> bool:
    """Whether code finds what stands there by no other name than that of the variable or attribute."""
    is_computed = id(place.holder) in computed or id(getattr(place.holder, "_owner", None)) in computed
    return isinstance(name_of(place), str) and not snapshot.is_item(place) and not is_computed
