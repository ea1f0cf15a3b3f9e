"""Batches: which parts of one move to the device, and what is in classes that users register.

The *leaves* of a batch are what moves: tensors, NumPy arrays and the like, objects that have a ``to``. Plain values
(numbers, strings, ``None``, arrays of strings, ...) stay on the host, and a container in which nothing moves is used as
it is, down to its identity. What is none of this is an error: silently left behind, it would surface as somebody else's
error, or not at all. ``register`` teaches a new type.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import uuid
from collections import UserDict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from millstream._torch import pytrees
from millstream._torch.tensors import noted_lengths
from millstream.errors import ArgumentError, FeedError
from millstream.tree.arrays import as_tensor, has_numbers, hides_tensors
from millstream.tree.flatten import Flattener
from millstream.tree.spec import Container, Leaf, Made, Reference, Structure, keys_of, tree_unflatten, walk

T = TypeVar("T")

Unflatten = Callable[[Sequence[Any]], Any]
"""Makes the batch again from one value per leaf, in the order of ``flatten_batch``."""

TakeApart = Callable[[Any], tuple[Sequence[Any], Callable[[Sequence[Any]], Any]]]

_registered: dict[type, TakeApart | None] = {}


def register(kind: type[T], take_apart: TakeApart | None = None) -> None:
    """Teach feeds a type of your own, and its subclasses.

    ::

        register(Graph, lambda graph: ([graph.nodes, graph.edges], lambda parts: Graph(*parts)))
        register(Metadata)  # stays on the host as it is

    Args:
        kind: The type.
        take_apart: Given an object, returns its parts (leaves, or branches in turn) and a function that makes an object
            from parts that have moved. The function must not refer to the object or its parts: it would keep them alive
            until the batch is delivered. ``None``: objects of this type stay on the host.

    Raises:
        ArgumentError: ``kind`` is not a type.
    """
    if not isinstance(kind, type):
        raise ArgumentError(f"register takes a type, not {kind!r} ({type(kind).__name__}).")
    _registered[kind] = take_apart
    _sorts.clear()


def is_registered(kind: type) -> bool:
    """Return whether it is known what is in objects of a class, by ``register`` or by PyTorch's own trees."""
    return pytrees.is_registered(kind) or any(_registered.get(base) is not None for base in kind.__mro__)


def flatten_batch(batch: Any, *, is_whole: Callable[[Any], bool] = lambda node: False) -> tuple[list[Any], Unflatten]:
    """List the leaves of ``batch``, and how to make a batch of the same shape from others.

    The result keeps no container of the batch and so none of its leaves alive. A leaf that occurs twice is listed
    twice.

    Args:
        batch: Any object.
        is_whole: Says of what else is a leaf that it is.

    Returns:
        The leaves, depth first in the order of iteration, and the function that unflattens: each container gets its own
        type back (named tuples, dict subclasses, dataclasses included, without running their ``__init__``).

    Raises:
        FeedError: Something in the batch is of a type that is not known; the message names it.
    """
    if (flat := _list_items(batch)) is not None and {*map(type, flat[0])} == {Tensor}:  # as most are; of hundreds, even
        return flat
    flattener = _BatchFlattener(is_whole, batch)
    try:
        structure = flattener.flatten(batch)
    except RecursionError:
        raise FeedError("A container in the batch holds itself, or they are nested too deeply.") from None
    return flattener.leaves, partial(tree_unflatten, structure)


def _list_items(batch: Any) -> tuple[list[Any], Unflatten] | None:
    """The items of a plain container, and what makes another one of them; ``None`` for other batches."""
    kind = type(batch)
    if kind is list or kind is tuple:
        return [*batch], kind
    if kind is dict:
        keys = [*batch]
        return [*batch.values()], lambda values: dict(zip(keys, values, strict=True))
    return ([batch], itemgetter(0)) if kind is Tensor else None


def name_leaf(batch: Any, index: int, *, is_whole: Callable[[Any], bool] = lambda node: False) -> str:
    """Say where the ``index``-th leaf of ``batch`` is, as an expression: ``batch['image'][0]``."""
    structure = _BatchFlattener(is_whole).flatten(batch)
    for name, part in walk(structure, "batch"):
        if isinstance(part, Leaf) and part.index == index:
            return name
    raise IndexError(index)


