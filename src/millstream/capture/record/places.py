"""What tells one place of the user's objects from another, in records and elsewhere."""

from __future__ import annotations

from typing import Any

from millstream.capture.record.reads import behind
from millstream.capture.state.location import Attributes, Items, SequenceItems

Place = tuple[Any, ...]


def place_of(holder: Any, key: Any) -> Place:
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
