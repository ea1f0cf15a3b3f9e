"""Every kind of container, in one table: how its items are listed, and how one is made of others.

No code of the user's runs for either: attributes and slots are read and set past properties and ``__setattr__``.
"""

from __future__ import annotations

import types
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import is_dataclass
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary


class ContainerForm(NamedTuple):
    """The way in which containers of a class, and of classes that inherit from it, are taken apart and made."""

    items: Callable[[Any], Iterable[Any]] | None  # lists them; ``None`` where attributes are all there is
    make: Callable[[Any, Any, Any, Any], Any]  # of the class, its keys, items and ``extra``; without attributes
    extra: Callable[[Any], Any] | None = None  # what it has beside items and attributes


def _make_tuple(kind: Any, _: Any, items: Any, __: Any) -> Any:
    try:
        return tuple.__new__(kind, items)
    except TypeError:  # it is written in C
        return kind(items)


def _make_list(kind: Any, _: Any, items: Any, __: Any) -> Any:
    made = list.__new__(kind)
    list.extend(made, items)
    return made


def _make_deque(kind: Any, _: Any, items: Any, maxlen: Any) -> Any:
    made = deque.__new__(kind)
    deque.__init__(made, items, maxlen)
    return made


def _make_set(kind: Any, _: Any, items: Any, __: Any) -> Any:
    if issubclass(kind, frozenset):
        return frozenset.__new__(kind, items)
    made = set.__new__(kind)
    set.update(made, items)
    return made


def _make_dict(kind: Any, keys: Any, items: Any, factory: Any) -> Any:
    plain = plain_base(kind)
    made = plain.__new__(kind)
    if factory is not None:
        made.default_factory = factory
    for key, item in zip(keys, items, strict=True):
        plain.__setitem__(made, key, item)
    return made


def _make_object(kind: Any, *_: Any) -> Any:
    return blank(kind)


def blank(kind: type) -> Any:
    """An object of a class without attributes; no code of the class runs.

    Raises:
        TypeError: It is written in C, and keeps what nobody can see.
    """
    base = types.SimpleNamespace if issubclass(kind, types.SimpleNamespace) else object
    return base.__new__(kind)


_FORMS: tuple[tuple[Any, ContainerForm], ...] = (
    (tuple, ContainerForm(iter, _make_tuple)),
    (list, ContainerForm(iter, _make_list)),
    (defaultdict, ContainerForm(dict.values, _make_dict, attrgetter("default_factory"))),
    (dict, ContainerForm(dict.values, _make_dict)),
    (deque, ContainerForm(iter, _make_deque, attrgetter("maxlen"))),
    ((set, frozenset), ContainerForm(iter, _make_set)),
    (
        object,
        ContainerForm(None, _make_object),
    ),  # dataclasses, classes of attrs and pydantic, ``UserDict``, namespaces, ...
)


def form_of_class(kind: type) -> ContainerForm:
    """The row of the table that a class belongs to."""
    return next(form for base, form in _FORMS if issubclass(kind, base))


def is_open_container(value: Any) -> bool:
    """Return whether it is taken apart wherever it stands: lists, tuples, dicts and dataclasses are."""
    return isinstance(value, tuple | list | dict) or (is_dataclass(value) and not isinstance(value, type))


def parts_of(container: Any) -> list[Any]:
    """Items and attributes of what is taken apart."""
    items = container.values() if isinstance(container, dict) else container
    held = attributes_beside(container) or {}
    return [*(items if isinstance(container, tuple | list | dict) else ()), *held.values()]


def containers_in(value: Any, opened: Container[type]) -> dict[int, Any]:
    """By id, the containers and objects of opened classes within a value, and it."""
    waiting, found = [value], dict[int, Any]()
    while waiting:
        value = waiting.pop()
        if (is_open_container(value) or type(value) in opened) and id(value) not in found:
            found[id(value)] = value
            waiting += parts_of(value)
    return found


def attributes_beside(value: Any) -> dict[str, Any] | None:
    """Attributes of a container beside its items, or of a dataclass; ``None`` where they are the items of a dict."""
    own = _dict_of(value)
    if own is value:
        return None
    held = {} if own is None else {**own}
    for name, member in slots_of(type(value)).items():
        with suppress(AttributeError):  # nothing is there
            held[name] = member.__get__(value)
    return held


def set_attributes(made: Any, attributes: Iterable[tuple[str, Any]]) -> None:
    """Without asking the class, which may refuse, count or convert."""
    members, own = slots_of(type(made)), _dict_of(made)
    for name, value in attributes:
        if name in members:
            members[name].__set__(made, value)
        else:
            assert own is not None
            own[name] = value


def _dict_of(value: Any) -> dict[str, Any] | None:
    try:
        return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return None


_slots: WeakKeyDictionary[type, dict[str, Any]] = WeakKeyDictionary()


def slots_of(kind: type) -> dict[str, Any]:
    """The slots of a class and its bases, by name. Shared: not to be changed."""
    known = _slots.get(kind)
    if known is None:
        known = _slots[kind] = {
            name: member
            for base in reversed(kind.__mro__)
            if "__slots__" in vars(base)
            for name, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType)
        }
    return known


def plain_base(kind: type) -> Any:
    """Of a class of dicts, the base of Python's, whose methods are none of the user's."""
    return next(base for base in kind.__mro__ if base.__module__ in ("builtins", "collections"))
