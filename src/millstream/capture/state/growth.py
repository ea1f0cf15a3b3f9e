"""Lists that a step lets grow and does nothing else with, as ``losses.append(loss.item())`` does.

What such a list holds is none of a graph's concern: it is not compared before a replay, and what is appended is
appended again in each call. Whether code looks into it is read from the code, by the names that the list has there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CellType, CodeType
from typing import Any

from millstream.capture.lines import is_part_of_project
from millstream.capture.state.code import instructions_of, is_method_load
from millstream.capture.state.executed import Ran, name_of
from millstream.capture.state.location import Attributes
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


def is_only_grown(held: list[Any], snapshot: Snapshot, ran: Ran, computed: Iterable[int]) -> bool:
    """Whether nothing that has run has looked into a list.

    Args:
        held: The list.
        snapshot: Has the places where it is.
        ran: What has run.
        computed: By id, objects whose attributes may have been read by names that do not stand in code.
    """
    names: set[str] = set()
    whole: set[str] = set()
    items: set[tuple[str, Any]] = set()
    for place in (places := snapshot.places_of(held)):
        if not isinstance(place.holder, CellType | dict | Attributes) or not isinstance(name_of(place), str):
            return False
        if not snapshot.is_item(place):
            if id(place.holder) in computed or id(getattr(place.holder, "_owner", None)) in computed:
                return False
            names.add(name_of(place))
            continue
        for outer in (outers := snapshot.places_of(place.holder)):
            if snapshot.is_item(outer) or not isinstance(name_of(outer), str) or id(outer.holder) in computed:
                return False
            whole.add(name_of(outer))
            items.add((name_of(outer), place.key))
        if not outers:
            return False
    if not places or ran.codes is None:
        return False
    for code in ran.codes:
        if is_part_of_project(code.co_filename) or (names | whole).isdisjoint(
            (*code.co_names, *code.co_freevars, *code.co_cellvars)
        ):
            continue
        uses = uses_of(code)
        if not (names.isdisjoint(uses.read) and whole.isdisjoint(uses.whole) and items.isdisjoint(uses.items)):
            return False
    return True
