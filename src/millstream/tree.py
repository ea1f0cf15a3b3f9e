"""The pytree of batches: take the leaves out, and put others in their places.

A batch is a tree. Its *branches* are tuples, lists, dicts, sets, named tuples, dataclasses, classes of attrs and
pydantic, PyTorch's packed sequences and jagged tensors. Its *leaves* are what moves to the device: tensors, NumPy
arrays and the like, objects that have a ``to``. Plain values (numbers, strings, ``None``, arrays of strings, ...) stay
on the host, and a branch in which nothing moves is used as it is, down to its identity. What is none of this is an
error: silently left behind, it would surface as somebody else's error, or not at all. ``register`` teaches a new type.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import uuid
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from millstream._torch.tensors import noted_lengths
from millstream.errors import ArgumentError, FeedError

T = TypeVar("T")

Unflatten = Callable[[Sequence[Any]], Any]
"""Makes the batch again from one value per leaf, in the order of ``tree_flatten``; only the last made is to be used."""

TakeApart = Callable[[Any], tuple[Sequence[Any], Callable[[Sequence[Any]], Any]]]

_PLAIN = (
    *(
        str,
        bytes,
        bytearray,
        int,
        float,
        complex,
        type(None),
        type(Ellipsis),
        type,
        range,
        slice,
        enum.Enum,
        np.generic,
    ),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction),
    *(uuid.UUID, pathlib.PurePath, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
)

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
    """Whether ``register`` was told what is in objects of a type."""
    return any(_registered.get(base) is not None for base in kind.__mro__)


def tree_flatten(batch: Any, *, is_whole: Callable[[Any], bool] = lambda node: False) -> tuple[list[Any], Unflatten]:
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
    leaves: list[Any] = []
    try:
        unflatten = _flatten(batch, leaves, {}, is_whole)
    except RecursionError:
        raise FeedError("A container in the batch holds itself, or they are nested too deeply.") from None
    except _UnknownError as unknown:
        node = unknown.node
        name, kind = find_name(batch, node), type(node)
        if _hides_tensors(node):
            raise FeedError(
                f"{name} is an array of objects with tensors among them; let the source yield a list."
            ) from None
        raise FeedError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which feeds do not know. Let the source yield "
            "tensors, arrays or plain values; or say what to do with it: `from millstream.data import register`, then "
            f"register({kind.__qualname__}) leaves it on the host, and register({kind.__qualname__}, take_apart) moves "
            "what is in it (see help(register))."
        ) from None
    if unflatten is None:
        return leaves, lambda _: batch
    return leaves, unflatten


def _list_items(batch: Any) -> tuple[list[Any], Unflatten] | None:
    """The items of a plain container, and what makes another one of them; ``None`` for other batches."""
    kind = type(batch)
    if kind is list or kind is tuple:
        return [*batch], kind
    if kind is dict:
        keys = [*batch]
        return [*batch.values()], lambda values: dict(zip(keys, values, strict=True))
    return ([batch], _only) if kind is Tensor else None


_only = itemgetter(0)


def name_leaf(batch: Any, index: int) -> str:
    """Say where the ``index``-th leaf of ``batch`` is, as an expression: ``batch['image'][0]``."""
    names = (name for node, name in _walk(batch, "batch") if _sort(node) is _LEAF)
    for i, name in enumerate(names):
        if i == index:
            return name
    raise IndexError(index)


def find_name(batch: Any, node: Any) -> str:
    """The same for a container or a leaf of ``batch``."""
    return next((name for each, name in _walk(batch, "batch") if each is node), "batch")


def as_tensor(leaf: Any) -> Any:
    """See an array as a tensor, over the same memory where that is possible; other leaves are returned as they are."""
    if isinstance(leaf, Tensor) or not hasattr(leaf, "__array__"):
        return leaf
    array = np.asarray(leaf)
    if (dtype := _find_dtype(array.dtype)) is not None:
        return as_tensor(array.view(f"u{array.itemsize}")).view(dtype)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(step < 0 or step % array.itemsize for step in array.strides):
        array = array.copy()  # a tensor can always be written to, and goes forward from element to element
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise _NoTensorsError(array.dtype) from None


class _NoTensorsError(FeedError):
    def __init__(self, dtype: np.dtype[Any], name: str = "An array in the batch") -> None:
        self.dtype = dtype
        super().__init__(f"{name} is of {dtype}, of which there are no tensors; let the source yield another type.")


def as_tensors(batch: Any, leaves: Sequence[Any]) -> list[Any]:
    """``as_tensor`` for all leaves of a batch.

    Raises:
        FeedError: There are no tensors of an array's type; the message names it.
    """
    found: list[Any] = []
    try:
        for leaf in leaves:
            found.append(as_tensor(leaf))  # noqa: PERF401 - what is found says where an error came
    except _NoTensorsError as error:
        raise FeedError(str(_NoTensorsError(error.dtype, name_leaf(batch, len(found))))) from None
    return found


# --- what is what ----------------------------------------------------------------------------------------------------


class _UnknownError(Exception):
    def __init__(self, node: Any) -> None:
        super().__init__()
        self.node = node


Opener = Callable[[Any], "_Branch"]

_LEAF = "leaf"  # moves
_STAY = "stay"  # does not

_sorts: WeakKeyDictionary[type, Any] = WeakKeyDictionary()
"""Of each type seen so far: _LEAF, _STAY, an Opener, or None for an unknown one."""


def _sort(node: Any) -> Any:
    """What ``node`` is to a feed: ``_LEAF``, ``_STAY``, an ``Opener`` for a branch, ``None`` for an unknown thing."""
    kind = type(node)
    if kind is Tensor:
        return _LEAF
    try:
        sort = _sorts[kind]
    except KeyError:
        sort = _sorts[kind] = _sort_type(kind)
    if sort is _open_nested and (node.layout is not torch.jagged or node.requires_grad):
        return _LEAF  # has no parts that could be staged, or would lose its history
    if sort is _LEAF and not isinstance(node, Tensor) and hasattr(node, "__array__") and not _has_numbers(node):
        return None if _hides_tensors(node) else _STAY  # strings, times, objects, records
    return sort


def _has_numbers(node: Any) -> bool:
    """Whether an array, or what can be seen as one, can be a tensor."""
    dtype = getattr(node, "dtype", None)
    if not isinstance(dtype, np.dtype):
        dtype = np.asarray(node).dtype
    return dtype.kind in "biufc" or _find_dtype(dtype) is not None


def _hides_tensors(node: Any) -> bool:
    """Whether an array of objects has tensors among these."""
    return isinstance(node, np.ndarray) and node.dtype == object and any(isinstance(each, Tensor) for each in node.flat)


def _find_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """PyTorch's type for one that NumPy knows from elsewhere only: bfloat16, and floats of eight bits."""
    found = getattr(torch, dtype.name, None) if dtype.isbuiltin == 2 else None
    return found if isinstance(found, torch.dtype) and found.is_floating_point else None


