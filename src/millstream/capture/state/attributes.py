"""Attributes of classes, those in slots, and items behind methods of the user's, all in the form of dicts."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Self
from weakref import WeakValueDictionary


class Attributes(MutableMapping[str, Any]):
    """Attributes of one owner: no property is evaluated and no ``__setattr__`` of the user's runs."""

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
        """Whether these are attributes of the same owner, whatever they are."""
        return type(other) is type(self) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((type(self), self._identity()))

    def _identity(self) -> Any:
        return id(self._owner)

    def copy(self) -> dict[str, Any]:
        """What is there now."""
        return dict(self)

    def view(self) -> Mapping[str, Any]:
        """The quickest way to look things up."""
        return self

    def __len__(self) -> int:
        return sum(1 for _ in self)


_made: WeakValueDictionary[tuple[type, int], Any] = WeakValueDictionary()


class ClassAttributes(Attributes):
    """What a class itself holds; the objects are raw, as in its body."""

    def __init__(self, owner: type) -> None:
        super().__init__(owner)
        self._entries = vars(owner)

    def view(self) -> Mapping[str, Any]:
        """A mapping without code of ours."""
        return self._entries

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        type.__setattr__(self._owner, key, value)

    def __delitem__(self, key: str) -> None:
        type.__delattr__(self._owner, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


class SlotAttributes(Attributes):
    """What an object holds in the slots of its classes."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self._members = {
            key: member
            for base in reversed(type(owner).__mro__)
            if "__slots__" in vars(base)
            for key, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType)
        }

    def __getitem__(self, key: str) -> Any:
        try:
            return self._members[key].__get__(self._owner)
        except AttributeError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._members[key].__set__(self._owner, value)

    def __delitem__(self, key: str) -> None:
        self._members[key].__delete__(self._owner)

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._members if key in self)

    def members(self) -> frozenset[str]:
        """Names of all slots, also of those that hold nothing."""
        return frozenset(self._members)

    def has_slots(self) -> bool:
        """Whether there are any."""
        return bool(self._members)


class ContextValue(Attributes):
    """What a context variable gives here, under the key ``value``."""

    def __getitem__(self, key: str) -> Any:
        try:
            return self._owner.get()
        except LookupError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._owner.set(value)

    def __delitem__(self, key: str) -> None:
        """Leave it: a variable cannot be unset."""

    def __iter__(self) -> Iterator[str]:
        return iter(["value"] if "value" in self else [])


class SequenceItems(Attributes):
    """Items of a tuple or list that stands at some location: to set one puts another tuple there."""

    @property
    def location(self) -> Any:
        """Where the tuple or list is."""
        return self._owner

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

    def __delitem__(self, key: Any) -> None:
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(range(len(self._owner.get())))


class Shared(Attributes):
    """Entries that several dicts have in common: the same number with each, or there is none."""

    def __init__(self, owner: tuple[dict[str, Any], ...]) -> None:
        super().__init__(owner)

    def entries(self, key: str) -> Iterator[tuple[int, str]]:
        """The entries one by one, by id of the dict and key."""
        return ((id(entry), key) for entry in self._owner)

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

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner[0])


class TensorItem(Attributes):
    """The number in a tensor on the host, under the key ``value``."""

    def __getitem__(self, key: str) -> Any:
        return self._owner.item()

    def __setitem__(self, key: str, value: Any) -> None:
        self._owner.fill_(value)

    def __delitem__(self, key: str) -> None:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(["value"])


class Items(Attributes):
    """Items of a dict of a class that has methods of its own, past these."""

    def __init__(self, owner: dict[Any, Any]) -> None:
        super().__init__(owner)
        self._plain: Any = next(base for base in type(owner).__mro__ if base.__module__ in ("builtins", "collections"))

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self._owner, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._plain.__setitem__(self._owner, key, value)

    def __delitem__(self, key: Any) -> None:
        self._plain.__delitem__(self._owner, key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._plain.__iter__(self._owner))

    def __len__(self) -> int:
        return dict.__len__(self._owner)
