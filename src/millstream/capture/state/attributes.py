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

    def has_slots(self) -> bool:
        """Whether there are any."""
        return bool(self._members)


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