def _sort_type(kind: type) -> Any:
    registered = next((base for base in kind.__mro__ if base in _registered), None)
    if registered is not None:
        take_apart = _registered[registered]
        return _STAY if take_apart is None else lambda node: _open_registered(node, take_apart)
    if issubclass(kind, Tensor):
        # The class of jagged tensors has no public name.
        return _open_nested if kind.__name__ == "NestedTensor" else _LEAF
    for base, sort in _SORTS:
        if issubclass(kind, base):
            return sort
    if dataclasses.is_dataclass(kind):
        return _open_dataclass
    if callable(getattr(kind, "to", None)) or hasattr(kind, "__array__"):
        return _LEAF
    if hasattr(kind, "__attrs_attrs__") or hasattr(kind, "__pydantic_fields__"):
        return _open_dataclass
    return None


class _Branch(NamedTuple):
    children: list[Any]
    label_children: Callable[[], Iterable[str]]
    prepare: Callable[[], Close]  # asked only of a branch that holds leaves; what it returns must not keep the branch


Close = Callable[[list[Any]], Any]
"""Makes a container again from its new children."""


def _flatten(node: Any, leaves: list[Any], ragged: dict[int, Any], is_whole: Callable[[Any], bool]) -> Unflatten | None:
    """``None`` when nothing in ``node`` moves: it is then used as it is.

    Args:
        node: A branch, a leaf or a plain value.
        leaves: Those found so far.
        ragged: By identity, where what tells the rows of a jagged tensor is among the leaves. Those that have the same
            fit each other, and must have the same in the end.
        is_whole: See ``tree_flatten``.
    """
    sort = _sort(node)
    if sort is _LEAF or is_whole(node):
        leaves.append(node)
        return itemgetter(len(leaves) - 1)
    if sort is _STAY:
        return None
    if sort is None:
        raise _UnknownError(node)
    branch = _open(node, sort)
    parts = [_flatten(child, leaves, ragged, is_whole) for child in branch.children]
    if not any(parts):
        return None
    if sort is _open_nested:
        parts[1:] = [
            ragged.setdefault(id(child), part) for child, part in zip(branch.children[1:], parts[1:], strict=True)
        ]
    close = branch.prepare()
    rest = [child if part is None else None for child, part in zip(branch.children, parts, strict=True)]
    return lambda values: close(
        [other if part is None else part(values) for other, part in zip(rest, parts, strict=True)]
    )


