"""Take nested arguments and results apart, and put them together again.

Tuples, named tuples, lists, dicts, dataclasses and, where asked for, objects of other classes are taken apart; tensors
are the leaves; everything else is part of the *structure*, which is hashable: two calls with equal structures differ in
nothing but tensors.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import weakref
from collections import UserDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from operator import is_
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from millstream._torch.modes import ambient
from millstream._torch.switches import Settings
from millstream.capture.state.location import plain_base, slots_of

SCALARS = (
    *(bool, int, float, complex, np.number, np.bool_, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, enum.Enum),
)
"""Types whose values are compared by value; all other objects are compared by identity."""

TensorSpec: TypeAlias = tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...], object, bool]
"""Shape, dtype, device, strides, whether a gradient is required (no, yes by a leaf, yes by a computed tensor), and
whether it is a lazy view.
"""


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of a tensor within a structure."""

    index: int  # which of the tensors, each counted once


@dataclass(frozen=True, slots=True)
class Value:
    """A Python value, compared by type and value.

    ``True``, ``1`` and ``1.0`` differ, and so do zeros by their sign; a NaN is the same as another.
    """

    type: type
    value: Hashable = field(compare=False)
    compared: Hashable = field(init=False)

    def __post_init__(self) -> None:
        compared: Hashable = self.value
        if issubclass(type(self.value), float | complex | np.inexact):  # a stand-in is to be asked nothing
            compared = (None if self.value != self.value else self.value, f"{self.value}")
        object.__setattr__(self, "compared", compared)


@dataclass(frozen=True, slots=True)
class Number:
    """The place of an ``int`` or ``float``, or one of NumPy's, that may be another in each call."""

    type: type


_NUMBERS = {kind: Number(kind) for kind in (int, float, np.float64, np.float32, np.int64, np.int32)}


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """An object that is no tensor, container or plain value: compared by identity and kept alive."""

    target: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other.target is self.target

    def __hash__(self) -> int:
        return id(self.target)


@dataclass(frozen=True, slots=True)
class Container:
    """A tuple, list, dict, dataclass, or another object with attributes."""

    type: type  # its class
    keys: tuple[Hashable, ...] = field(compare=False)  # of a dict, otherwise empty; see ``kinds``
    children: tuple[Structure, ...]  # structures of its items, and then of its attributes
    default_factory: Callable[[], Any] | None = None  # that of a ``defaultdict``
    kinds: Any = None  # what is compared of a dict's keys: they, or what also tells equal ones apart
    # names of its attributes, fields of a dataclass among them; ``None`` where they are the items of a dict
    attributes: tuple[str, ...] | None = ()

    @property
    def is_object(self) -> bool:
        """Whether it is of an opened class: neither a tuple, list, dict or set nor a dataclass."""
        return not issubclass(self.type, tuple | list | dict | set | frozenset) and not is_dataclass(self.type)


@dataclass(frozen=True, slots=True)
class Around:
    """A weak reference to an object around it."""

    index: int  # which of those, from the outermost


Structure: TypeAlias = Leaf | Value | Number | Reference | Container | Around


def is_other(number: Any, before: Any) -> bool:
    """Whether two numbers differ, be it by the sign of a zero; a NaN is the same as another."""
    if number != before:
        return bool(number == number or before == before or f"{number}" != f"{before}")
    return not number and f"{number}" != f"{before}"


def is_same(now: Any, value: Any) -> bool:
    """Whether two plain values are equal, or methods are one of one object; others are the same by identity only."""
    if now is value:
        return True
    if type(now) is type(value) is float:  # asked in each call with a number that changes
        return not is_other(now, value)
    if type(now) is not type(value) or issubclass(type(now), (torch.SymFloat, torch.SymInt)):  # not to be asked
        return False
    if isinstance(value, tuple):  # item by item: tensors in it would compare their values
        return are_same(now, value)
    if isinstance(value, types.MethodType):  # made anew wherever it is asked for
        return now.__self__ is value.__self__ and now.__func__ is value.__func__
    return isinstance(value, SCALARS) and not is_other(now, value)


def are_same(items: Any, others: Any) -> bool:
    """Whether two collections hold the same values in the same order."""
    return len(items) == len(others) and (all(map(is_, items, others)) or all(map(is_same, items, others)))


