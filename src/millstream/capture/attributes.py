"""Attributes that no ``__dict__`` gives access to, those of classes and those in slots, in the form of dicts."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any


class Attributes(MutableMapping[str, Any]):
    """Attributes of one owner: no property is evaluated and no ``__setattr__`` of the user's runs."""

    def copy(self) -> dict[str, Any]:
        """What is there now."""
        return dict(self)

    def view(self) -> Mapping[str, Any]:
        """The quickest way to look things up."""
        return self

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ClassAttributes(Attributes):
    """What a class itself holds; the objects are raw, as in its body."""

    def __init__(self, owner: type) -> None:
        self._owner = owner
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
        self._owner = owner
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
