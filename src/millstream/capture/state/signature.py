"""Take nested arguments and results apart, and put them together again.

Tuples, named tuples, lists, dicts and dataclasses are taken apart; tensors are the leaves; everything else is part of
the *structure*, which is hashable: two calls with equal structures differ in nothing but tensors.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from millstream._torch.modes import ambient

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
    """A Python value, compared by type and value: ``True``, ``1`` and ``1.0`` differ, and so do zeros by their sign."""

    type: type
    value: Hashable
    sign: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if issubclass(type(self.value), float | complex | np.inexact):  # a stand-in is to be asked nothing
            object.__setattr__(self, "sign", f"{self.value}")


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
    """A tuple, list, dict or dataclass."""

    type: type  # its class
    keys: tuple[Hashable, ...]  # keys of a dict or field names of a dataclass, otherwise empty
    children: tuple[Structure, ...]  # structures of its items
    default_factory: Callable[[], Any] | None = None  # that of a ``defaultdict``
    kinds: Any = None  # of keys that are not all text: what tells equal ones apart


Structure: TypeAlias = Leaf | Value | Number | Reference | Container


def is_other(number: Any, before: Any) -> bool:
    """Whether two numbers differ, be it by the sign of a zero."""
    return bool(number != before or (not number and f"{number}" != f"{before}"))


def is_same(now: Any, value: Any) -> bool:
    """Whether two plain values are equal; objects are the same by identity only."""
    if now is value:
        return True
    if type(now) is type(value) is float:  # asked in each call with a number that changes
        return not is_other(now, value)
    if type(now) is not type(value) or issubclass(type(now), (torch.SymFloat, torch.SymInt)):  # not to be asked
        return False
    if isinstance(value, tuple):  # item by item: tensors in it would compare their values
        return are_same(now, value)
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


def tree_flatten(
    value: Any, numbers: list[float] | None = None, place_of: Callable[[Any], Structure | None] | None = None
) -> tuple[Structure, list[Tensor]]:
    """Tell the tensors within ``value``, parameters apart, from what remains.

    Args:
        value: Anything. A container that contains itself is not supported.
        numbers: Receives the numbers, too, if given: then the structure has places for them.
        place_of: What stands for a part that is not to be taken apart as others are; ``None`` for all others.

    Returns:
        The structure, and the tensors, depth first and each once. ``tree_unflatten`` reverses it.
    """
    leaves: dict[int, tuple[Leaf, Tensor]] = {}
    return _tree_flatten(value, leaves, numbers, place_of), [tensor for _, tensor in leaves.values()]


def _tree_flatten(
    value: Any,
    leaves: dict[int, tuple[Leaf, Tensor]],
    numbers: list[float] | None,
    place_of: Callable[[Any], Structure | None] | None,
) -> Structure:
    if place_of is not None and (place := place_of(value)) is not None:
        return place
    kind = type(value)
    if issubclass(kind, Tensor):
        if isinstance(value, nn.Parameter):  # state that happens to be passed by hand
            return Reference(value)
        if id(value) not in leaves:
            leaves[id(value)] = Leaf(len(leaves)), value
        return leaves[id(value)][0]
    if issubclass(kind, (torch.SymFloat, torch.SymInt)):  # of a graph: it passes for a number, and is not to be asked
        return Reference(value)
    if numbers is not None and kind in _NUMBERS:
        numbers.append(value)  # type: ignore[arg-type]
        return _NUMBERS[kind]
    if isinstance(value, SCALARS):
        return Value(kind, value)
    if isinstance(value, tuple | list):
        return Container(kind, (), tuple(_tree_flatten(item, leaves, numbers, place_of) for item in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        items = (getattr(value, name) for name in names)
        return Container(kind, names, tuple(_tree_flatten(item, leaves, numbers, place_of) for item in items))
    if isinstance(value, dict):
        children = tuple(_tree_flatten(item, leaves, numbers, place_of) for item in value.values())
        kinds = None if {*map(type, value)} <= {str} else _kinds_of(tuple(value))
        return Container(kind, tuple(value), children, getattr(value, "default_factory", None), kinds)
    return Reference(value)


def _kinds_of(key: Any) -> Any:
    """What tells apart keys that Python takes for one: ``True``, ``1`` and ``1.0``."""
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


def tree_unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Build a value of ``structure`` with these in the places of its tensors."""
    if isinstance(structure, Leaf):
        return leaves[structure.index]
    if isinstance(structure, Value):
        return structure.value
    if isinstance(structure, Reference):
        return structure.target
    assert isinstance(structure, Container)
    items = [tree_unflatten(child, leaves) for child in structure.children]
    kind = structure.type
    if issubclass(kind, tuple):
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if issubclass(kind, list):
        return kind(items)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, [str(key) for key in structure.keys], items)
    return _build_dict(structure, items)


def _build_dict(structure: Container, items: list[Any]) -> Any:
    kind, pairs = structure.type, dict(zip(structure.keys, items, strict=True))
    if issubclass(kind, defaultdict):
        return kind(structure.default_factory, pairs)
    try:
        return kind(pairs)  # of pairs, a Counter would count them
    except TypeError:  # its first argument is not the content
        made = kind()
        made.update(pairs)
        return made


def _build_dataclass(kind: type, names: list[str], items: list[Any]) -> Any:
    """Without running ``__init__`` or ``__post_init__``, which belong to the user's function and have run."""
    if issubclass(kind, dict):  # a dict that is a dataclass too fills itself
        return kind(**dict(zip(names, items, strict=True)))
    made = object.__new__(kind)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(made, name, item)
    return made


def walk(structure: Structure, name: str) -> Iterator[tuple[str, Structure]]:
    """All parts of ``structure`` but containers, depth first, named as a user would write them: ``batch['x'][0]``."""
    if not isinstance(structure, Container):
        yield name, structure
        return
    is_mapping = issubclass(structure.type, dict) and not dataclasses.is_dataclass(structure.type)
    fields = structure.keys or getattr(structure.type, "_fields", ())
    for position, child in enumerate(structure.children):
        if is_mapping:
            step = f"[{structure.keys[position]!r}]"
        elif fields:
            step = f".{fields[position]}"
        else:
            step = f"[{position}]"
        yield from walk(child, name + step)


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
