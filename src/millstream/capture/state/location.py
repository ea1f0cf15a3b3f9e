"""One place in the user's objects: an entry of a dict or list, a closure cell, an attribute.

Everything that capture knows about a value of the user's (how it was found, what it must still be, what the step made
of it, what a call puts there) is kept as the place and what was, is or shall be there.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from operator import getitem
from types import CellType
from typing import Any

from millstream.capture.state.attributes import Attributes

MISSING: Any = object()
"""Stands for an entry that is not there."""


@dataclass(frozen=True, slots=True, eq=False)
class Location:
    """A place that holds one thing. Two are equal if they are the same place of the same holder."""

    holder: Any  # a dict, list, closure cell, or attributes in the form of a dict (``Attributes``)
    key: Any  # key or index in the holder; ``None`` for a cell, or for all that a container holds
    name: str = ""  # how a user would write it, such as ``self.model``

    def __hash__(self) -> int:
        return hash((self.holder if isinstance(self.holder, Attributes) else id(self.holder), self.key))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Location)
            and (self.holder is other.holder or (isinstance(self.holder, Attributes) and self.holder == other.holder))
            and (self.key is other.key or (type(self.key) is type(other.key) and bool(self.key == other.key)))
        )

    def __str__(self) -> str:
        return self.name or str(self.key)

    def get(self) -> Any:
        """What is there now, or ``MISSING``."""
        try:
            return self.holder.cell_contents if isinstance(self.holder, CellType) else self.holder[self.key]
        except (KeyError, IndexError, ValueError):
            return MISSING

    def reader(self) -> Callable[[], Any]:
        """What gives what is there now, without code of ours if that can be; it raises where there is nothing."""
        if isinstance(self.holder, CellType):
            return partial(getattr, self.holder, "cell_contents")
        return partial(getitem, self.holder.view() if isinstance(self.holder, Attributes) else self.holder, self.key)

    def set(self, value: Any) -> None:
        """Put ``value`` there; ``MISSING`` removes the entry."""
        if value is MISSING:
            del self.holder[self.key]
        elif isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, MutableMapping) or self.key < len(self.holder):
            self.holder[self.key] = value


@dataclass(frozen=True, slots=True)
class Entry:
    """A place, and what was found there."""

    location: Location  # the place
    value: Any  # what was there, or ``MISSING``
