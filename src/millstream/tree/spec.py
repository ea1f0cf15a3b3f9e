"""The structure of a tree without its leaves: hashable, and able to make values again.

Two trees with equal structures differ in nothing but their leaves.
"""

from __future__ import annotations

import enum
import weakref
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from millstream.tree.containers import form_of_class, set_attributes

SCALARS = (
    *(bool, int, float, complex, np.number, np.bool_, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, enum.Enum),
)
"""Types whose values are compared by value; all other objects are compared by identity."""


class Leaf(NamedTuple):
    """The place of a leaf."""

    index: int  # which of the leaves


@dataclass(slots=True, eq=False)
class PlainValue:
    """A Python value, compared by type and value.

    ``True``, ``1`` and ``1.0`` differ, and so do zeros by their sign; a NaN is the same as another.
    """

    type: type
    value: Hashable
    compared: Hashable = field(init=False)

    def __post_init__(self) -> None:
        value: Any = self.value
        if issubclass(type(value), float | complex | np.inexact):  # a stand-in is to be asked nothing
            self.compared = (None if value != value else value, f"{value}")
        elif isinstance(value, tuple | frozenset):  # among the keys of a dict
            self.compared = (tuple if isinstance(value, tuple) else frozenset)(
                PlainValue(type(each), each) for each in value
            )
        else:
            self.compared = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainValue) and other.type is self.type and bool(other.compared == self.compared)

    def __hash__(self) -> int:
        return hash((self.type, self.compared))


@dataclass(frozen=True, slots=True)
class Number:
    """The place of an ``int`` or ``float``, or one of NumPy's, that may be another in each call."""

    type: type


@dataclass(slots=True, eq=False)
class Reference:
    """An object that is used as it is: compared by identity and kept alive."""

    target: Any
    content: bytes = b""  # of an array of NumPy's, which may be filled anew for each call

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other.target is self.target and other.content == self.content

    def __hash__(self) -> int:
        return id(self.target)


@dataclass(frozen=True, slots=True)
class Around:
    """A weak reference to an object around it."""

    index: int  # which of those, from the outermost


@dataclass(frozen=True, slots=True)
class Again:
    """A container that stands at another place, too."""

    index: int  # which of all but plain tuples, in the order in which they are complete


class Container(NamedTuple):
    """A container or an object with attributes."""

    type: type  # its class
    compared_keys: tuple[str | PlainValue, ...]  # of a dict, otherwise empty
    children: tuple[Any, ...]  # structures of its items, and then of its attributes
    # names of its attributes, fields of a dataclass among them; ``None`` where they are the items of a dict
    attributes: tuple[str, ...] | None = ()
    extra: Any = None  # what else its class needs to make one, see ``Form``

    @property
    def is_object(self) -> bool:
        """Whether it is of an opened class: it has no items, and is no dataclass."""
        return form_of_class(self.type).items is None and not is_dataclass(self.type)

    @property
    def keys(self) -> list[Any]:
        """Those of a dict."""
        return [key.value if isinstance(key, PlainValue) else key for key in self.compared_keys]

    @property
    def num_items(self) -> int:
        """How many of the children are items."""
        return len(self.children) - len(self.attributes or ())


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """In ``Container.extra``: a function of its own makes it of the children."""

    make: Callable[[list[Any]], Any]
    label: Callable[[int], str]  # what a child is called


Structure: TypeAlias = Leaf | PlainValue | Number | Reference | Around | Again | Container


def keys_of(value: Any) -> tuple[Any, ...]:
    """Return what is compared of a dict's keys: their order, types and values."""
    keys = tuple(value)
    return keys if {*map(type, keys)} <= {str} else tuple(PlainValue(type(key), key) for key in keys)


def without_order(structure: Structure) -> Structure:
    """The same with the items of sets in an order that only they decide: a copy of a set may have another one."""
    if type(structure) is not Container:
        return structure
    children = [without_order(child) for child in structure.children]
    if issubclass(structure.type, set | frozenset):
        children[: structure.num_items] = sorted(children[: structure.num_items], key=repr)
    return structure._replace(children=tuple(children))