def _walk(node: Any, name: str) -> Iterator[tuple[Any, str]]:
    """Everything in the tree, and its name."""
    yield node, name
    sort = _sort(node)
    if not callable(sort):
        return
    branch = _open(node, sort)
    for child, label in zip(branch.children, branch.label_children(), strict=True):
        yield from _walk(child, name + label)


# --- branches --------------------------------------------------------------------------------------------------------


def _open(node: Any, opener: Opener) -> _Branch:
    """A branch, to which tensors and arrays belong that are attributes of a container beside its items or fields.

    A dataclass may have computed them of its fields; those of transformers' outputs are the items themselves.
    """
    branch = opener(node)
    found = [_find_movable(each) for each in _attributes_of(node)] if opener in _HAVE_ATTRIBUTES else []
    if not any(found):
        return branch
    children = [*branch.children]
    place = {id(child): i for i, child in enumerate(children)}
    for value in (value for beside in found for value in beside.values()):
        if place.setdefault(id(value), len(children)) == len(children):
            children.append(value)
    places = [{name: place[id(value)] for name, value in beside.items()} for beside in found]
    count = len(branch.children)

    def prepare() -> Close:
        close = branch.prepare()

        def close_all(values: list[Any]) -> Any:
            made = close(values[:count])
            for attributes, those in zip(_attributes_of(made), places, strict=True):
                attributes.update({name: values[i] for name, i in those.items()})
            return made

        return close_all

    labels = {i: f".{name}" for those in reversed(places) for name, i in reversed(those.items())}
    return _Branch(
        children, lambda: [*branch.label_children(), *(labels[i] for i in range(count, len(children)))], prepare
    )


def _attributes_of(node: Any) -> list[dict[str, Any]]:
    """Where an object's attributes are, and the private ones of a pydantic model; but not in the object itself."""
    stores = (_stored(node, name) for name in ("__dict__", "__pydantic_private__"))
    return [store for store in stores if type(store) is dict and store is not node]


def _stored(node: Any, name: str) -> Any:
    """An attribute as Python finds it: ``__getattr__`` of the user's may raise anything, or make what is not there."""
    try:
        return object.__getattribute__(node, name)
    except AttributeError:
        return None


