"""Paths of reads and writes: as a location, as a user would write it, and as what tells places apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millstream.capture.record.location import (
    Attributes,
    ClassAttributes,
    ContextValue,
    Items,
    Location,
    SequenceItems,
    SharedEntries,
    SlotAttributes,
)
from millstream.capture.record.reads import Kind, Read, behind
from millstream.capture.record.recorder import Recorder

MAX_PATH = 8
"""So many steps of the way to what was read are told in its name."""

PLACES = (Kind.ITEM, Kind.SLOT, Kind.CLASS, Kind.CELL, Kind.CONTEXT)
"""What holds one thing."""


def location_of(read: Read, record: Recorder) -> Location | None:
    """The place that was read; ``None`` where there is none."""
    holder, name = read.holder, path_of(read, record)
    if read.kind is Kind.CELL:
        return Location(holder, None, name)
    if read.kind is Kind.CONTEXT:
        return Location(ContextValue.of(holder), read.key, f"{holder.name}.get()")
    if read.kind is Kind.SLOT:
        return Location(SlotAttributes.of(holder), read.key, name)
    if read.kind is Kind.CLASS:
        return Location(ClassAttributes.of(holder), read.key, name)
    if read.kind is not Kind.ITEM:
        return None
    return Location(items_of(holder), read.key, name)


def places_of(held: Any, record: Recorder) -> set[Location | None]:
    """Return where the step has found an object that was there before; ``None`` is among them for what is no place."""
    found: set[Location | None] = set()
    for read in record.reads:
        holder = read.holder
        if not any(each is held for each in read.held()) or not record.was_before(read):
            continue
        if read.kind in PLACES:
            found.add(location_of(read, record))
        elif isinstance(holder, dict | list):
            name, entries = path_of(read, record), dict.items(holder) if isinstance(holder, dict) else enumerate(holder)
            found |= {Location(items_of(holder), key, name) for key, value in entries if value is held}
        else:
            found.add(None)
    return found


def items_of(holder: Any) -> Any:
    """A dict of a class of the user's is looked into past its methods."""
    has_own_methods = isinstance(holder, dict) and type(holder).__module__ not in ("builtins", "collections")
    return Items.of(holder) if has_own_methods else holder


def path_of(read: Read, record: Recorder) -> str:
    """Return how a user would write what was read, such as ``trainer.config['rate']``."""
    parts: list[str] = []
    each: Read | None = read
    while each is not None and len(parts) < MAX_PATH:
        holder, key = each.holder, each.key
        if each.kind is Kind.CELL:
            parts.append(str(each.owner))
            break
        if is_namespace(holder):  # a global variable
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


def places_in(locations: Iterable[Location]) -> set[tuple[Any, ...]]:
    """``place_of`` for each, and for each of those that share one."""
    return {
        place_of(each, location.key)
        for location in locations
        for each in (location.holder.owners if isinstance(location.holder, SharedEntries) else (location.holder,))
    }


def place_of(holder: Any, key: Any) -> tuple[Any, ...]:
    """Return what tells a place from others; both objects must be kept alive as long as it is used."""
    is_plain = isinstance(key, str | int | float | bytes)
    return identity_of(holder), type(key) if is_plain else None, key if is_plain else id(key)


def identity_of(holder: Any) -> int:
    """Return what tells a holder from others; attributes of a class are told by the dict that they are in."""
    if isinstance(holder, Items):
        return id(holder.owner)
    if isinstance(holder, SequenceItems):
        return id(holder.location.get())
    if isinstance(holder, Attributes):
        return identity_of(holder._owner)
    return id(behind(vars(holder))) if isinstance(holder, type) else id(behind(holder))


def is_namespace(holder: Any) -> bool:
    """Return whether it has the variables of a Python module."""
    return isinstance(holder, dict) and "__name__" in holder and "__spec__" in holder