RESOLVE_REMEDY = "Pass x.resolve_conj().resolve_neg()."
"""Kernels read memory as it lies."""


def is_lazy_view(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` holds its values with another sign, as that of ``z.conj()`` does."""
    return tensor.is_neg() or tensor.is_conj()


def spec_of(tensor: Tensor) -> TensorSpec:
    """Everything about ``tensor`` that a captured graph depends on, apart from its values."""
    gradient = tensor.requires_grad and ("leaf" if tensor.is_leaf else "computed")
    try:
        return (tensor.shape, tensor.dtype, tensor.device, tensor.stride(), gradient, is_lazy_view(tensor))
    except RuntimeError:  # sparse or nested: it has no strides, and will be refused
        return (tensor.shape, tensor.dtype, tensor.device, (), gradient, False)


def form_of(value: Any) -> Any:
    """What a graph depends on of a tensor that is passed to it."""
    return type(value), spec_of(value) if isinstance(value, Tensor) else None


def kind_of(value: Any) -> Any:
    """What is told of a tensor without asking it for more than where it is."""
    return type(value), value.device if isinstance(value, Tensor) else None


def whole_form_of(value: Any) -> Any:
    """Everything that Python may read of a tensor, but its values; another value itself."""
    if not isinstance(value, Tensor):
        return type(value), None
    gradient = value.grad if value.is_leaf else None
    return type(value), spec_of(value), value.storage_offset(), None if gradient is None else spec_of(gradient)


def key_of_tensors(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """The key of a call with tensors only, no two the same, whose number is its form; ``None`` for other calls."""
    if has_same(values) or {*map(type, values)} - {Tensor}:
        return None
    return key_of(len(values), values)


def key_of(form: Any, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """What calls have in common that one graph may fit: their form, the modes they run under, and their tensors'."""
    specs = [*map(spec_of, tensors)]
    return (form, ambient(), *specs)


def settings_of(key: tuple[Any, ...]) -> Settings:
    """PyTorch's switches in the key of a call."""
    _, (settings, *_), *_ = key
    return settings  # type: ignore[no-any-return]


def tree_flatten(
    value: Any,
    numbers: list[float] | None = None,
    place_of: Callable[[Any], Structure | None] | None = None,
    opened: Collection[type] = (),
) -> tuple[Structure, list[Tensor]]:
    """Tell the tensors within ``value``, parameters apart, from what remains.

    Args:
        value: Anything. A container with itself among its items is not supported; among its attributes it may be.
        numbers: Receives the numbers, too, if given: then the structure has places for them.
        place_of: What stands for a part that is not to be taken apart as others are; ``None`` for all others.
        opened: Classes whose objects are taken apart by their attributes, too; where one stands in two places, which
            the program may ask, those of its class are not.

    Returns:
        The structure, and the tensors, depth first and each once. ``tree_unflatten`` reverses it.
    """
    num_before = 0 if numbers is None else len(numbers)
    flattening = _Flattening(numbers, place_of, opened)
    structure = flattening.flatten(value)
    if flattening.repeated:
        if numbers is not None:
            del numbers[num_before:]
        return tree_flatten(value, numbers, place_of, {*opened} - flattening.repeated)
    return structure, [tensor for _, tensor in flattening.leaves.values()]


class _Flattening:
    __slots__ = ("around", "leaves", "numbers", "open", "opened", "place_of", "repeated", "seen")

    def __init__(
        self,
        numbers: list[float] | None,
        place_of: Callable[[Any], Structure | None] | None,
        opened: Collection[type],
    ) -> None:
        self.leaves: dict[int, tuple[Leaf, Tensor]] = {}
        self.numbers, self.place_of = numbers, place_of
        self.open: list[int] = []  # ids of the containers with attributes around what is being looked at
        self.opened = opened
        self.around: list[int] = []  # likewise of objects of opened classes
        self.seen: set[int] = set()  # ids of all of those
        self.repeated: set[type] = set()  # classes of which one stands in two places

    def flatten(self, value: Any) -> Structure:
        if self.place_of is not None and (place := self.place_of(value)) is not None:
            return place
        kind = type(value)
        if kind is tuple or kind is list:  # most are of these kinds
            return Container(kind, (), tuple(map(self.flatten, value)))
        if kind is dict:
            return self._flatten_container(kind, value)
        if issubclass(kind, Tensor):
            if isinstance(value, nn.Parameter):  # state that happens to be passed by hand
                return Reference(value)
            leaves = self.leaves
            if id(value) not in leaves:
                leaves[id(value)] = Leaf(len(leaves)), value
            return leaves[id(value)][0]
        if issubclass(kind, (torch.SymFloat, torch.SymInt)):  # of a graph: it passes for a number; not to be asked
            return Reference(value)
        if self.numbers is not None and kind in _NUMBERS:
            self.numbers.append(value)
            return _NUMBERS[kind]
        if isinstance(value, SCALARS):
            return Value(kind, value)
        if is_open_container(value):
            return self._flatten_container(kind, value)
        return self._flatten_object(kind, value)

    def _flatten_object(self, kind: type, value: Any) -> Structure:
        if kind in self.opened:
            if id(value) in self.seen:
                self.repeated.add(kind)
            self.seen.add(id(value))
            self.around.append(id(value))
            structure = self._flatten_container(kind, value)
            self.around.pop()
            return structure
        if kind in (set, frozenset) and self.around and all(isinstance(each, SCALARS) for each in value):
            return Container(kind, (), tuple(Value(type(each), each) for each in value))  # names of fields, as a rule
        if kind is weakref.ref and id(target := value()) in self.around:
            return Around(self.around.index(id(target)))
        return Reference(value)

    def _flatten_container(self, kind: type, value: Any) -> Structure:
        if id(value) in self.open:
            return Reference(value)
        keys: tuple[Hashable, ...] = ()
        items: Iterable[Any] = ()
        kinds = factory = None
        if isinstance(value, tuple | list):
            items = value
        elif isinstance(value, dict):
            keys, items = tuple(value), value.values()
            kinds = keys if {*map(type, keys)} <= {str} else _kinds_of(keys)
            factory = value.default_factory if isinstance(value, defaultdict) else None
        held = {} if kind is dict else attributes_beside(value)
        if held == {}:
            return Container(kind, keys, tuple(map(self.flatten, items)), factory, kinds)
        if held is None:
            return Container(kind, keys, tuple(map(self.flatten, items)), factory, kinds, None)
        self.open.append(id(value))
        children = tuple(map(self.flatten, [*items, *held.values()]))
        self.open.pop()
        return Container(kind, keys, children, factory, kinds, tuple(held))


def is_open_container(value: Any) -> bool:
    """Whether it is taken apart."""
    return isinstance(value, tuple | list | dict) or (is_dataclass(value) and not isinstance(value, type))


def parts_of(container: Any) -> list[Any]:
    """Items and attributes of what is taken apart."""
    items = container.values() if isinstance(container, dict) else container
    held = attributes_beside(container) or {}
    return [*(items if isinstance(container, tuple | list | dict) else ()), *held.values()]


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


def _dict_of(value: Any) -> dict[str, Any] | None:
    try:
        return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return None


def _kinds_of(key: Any) -> Any:
    """What tells apart keys that Python takes for one (``True``, ``1`` and ``1.0``), and no NaN from another."""
    if isinstance(key, tuple | frozenset):
        return type(key)(map(_kinds_of, key)) if type(key) in (tuple, frozenset) else (type(key), *map(_kinds_of, key))
    return Value(type(key), key)


def replace_numbers(structure: Structure, values: Iterator[Structure]) -> Structure:
    """Put the next of ``values`` in the place of each number, depth first."""
    if isinstance(structure, Number):
        return next(values)
    if isinstance(structure, Container):
        return dataclasses.replace(
            structure, children=tuple(replace_numbers(child, values) for child in structure.children)
        )
    return structure


def has_same(values: Sequence[Any]) -> bool:
    """Whether one of them occurs twice."""
    return len({*map(id, values)}) != len(values)


def tree_unflatten(structure: Structure, leaves: Sequence[Any], around: Sequence[Any] = ()) -> Any:
    """Build a value of ``structure`` with these in the places of its tensors.

    Neither ``__init__`` nor another method of the user's classes is run: what it has set is among the attributes.
    """
    if isinstance(structure, Leaf):
        return leaves[structure.index]
    if isinstance(structure, Value):
        return structure.value
    if isinstance(structure, Reference):
        return structure.target
    if isinstance(structure, Around):
        return weakref.ref(around[structure.index])
    assert isinstance(structure, Container)
    kind, attributes = structure.type, structure.attributes
    if structure.is_object:
        made = blank(kind)
        parts = [tree_unflatten(child, leaves, (*around, made)) for child in structure.children]
        _set_attributes(made, zip(attributes or (), parts, strict=True))
        return made
    parts = [tree_unflatten(child, leaves, around) for child in structure.children]
    if kind in (tuple, list, set, frozenset):
        return kind(parts)
    if kind is dict:
        return dict(zip(structure.keys, parts, strict=True))
    num_items = len(parts) - len(attributes or ())
    made = _build(structure, parts[:num_items])
    if attributes is None:
        made.__dict__ = made
    elif attributes:
        _set_attributes(made, zip(attributes, parts[num_items:], strict=True))
    return made


def blank(kind: type) -> Any:
    """An object of a class without attributes; no code of the class runs.

    Raises:
        TypeError: It is written in C, and keeps what nobody can see.
    """
    return (SimpleNamespace if issubclass(kind, SimpleNamespace) else object).__new__(kind)


def _build(structure: Container, items: list[Any]) -> Any:
    kind: Any = structure.type
    if issubclass(kind, tuple):
        try:
            return tuple.__new__(kind, items)
        except TypeError:  # it is written in C
            return kind(items)
    if issubclass(kind, list):
        made = list.__new__(kind)
        list.extend(made, items)
        return made
    if not issubclass(kind, dict):
        return object.__new__(kind)
    plain = plain_base(kind)
    made = plain.__new__(kind)
    if structure.default_factory is not None:
        made.default_factory = structure.default_factory
    for key, item in zip(structure.keys, items, strict=True):
        plain.__setitem__(made, key, item)
    return made


def _set_attributes(made: Any, attributes: Iterable[tuple[str, Any]]) -> None:
    """Without asking the class, which may refuse, count or convert."""
    members, own = slots_of(type(made)), _dict_of(made)
    for name, value in attributes:
        if name in members:
            members[name].__set__(made, value)
        else:
            assert own is not None
            own[name] = value


def walk(structure: Structure, name: str) -> Iterator[tuple[str, Structure]]:
    """All parts of ``structure`` but containers, depth first, named as a user would write them: ``batch['x'][0]``."""
    if not isinstance(structure, Container):
        yield name, structure
        return
    attributes = structure.attributes or ()
    fields = getattr(structure.type, "_fields", ())
    for position, child in enumerate(structure.children):
        beside = position - (len(structure.children) - len(attributes))
        if beside >= 0 and attributes[beside] == "data" and issubclass(structure.type, UserDict):
            step = ""  # its items are those of this dict
        elif beside >= 0:
            step = f".{attributes[beside]}"
        elif structure.keys:
            step = f"[{structure.keys[position]!r}]"
        elif position < len(fields):
            step = f".{fields[position]}"
        else:
            step = f"[{position}]"
        yield from walk(child, name + step)


def kinds_of(structure: Structure) -> set[type]:
    """The classes of the containers in ``structure``, but for Python's most plain ones."""
    if not isinstance(structure, Container):
        return set()
    return {structure.type}.union(*map(kinds_of, structure.children)) - {tuple, list, dict, set, frozenset}


def walk_arguments(structure: Structure, parameters: Sequence[str]) -> Iterator[tuple[str, Structure]]:
    """The same for the structure of ``(args, kwargs)`` of a function with these parameters."""
    assert isinstance(structure, Container)
    positional, keywords = structure.children
    assert isinstance(positional, Container)
    assert isinstance(keywords, Container)
    for index, child in enumerate(positional.children):
        yield from walk(child, parameters[index] if index < len(parameters) else f"args[{index}]")
    for key, child in zip(keywords.keys, keywords.children, strict=True):
        yield from walk(child, str(key))