def _find_movable(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, (Tensor, np.ndarray)) and _sort(value) is _LEAF
    }


def _forget_movable(shell: Any) -> None:
    """Keep no tensor of the source alive; what moves comes back in its place."""
    for attributes in _attributes_of(shell):
        attributes.update(dict.fromkeys(_find_movable(attributes)))


def _open_tuple(node: Any) -> _Branch:
    kind: Any = type(node)
    if hasattr(kind, "_make"):  # a named tuple
        return _Branch(list(node), lambda: [f".{field}" for field in kind._fields], lambda: _prepare_tuple(node))
    return _Branch(list(node), lambda: _number(node), lambda: _prepare_tuple(node))


def _open_list(node: Any) -> _Branch:
    return _Branch(list(node), lambda: _number(node), lambda: _prepare_list(node))


def _open_set(node: Any) -> _Branch:
    kind: Any = type(node)
    return _Branch(list(node), lambda: [" (an element)"] * len(node), lambda: kind)


def _open_mapping(node: Any) -> _Branch:
    keys = list(node)
    children = [node[key] for key in keys]
    return _Branch(children, lambda: [f"[{key!r}]" for key in keys], lambda: _prepare_mapping(node, keys))


def _open_dataclass(node: Any) -> _Branch:
    # Fields that are declared but not set are left alone.
    names = [name for name in _fields_of(type(node)) if hasattr(node, name)]
    children = [getattr(node, name) for name in names]
    return _Branch(children, lambda: [f".{name}" for name in names], lambda: _prepare_dataclass(node, names))


def _open_registered(node: Any, take_apart: TakeApart) -> _Branch:
    parts, make = take_apart(node)
    kind = type(node).__name__
    return _Branch(list(parts), lambda: [f" (part {i} of the {kind})" for i in range(len(parts))], lambda: make)


def _open_nested(node: Any) -> _Branch:
    """A jagged tensor: its values and offsets move, so that they cross with everything else."""
    offsets, lengths = node.offsets(), node.lengths()
    dim = next(i for i, size in enumerate(node.shape) if not isinstance(size, int))
    rows = offsets.diff() if lengths is None else lengths
    # Known here; asked for later, on the device, they would make the host wait.
    shortest, longest = noted_lengths(node)
    if len(rows) and rows.device.type == "cpu":
        shortest, longest = int(rows.min()), int(rows.max())

    def close(parts: list[Any]) -> Tensor:
        values, offsets, *rest = parts
        return torch.nested.nested_tensor_from_jagged(
            values, offsets, *rest, jagged_dim=dim, min_seqlen=shortest, max_seqlen=longest
        )

    children = [node.values(), offsets, *([] if lengths is None else [lengths])]
    return _Branch(children, lambda: [".values()", ".offsets()", ".lengths()"][: len(children)], lambda: close)


def _number(children: Sequence[Any]) -> list[str]:
    return [f"[{i}]" for i in range(len(children))]


def _prepare_tuple(node: Any) -> Close:
    kind = type(node)
    if kind is tuple:
        return tuple
    attributes = dict(getattr(node, "__dict__", {}))
    attributes.update(dict.fromkeys(_find_movable(attributes)))  # or they would keep the source's tensors alive
    # That of a named tuple also serves subclasses with an __init__ of their own.
    make: Any = getattr(kind, "_make", partial(tuple.__new__, kind))

    def close(values: list[Any]) -> Any:
        try:
            made = make(values)
        except TypeError:  # of those that are written in C
            return kind(values)
        if attributes:
            made.__dict__.update(attributes)
        return made

    return close


def _prepare_list(node: Any) -> Close:
    if type(node) is list:
        return lambda values: values
    shell = copy.copy(node)  # keeps the attributes of a subclass, the length of a deque
    shell.clear()
    _forget_movable(shell)

    def close(values: list[Any]) -> Any:
        made = copy.copy(shell)  # this may be asked for once more, when an interrupt came between
        made.extend(values)
        return made

    return close


