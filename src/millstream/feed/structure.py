"""Take the tensors out of a batch, and put others in their places.

A batch is a tree: tuples, lists, dicts, named tuples, dataclasses and PyTorch's packed sequences are its branches,
tensors the leaves that matter. Everything else (strings, numbers, NumPy arrays, objects of unknown type) belongs to the
tree's shape and stays as it is; so does every branch without a tensor in it, down to its identity.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Rebuild = Callable[[Sequence[Tensor]], Any]
"""Makes the batch again from one tensor per leaf, in the order of ``split``. To be called once."""


def split(batch: Any) -> tuple[list[Tensor], Rebuild]:
    """List the tensors of ``batch``, and how to make a batch of the same shape from others.

    The result keeps no container of the batch and so none of its tensors alive. A tensor that occurs twice is listed
    twice.

    Args:
        batch: Any object.

    Returns:
        The tensors, depth first in the order of iteration, and the function that rebuilds: each container gets its own
        type back (named tuples, dict subclasses, dataclasses included, without running their ``__init__``).
    """
    leaves: list[Tensor] = []
    rebuild = _split(batch, leaves)
    if rebuild is None:
        return leaves, lambda _: batch
    return leaves, rebuild


def name_leaf(batch: Any, index: int) -> str:
    """Say where the ``index``-th tensor of ``batch`` is, as an expression: ``batch['image'][0]``."""
    for i, name in enumerate(_walk_names(batch, "batch")):
        if i == index:
            return name
    raise IndexError(index)


Close = Callable[[list[Any]], Any]
"""Makes a container again from its new children."""


class _Branch(NamedTuple):
    children: list[Any]
    label_children: Callable[[], Iterable[str]]
    prepare: Callable[[], Close]  # asked only of a branch that holds tensors; what it returns must not keep the branch


def _split(node: Any, leaves: list[Tensor]) -> Rebuild | None:
    """``None`` when there is no tensor in ``node``: it is then used as it is."""
    if isinstance(node, Tensor):
        leaves.append(node)
        return itemgetter(len(leaves) - 1)
    branch = _open(node)
    if branch is None:
        return None
    parts = [_split(child, leaves) for child in branch.children]
    if not any(parts):
        return None
    close = branch.prepare()
    rest = [child if part is None else None for child, part in zip(branch.children, parts, strict=True)]
    return lambda values: close(
        [other if part is None else part(values) for other, part in zip(rest, parts, strict=True)]
    )


def _walk_names(node: Any, name: str) -> Iterable[str]:
    if isinstance(node, Tensor):
        yield name
    elif (branch := _open(node)) is not None:
        for child, label in zip(branch.children, branch.label_children(), strict=True):
            yield from _walk_names(child, name + label)


def _open(node: Any) -> _Branch | None:
    """See ``node`` as a branch; ``None`` when it is not one."""
    if isinstance(node, (str, bytes, int, float)) or node is None:
        return None
    if isinstance(node, PackedSequence):
        return _open_packed(node)
    if isinstance(node, tuple):
        kind: Any = type(node)
        if hasattr(kind, "_make"):  # a named tuple: _make also serves subclasses with an __init__ of their own
            return _Branch(list(node), lambda: [f".{field}" for field in kind._fields], lambda: kind._make)
        return _Branch(list(node), lambda: _number(node), lambda: kind)
    if isinstance(node, list):
        return _Branch(list(node), lambda: _number(node), lambda: _prepare_list(node))
    # Not any mutable mapping: the copy of one may write through to a file or a database.
    if isinstance(node, (dict, UserDict)):
        keys = list(node)
        children = [node[key] for key in keys]
        return _Branch(children, lambda: [f"[{key!r}]" for key in keys], lambda: _prepare_mapping(node, keys))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        # Fields that are declared but not set are left alone.
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        children = [getattr(node, name) for name in names]
        return _Branch(children, lambda: [f".{name}" for name in names], lambda: _prepare_dataclass(node, names))
    return None


def _number(children: Sequence[Any]) -> list[str]:
    return [f"[{i}]" for i in range(len(children))]


def _prepare_list(node: list[Any]) -> Close:
    if type(node) is list:
        return lambda values: values
    shell = copy.copy(node)  # keeps the attributes of a subclass
    shell.clear()

    def close(values: list[Any]) -> Any:
        shell.extend(values)
        return shell

    return close


def _prepare_mapping(node: dict[Any, Any] | UserDict[Any, Any], keys: list[Any]) -> Close:
    if type(node) is dict:
        return lambda values: dict(zip(keys, values, strict=True))
    shell = copy.copy(node)  # with its default factory, its encodings: whatever the class carries along
    for key in keys:
        shell[key] = None  # or the shell would keep the source's tensors alive

    def close(values: list[Any]) -> Any:
        for key, value in zip(keys, values, strict=True):
            shell[key] = value
        return shell

    return close


def _prepare_dataclass(node: Any, names: list[str]) -> Close:
    shell = copy.copy(node)  # not through __init__, which may compute, check or count
    for name in names:
        object.__setattr__(shell, name, None)

    def close(values: list[Any]) -> Any:
        for name, value in zip(names, values, strict=True):
            object.__setattr__(shell, name, value)  # also into a frozen one
        return shell

    return close


def _open_packed(node: PackedSequence) -> _Branch:
    # The batch sizes must stay on the host: PyTorch refuses them elsewhere, and its loops read them one by one.
    batch_sizes = node.batch_sizes

    def close(values: list[Any]) -> PackedSequence:
        data, sorted_indices, unsorted_indices = values
        return PackedSequence(data, batch_sizes, sorted_indices, unsorted_indices)

    labels = [".data", ".sorted_indices", ".unsorted_indices"]
    return _Branch([node.data, node.sorted_indices, node.unsorted_indices], lambda: labels, lambda: close)