def tree_unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Build a value of ``structure`` with these in the places of its leaves.

    Neither ``__init__`` nor another method of the user's classes is run: what it has set is among the attributes.
    """
    return _build(structure, leaves, [], ())


def _build(structure: Structure, leaves: Sequence[Any], made: list[Any], around: tuple[Any, ...]) -> Any:
    kind = type(structure)
    if kind is Leaf:
        return leaves[structure.index]  # type: ignore[union-attr]
    if kind is Container:
        return _build_container(structure, leaves, made, around)  # type: ignore[arg-type]
    if isinstance(structure, PlainValue):
        return structure.value
    if isinstance(structure, Reference):
        return structure.target
    if isinstance(structure, Again):
        return made[structure.index]
    assert isinstance(structure, Around)
    return weakref.ref(around[structure.index])


def _build_container(structure: Container, leaves: Sequence[Any], made: list[Any], around: tuple[Any, ...]) -> Any:
    kind, _, children, attributes, extra = structure
    is_plain = kind in (tuple, list, dict)
    form = None if is_plain or type(extra) is Made else form_of_class(kind)
    result = form.make(kind, (), (), None) if form is not None and form.items is None else None
    if result is not None and structure.is_object:
        around = (*around, result)
    parts = [_build(child, leaves, made, around) for child in children]
    if type(extra) is Made:
        result = extra.make(parts)
    elif form is None:
        result = (
            parts if kind is list else tuple(parts) if kind is tuple else dict(zip(structure.keys, parts, strict=True))
        )
    else:
        num_items = structure.num_items
        result = form.make(kind, structure.keys, parts[:num_items], extra) if result is None else result
        if attributes is None:
            result.__dict__ = result
        elif attributes:
            set_attributes(result, zip(attributes, parts[num_items:], strict=True))
    if kind is not tuple or type(extra) is Made:
        made.append(result)
    return result


def replace_numbers(structure: Structure, values: Iterator[Structure]) -> Structure:
    """Put the next of ``values`` in the place of each number, depth first."""
    if isinstance(structure, Number):
        return next(values)
    if isinstance(structure, Container):
        return structure._replace(children=tuple(replace_numbers(child, values) for child in structure.children))
    return structure


def walk(structure: Structure, name: str) -> Iterator[tuple[str, Structure]]:
    """All parts of ``structure`` but containers, depth first, named as a user would write them: ``batch['x'][0]``."""
    if isinstance(structure, Container):
        for label, child in zip(_labels_of(structure), structure.children, strict=True):
            yield from walk(child, name + label)
    elif not isinstance(structure, Again):
        yield name, structure


def _labels_of(structure: Container) -> Iterator[str]:
    kind, extra = structure.type, structure.extra
    if type(extra) is Made:
        yield from map(extra.label, range(len(structure.children)))
        return
    if structure.keys:
        yield from (f"[{key!r}]" for key in structure.keys)
    else:
        fields = getattr(kind, "_fields", ())
        label = " (an element)" if issubclass(kind, set | frozenset) else "[{}]"
        for i in range(structure.num_items):
            yield f".{fields[i]}" if i < len(fields) else label.format(i)
    for name in structure.attributes or ():  # the items of a UserDict are those of a dict in it
        yield "" if name == "data" and issubclass(kind, UserDict) else f".{name}"


def walk_arguments(structure: Structure, parameters: Sequence[str]) -> Iterator[tuple[str, Structure]]:
    """The same for the structure of ``(args, kwargs)`` of a function with these parameters."""
    assert isinstance(structure, Container)
    positional, keywords = structure.children
    for index, child in enumerate(positional.children):
        yield from walk(child, parameters[index] if index < len(parameters) else f"args[{index}]")
    for key, child in zip(keywords.keys, keywords.children, strict=True):
        yield from walk(child, str(key))


def kinds_of(structure: Structure) -> set[type]:
    """The classes of the containers in ``structure``, but for Python's most plain ones."""
    if not isinstance(structure, Container):
        return set()
    return {structure.type}.union(*map(kinds_of, structure.children)) - {tuple, list, dict, set, frozenset}