def _prepare_mapping(node: Any, keys: list[Any]) -> Close:
    if type(node) is dict:
        return lambda values: dict(zip(keys, values, strict=True))
    kind = type(node)
    try:
        shell = copy.copy(node)  # with its default factory, its encodings: whatever the class carries along
    except Exception:  # noqa: BLE001 - it does not take what copying puts into it
        shell = node
    if shell is node:  # which cannot be changed
        return lambda values: kind(zip(keys, values, strict=True))
    if kind.__dictoffset__ and node.__dict__ is node:
        shell.__dict__ = shell  # its keys are its attributes
    else:
        _forget_movable(shell)
    put = kind.__setitem__
    try:
        for key in keys:
            put(shell, key, None)  # or the shell would keep the source's tensors alive
    except Exception:  # noqa: BLE001 - it takes nothing any more, or not anything
        put = (dict if isinstance(node, dict) else UserDict).__setitem__
        for key in keys:
            put(shell, key, None)

    def close(values: list[Any]) -> Any:
        for key, value in zip(keys, values, strict=True):
            put(shell, key, value)
        return shell

    return close


def _prepare_dataclass(node: Any, names: list[str]) -> Close:
    shell = object.__new__(type(node))  # not through __init__, which may compute, check or count
    slots = {name for kind in type(node).__mro__ for name in _slots_of(kind) if hasattr(node, name)}
    for name in {*getattr(node, "__dict__", ()), *slots} - {*names}:
        value = getattr(node, name)  # of pydantic's, a dict or a set of what else it has
        object.__setattr__(shell, name, copy.copy(value) if name.startswith("__pydantic_") else value)  # also if frozen
    _forget_movable(shell)

    def close(values: list[Any]) -> Any:
        for name, value in zip(names, values, strict=True):
            object.__setattr__(shell, name, value)
        return shell

    return close


def _fields_of(kind: Any) -> Iterable[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    if hasattr(kind, "__attrs_attrs__"):
        return [field.name for field in kind.__attrs_attrs__]
    return [*kind.__pydantic_fields__, "__pydantic_extra__"]


def _slots_of(kind: type) -> tuple[str, ...]:
    names = kind.__dict__.get("__slots__", ())
    names = (names,) if isinstance(names, str) else tuple(names)
    return tuple(_mangle(name, kind) for name in names if name not in ("__dict__", "__weakref__"))


def _mangle(name: str, kind: type) -> str:
    """A name as Python knows it outside of the body of its class."""
    is_private = name.startswith("__") and not name.endswith("__") and kind.__name__.strip("_")
    return f"_{kind.__name__.lstrip('_')}{name}" if is_private else name


def _open_packed(node: PackedSequence) -> _Branch:
    # The batch sizes must stay on the host: PyTorch refuses them elsewhere, and its loops read them one by one.
    batch_sizes = node.batch_sizes

    def close(values: list[Any]) -> PackedSequence:
        data, sorted_indices, unsorted_indices = values
        return PackedSequence(data, batch_sizes, sorted_indices, unsorted_indices)

    labels = [".data", ".sorted_indices", ".unsorted_indices"]
    return _Branch([node.data, node.sorted_indices, node.unsorted_indices], lambda: labels, lambda: close)


_HAVE_ATTRIBUTES = {_open_tuple, _open_list, _open_mapping, _open_dataclass}

_SORTS: tuple[tuple[Any, Any], ...] = (
    (_PLAIN, _STAY),
    (PackedSequence, _open_packed),
    (tuple, _open_tuple),
    ((list, deque), _open_list),
    # Not any mutable mapping: the copy of one may write through to a file or a database.
    ((dict, UserDict), _open_mapping),
    ((set, frozenset), _open_set),
    (np.ma.MaskedArray, None),  # it would lose its mask
    (np.ndarray, _LEAF),
)