def find_name(batch: Any, node: Any) -> str:
    """The same for a container or a leaf of ``batch``."""
    flattener = _BatchFlattener(lambda each: each is node)
    flattener.flatten(batch)
    index = next((i for i, leaf in enumerate(flattener.leaves) if leaf is node), None)
    return "batch" if index is None else name_leaf(batch, index, is_whole=flattener.is_whole)


def as_tensors(batch: Any, leaves: Sequence[Any]) -> list[Any]:
    """``as_tensor`` for all leaves of a batch, which names them."""
    return [as_tensor(leaf, partial(name_leaf, batch, i)) for i, leaf in enumerate(leaves)]


def _unknown(batch: Any, node: Any) -> FeedError:
    name, kind = find_name(batch, node), type(node)
    if hides_tensors(node):
        return FeedError(f"{name} is an array of objects with tensors among them; let the source yield a list.")
    return FeedError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which feeds do not know. Let the source yield "
        "tensors, arrays or plain values; or say what to do with it: `from millstream.data import register`, then "
        f"register({kind.__qualname__}) leaves it on the host, and register({kind.__qualname__}, take_apart) moves "
        "what is in it (see help(register))."
    )


class _BatchFlattener(Flattener):
    __slots__ = ("batch", "index_of", "is_whole")

    def __init__(self, is_whole: Callable[[Any], bool], batch: Any = None) -> None:
        super().__init__()
        self.is_whole = is_whole
        self.batch = batch  # to be named in errors; without, what is not known is a leaf
        self.index_of: dict[int, Leaf] = {}  # by id

    def flatten(self, value: Any) -> Structure:
        sort = _sort(value)
        if sort is _STAY and not self.is_whole(value):
            return Reference(value)
        if isinstance(sort, _Branch) and not self.is_whole(value):
            return self.container(type(value), value, sort.open)
        if sort is None and self.batch is not None:
            raise _unknown(self.batch, value)
        leaf = Leaf(len(self.leaves))
        self.leaves.append(value)
        self.index_of.setdefault(id(value), leaf)
        return leaf

    def attribute(self, owner: Any, name: str, value: Any) -> Structure:
        """Fields of a dataclass and the like are parts as items are; beside them, tensors and arrays move.

        A dataclass may have computed those of its fields; those of transformers' outputs are the items themselves.
        """
        branch = _sort(owner)
        if branch.fields is None or name in branch.fields:
            return self.flatten(value)
        if name.startswith("__pydantic_") and type(value) in (dict, set):  # what a model has of its own
            items = value.values() if isinstance(value, dict) else value
            children = tuple(map(self._beside, items))
            self.num_made += 1
            is_moved = any(type(child) is not Reference for child in children)
            keys = keys_of(value) if isinstance(value, dict) else ()
            return Container(type(value), keys, children, extra=None if is_moved else _COPY)
        return self._beside(value)

    def _beside(self, value: Any) -> Structure:
        if isinstance(value, (Tensor, np.ndarray)) and _sort(value) is _LEAF:
            return self.once(value)
        _, known = self.met.get(id(value), (None, None))  # an item may be an attribute, too
        return Reference(value) if known is None else known

    def once(self, value: Any) -> Structure:
        """Return what is listed once, wherever it is an attribute, or tells the rows of a jagged tensor."""
        return self.index_of.get(id(value)) or self.flatten(value)

    def within_itself(self, value: Any) -> Structure:  # noqa: ARG002
        raise RecursionError

    def complete(self, value: Any, structure: Container) -> Structure:
        """Return what nothing moves in is used as it is."""
        stays = all(type(child) is Reference or getattr(child, "extra", None) is _COPY for child in structure.children)
        return Reference(value) if stays else structure


_COPY = "copied, though nothing moves in it"


# --- what is what ----------------------------------------------------------------------------------------------------


class _Branch(NamedTuple):
    """A container.

    Attributes:
        fields: Attributes that are parts as items are; ``None`` for all.
        open: Opens it, where the table of containers is not to.
    """

    fields: Collection[str] | None = ()
    open: Callable[[_BatchFlattener, Any], Container] | None = None


_LEAF = "leaf"  # moves
_STAY = "stay"  # does not

