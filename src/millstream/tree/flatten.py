"""Take values apart: what all trees have in common, and what counts of arguments and results of a captured program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from millstream.tree.containers import attributes_beside, form_of_class, is_open_container
from millstream.tree.spec import (
    SCALARS,
    Again,
    Around,
    Container,
    Leaf,
    Number,
    PlainValue,
    Reference,
    Structure,
    keys_of,
)

_NUMBERS = {kind: Number(kind) for kind in (int, float, np.float64, np.float32, np.int64, np.int32)}
_NONE: Mapping[int, Reference] = {}
_PLAIN = frozenset((str, bool, int, float, type(None)))


class Flattener:
    """Takes one value apart; a container that stands at several places is one, as Python's ``is`` may ask."""

    __slots__ = ("held", "leaves", "met", "num_made")

    def __init__(self, held: Mapping[int, Reference] = _NONE) -> None:
        self.held = held  # by id, containers that are used as they are
        self.leaves: list[Any] = []
        # by id, containers, and what stands for one: nothing as long as it is not complete
        self.met: dict[int, tuple[Any, Structure | None]] = {}
        self.num_made = 0

    def flatten(self, value: Any) -> Structure:
        """Return what stands for a value, whose leaves are noted."""
        raise NotImplementedError

    def attribute(self, owner: Any, name: str, value: Any) -> Structure:  # noqa: ARG002  for those that tell them apart
        """The same for an attribute."""
        return self.flatten(value)

    def within_itself(self, value: Any) -> Structure:
        """Return what stands for a container within that very container."""
        return Reference(value)

    def complete(self, value: Any, structure: Container) -> Structure:  # noqa: ARG002
        """Return what stands for a container whose parts are known."""
        return structure

    def container(self, kind: type, value: Any, opener: Callable[[Any, Any], Container] | None = None) -> Structure:
        """Return what stands for a container, which ``opener`` opens in place of the table."""
        if kind is tuple and opener is None:
            return self.complete(value, Container(kind, (), tuple(map(self.flatten, value))))
        key = id(value)
        if key in self.held:
            return self.held[key]
        if key in self.met:
            _, known = self.met[key]
            return self.within_itself(value) if known is None else known
        self.met[key] = value, None
        num_made = self.num_made
        structure = self.complete(value, self._open(kind, value) if opener is None else opener(self, value))
        if type(structure) is Container:
            self.met[key] = value, Again(self.num_made)
            self.num_made += 1
        else:
            del self.met[key]
            self.num_made = num_made
        return structure

    def _open(self, kind: type, value: Any) -> Container:
        if kind is list:
            return Container(kind, (), tuple(map(self.flatten, value)))
        if kind is dict:
            return Container(kind, keys_of(value), tuple(map(self.flatten, value.values())))
        form = form_of_class(kind)
        extra = None if form.extra is None else form.extra(value)
        items = () if form.items is None else tuple(map(self.flatten, form.items(value)))
        keys = keys_of(value) if issubclass(kind, dict) else ()
        held = attributes_beside(value)
        if held is None:
            return Container(kind, keys, items, None, extra)
        beside = (self.attribute(value, name, each) for name, each in held.items())
        return Container(kind, keys, (*items, *beside), tuple(held), extra)


class _ValueFlattener(Flattener):
    __slots__ = ("around", "index_of", "numbers", "opened", "place_of")

    def __init__(
        self,
        numbers: list[float] | None,
        place_of: Callable[[Any], Structure | None] | None,
        opened: Collection[type],
        held: Mapping[int, Reference],
    ) -> None:
        super().__init__(held)
        self.index_of: dict[int, Leaf] = {}
        self.numbers, self.place_of, self.opened = numbers, place_of, opened
        self.around: list[int] = []  # ids of the objects of opened classes around what is being looked at

    def flatten(self, value: Any) -> Structure:
        if self.place_of is not None and (place := self.place_of(value)) is not None:
            return place
        kind = type(value)
        if kind is Tensor:
            return self._leaf(value)
        if kind is tuple or kind is list or kind is dict:  # most are of these kinds
            return self.container(kind, value)
        if self.numbers is not None and kind in _NUMBERS:
            self.numbers.append(value)
            return _NUMBERS[kind]
        if kind in _PLAIN:
            return PlainValue(kind, value)
        return self._rare(kind, value)

    def _rare(self, kind: type, value: Any) -> Structure:
        if issubclass(kind, Tensor):
            # A parameter is state that happens to be passed by hand.
            return Reference(value) if isinstance(value, nn.Parameter) else self._leaf(value)
        if issubclass(kind, (torch.SymFloat, torch.SymInt)):  # of a graph: it passes for a number; not to be asked
            return Reference(value)
        if isinstance(value, SCALARS):
            return PlainValue(kind, value)
        return self.container(kind, value) if is_open_container(value) else self._object(kind, value)

    def _leaf(self, tensor: Tensor) -> Leaf:
        known = self.index_of.get(id(tensor))
        if known is None:
            known = self.index_of[id(tensor)] = Leaf(len(self.leaves))
            self.leaves.append(tensor)
        return known

    def _object(self, kind: type, value: Any) -> Structure:
        if kind in self.opened:
            self.around.append(id(value))
            structure = self.container(kind, value)
            self.around.pop()
            return structure
        if kind in (set, frozenset) and self.around and all(isinstance(each, SCALARS) for each in value):
            numbers, self.numbers = self.numbers, None
            structure = self.container(kind, value)  # names of fields, as a rule
            self.numbers = numbers
            return structure
        if kind is weakref.ref and id(target := value()) in self.around:
            return Around(self.around.index(id(target)))
        return Reference(value, value.tobytes() if kind is np.ndarray else b"")


def tree_flatten(
    value: Any,
    numbers: list[float] | None = None,
    place_of: Callable[[Any], Structure | None] | None = None,
    opened: Collection[type] = (),
    held: Mapping[int, Reference] = _NONE,
) -> tuple[Structure, list[Tensor]]:
    """Tell the tensors within ``value``, parameters apart, from what remains.

    Args:
        value: Anything. Within itself, a container is used as it is.
        numbers: Receives the numbers, too, if given: then the structure has places for them.
        place_of: What stands for a part that is not to be taken apart as others are; ``None`` for all others.
        opened: Classes whose objects are taken apart by their attributes, too.
        held: By id, containers that are not taken apart.

    Returns:
        The structure, and the tensors, depth first and each once. ``tree_unflatten`` reverses it.
    """
    flattener = _ValueFlattener(numbers, place_of, opened, held)
    structure = flattener.flatten(value)
    return structure, flattener.leaves
