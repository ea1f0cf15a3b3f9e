"""One place in the user's objects: an entry of a dict or list, a closure cell, an attribute.

Everything that capture knows about a value of the user's (how it was found, what it must still be, what the step made
of it, what a call puts there) is kept as the place and what was, is or shall be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from operator import getitem
from types import CellType
from typing import Any, Self
from weakref import WeakValueDictionary

from millstream.tree.containers import plain_base, slots_of

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

    @property
    def entry(self) -> Location:
        """Of an item of a tuple or list that stands at some location, that location; otherwise this one."""
        return self.holder.location if isinstance(self.holder, SequenceItems) else self

    def get(self) -> Any:
        """Return what is there now, or ``MISSING``."""
        try:
            return (
                self.holder.cell_contents if isinstance(self.holder, CellType) else looked_into(self.holder)[self.key]
            )
        except (KeyError, IndexError, ValueError):
            return MISSING

    def reader(self) -> Callable[[], Any]:
        """Return what gives what is there now, without code of ours if that can be.

        It raises where there is nothing.
        """
        if isinstance(self.holder, CellType):
            return partial(getattr, self.holder, "cell_contents")
        return partial(getitem, looked_into(self.holder), self.key)

    def set(self, value: Any) -> None:
        """Put ``value`` there; ``MISSING`` removes the entry."""
        if value is MISSING:
            del self.holder[self.key]
        elif isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, MutableMapping) or self.key < len(self.holder):
            self.holder[self.key] = value


def looked_into(holder: Any) -> Any:
    """Return what gives a holder's items, without code of ours if that can be, and makes none that is not there."""
    if isinstance(holder, Attributes):
        return holder.view()
    return Items.of(holder) if isinstance(holder, dict) and hasattr(type(holder), "__missing__") else holder


class Attributes(MutableMapping[Any, Any]):
    """Attributes of one owner, in the form of a dict: no property is evaluated, no ``__setattr__`` of the user's runs.

    What is not said otherwise can be neither removed nor gone through.
    """

    @classmethod
    def of(cls, owner: Any) -> Self:
        """One object for one owner, as long as anybody holds it: holders are told apart by identity."""
        made = _made.get((cls, id(owner)))
        if made is None:
            _made[cls, id(owner)] = made = cls(owner)
        return made

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __eq__(self, other: object) -> bool:
        """Return whether these are attributes of the same owner, whatever they are."""
        return type(other) is type(self) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((type(self), self._identity()))

    def _identity(self) -> Any:
        return id(self._owner)

    def view(self) -> Mapping[str, Any]:
        """The quickest way to look things up."""
        return self

    def __delitem__(self, key: Any) -> None:
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(["value"] if "value" in self else [])

    def __len__(self) -> int:
        return sum(1 for _ in self)


_made: WeakValueDictionary[tuple[type, int], Any] = WeakValueDictionary()


class ClassAttributes(Attributes):
    """The attributes that a class itself holds; the objects are raw, as in its body."""

    def view(self) -> Mapping[str, Any]:
        """A mapping without code of ours."""
        return vars(self._owner)

    def __getitem__(self, key: str) -> Any:
        return vars(self._owner)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        type.__setattr__(self._owner, key, value)

    def __delitem__(self, key: str) -> None:
        type.__delattr__(self._owner, key)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._owner))


class SlotAttributes(Attributes):
    """The attributes that an object holds in the slots of its classes.

    Attributes:
        members: All slots by name, also those that hold nothing.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.members = slots_of(type(owner))

    def __getitem__(self, key: str) -> Any:
        try:
            return self._slot(key).__get__(self._owner)
        except AttributeError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._slot(key).__set__(self._owner, value)

    def __delitem__(self, key: str) -> None:
        self._slot(key).__delete__(self._owner)

    def _slot(self, key: str) -> Any:
        """Of a class in C, what stands for it there, such as a function's ``__name__``."""
        held = (vars(kind).get(key) for kind in type(self._owner).__mro__)
        return self.members.get(key) or next(each for each in held if each is not None)

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.members if key in self)


class ContextValue(Attributes):
    """The value of a context variable here, under the key ``value``."""

    def __getitem__(self, key: str) -> Any:
        try:
            return self._owner.get()
        except LookupError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._owner.set(value)

    def __delitem__(self, key: str) -> None:
        """Leave it: a variable cannot be unset."""


class TensorItem(Attributes):
    """The number in a tensor on the host, under the key ``value``."""

    def __getitem__(self, key: str) -> Any:
        return self._owner.item()

    def __setitem__(self, key: str, value: Any) -> None:
        self._owner.fill_(value)


class SequenceItems(Attributes):
    """Items of a tuple or list that stands at some location: to set one puts another tuple there."""

    @property
    def location(self) -> Location:
        """Where the tuple or list is."""
        return self._owner  # type: ignore[no-any-return]

    def _identity(self) -> Any:
        return self._owner

    def __getitem__(self, key: Any) -> Any:
        held = self._owner.get()
        if not isinstance(held, tuple | list) or key >= len(held):
            raise KeyError(key)
        return held[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        held = self._owner.get()
        items = [*held]
        items[key] = value
        self._owner.set(type(held)(items))


class SharedEntries(Attributes):
    """Entries that several dicts have in common: the same number with each, or there is none."""

    @property
    def owners(self) -> tuple[dict[str, Any], ...]:
        """The dicts."""
        return self._owner  # type: ignore[no-any-return]

    def _identity(self) -> Any:
        return tuple(map(id, self._owner))

    def __getitem__(self, key: str) -> Any:
        first = self._owner[0][key]
        for entry in self._owner:
            value = entry[key]
            if value is not first and (type(value) is not type(first) or value != first):
                raise KeyError(key)
        return first

    def __setitem__(self, key: str, value: Any) -> None:
        for entry in self._owner:
            entry[key] = value

    def __delitem__(self, key: str) -> None:
        for entry in self._owner:
            del entry[key]


class Items(Attributes):
    """Items of a dict of a class that has methods of its own, past these.

    Attributes:
        owner: The dict.
    """

    def __init__(self, owner: dict[Any, Any]) -> None:
        super().__init__(owner)
        self.owner = owner
        self._plain = plain_base(type(owner))

    def __getitem__(self, key: Any) -> Any:
        if (item := dict.get(self.owner, key, MISSING)) is MISSING:  # ``dict.__getitem__`` would call ``__missing__``
            raise KeyError(key)
        return item

    def __setitem__(self, key: Any, value: Any) -> None:
        self._plain.__setitem__(self._owner, key, value)

    def __delitem__(self, key: Any) -> None:
        self._plain.__delitem__(self._owner, key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._plain.__iter__(self._owner))

    def __len__(self) -> int:
        return dict.__len__(self._owner)