_PLAIN = (
    *(str, bytes, bytearray, int, float, complex, type(None), type(Ellipsis), type, range, slice, enum.Enum),
    *(np.generic, uuid.UUID, pathlib.PurePath, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
)

_sorts: WeakKeyDictionary[type, Any] = WeakKeyDictionary()
"""Of each type seen so far: _LEAF, _STAY or a _Branch."""


def _sort(node: Any) -> Any:
    """Return what ``node`` is to a feed: ``_LEAF``, ``_STAY``, a ``_Branch``, ``None`` for an unknown thing."""
    kind = type(node)
    if kind is Tensor:
        return _LEAF
    try:
        sort = _sorts[kind]
    except KeyError:
        if (sort := _sort_type(kind)) is None:
            return None
        _sorts[kind] = sort
    if sort is _NESTED and (node.layout is not torch.jagged or node.requires_grad):
        return _LEAF  # has no parts that could be staged, or would lose its history
    if sort is _LEAF and not isinstance(node, Tensor) and hasattr(node, "__array__") and not has_numbers(node):
        return None if hides_tensors(node) else _STAY  # strings, times, objects, records
    return sort


def _sort_type(kind: Any) -> Any:
    registered = next((base for base in kind.__mro__ if base in _registered), None)
    if registered is not None:
        take_apart = _registered[registered]
        return _STAY if take_apart is None else _Branch(open=partial(_open_registered, take_apart))
    if issubclass(kind, Tensor):
        # The class of jagged tensors has no public name.
        return _NESTED if kind.__name__ == "NestedTensor" else _LEAF
    for base, sort in _SORTS:
        if issubclass(kind, base):
            return sort
    if dataclasses.is_dataclass(kind):
        return _Branch([field.name for field in dataclasses.fields(kind)])
    if callable(getattr(kind, "to", None)) or hasattr(kind, "__array__"):
        return _LEAF
    if hasattr(kind, "__attrs_attrs__"):
        return _Branch([field.name for field in kind.__attrs_attrs__])
    if hasattr(kind, "__pydantic_fields__"):
        return _Branch([*kind.__pydantic_fields__, "__pydantic_extra__"])
    if issubclass(kind, SimpleNamespace):
        return _Branch(None)
    take_apart = pytrees.find_take_apart(kind)
    return None if take_apart is None else _Branch(open=partial(_open_registered, take_apart))


def _open_registered(take_apart: TakeApart, flattener: _BatchFlattener, node: Any) -> Container:
    parts, make = take_apart(node)
    kind = type(node)
    made = Made(make, lambda i: f" (part {i} of the {kind.__name__})")
    return Container(kind, (), tuple(map(flattener.flatten, parts)), extra=made)


def _open_packed(flattener: _BatchFlattener, node: PackedSequence) -> Container:
    # The batch sizes must stay on the host: PyTorch refuses them elsewhere, and its loops read them one by one.
    data, _, *indices = node
    return Container(
        type(node), (), (flattener.flatten(data), Reference(node.batch_sizes), *map(flattener.flatten, indices))
    )


def _open_nested(flattener: _BatchFlattener, node: Any) -> Container:
    """A jagged tensor: its values and offsets move, so that they cross with everything else.

    Those that have the same offsets fit each other, and must have the same in the end.
    """
    offsets, lengths = node.offsets(), node.lengths()
    dim = next(i for i, size in enumerate(node.shape) if not isinstance(size, int))
    rows = offsets.diff() if lengths is None else lengths
    # Known here; asked for later, on the device, they would make the host wait.
    shortest, longest = noted_lengths(node)
    if len(rows) and rows.device.type == "cpu":
        shortest, longest = int(rows.min()), int(rows.max())

    def make(parts: Sequence[Any]) -> Tensor:
        values, offsets, *rest = parts
        return torch.nested.nested_tensor_from_jagged(
            values, offsets, *rest, jagged_dim=dim, min_seqlen=shortest, max_seqlen=longest
        )

    rest = [offsets, *([] if lengths is None else [lengths])]
    children = (flattener.flatten(node.values()), *map(flattener.once, rest))
    return Container(type(node), (), children, extra=Made(make, (".values()", ".offsets()", ".lengths()").__getitem__))


_NESTED = _Branch(open=_open_nested)

_SORTS: tuple[tuple[Any, Any], ...] = (
    (_PLAIN, _STAY),
    (PackedSequence, _Branch(open=_open_packed)),
    # Not any mutable mapping: the copy of one may write through to a file or a database.
    ((tuple, list, deque, dict, set, frozenset), _Branch()),
    (UserDict, _Branch(["data"])),
    (np.ma.MaskedArray, None),  # it would lose its mask
    (np.ndarray, _LEAF),
)
