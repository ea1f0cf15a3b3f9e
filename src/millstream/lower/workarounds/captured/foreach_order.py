"""An in-place operator of a list computes one item after another, where later ones read what it has written.

``torch._foreach_sub_([a, b], [b, a])`` subtracts the new ``a`` from ``b``, and ``torch._foreach_mul_([a, a], 2)`` makes
four times ``a``: so eager PyTorch does on CPUs. (On GPUs the order is that of chance.) Functional graphs read all items
before they write any. So items that meet are written by operators of one item each, in turn.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from millstream._torch.tensors import storage_id
from millstream._torch.workarounds import Workaround


def _write_in_turn(gm: fx.GraphModule) -> None:
    found = [node for node in gm.graph.nodes if _is_in_place(node) and _meet(node)]
    for node in found:
        _take_apart(node)
    if found:
        gm.recompile()


def _is_in_place(node: fx.Node) -> bool:
    """Return whether a node is an operator of lists that writes, of the dispatcher's or as Python calls it."""
    name = node.target._opname if isinstance(node.target, torch._ops.OpOverload) else _name(node.target)
    is_call = node.op == "call_function" and bool(node.args) and isinstance(node.args[0], (list, tuple))
    return is_call and name.startswith("_foreach_") and name.endswith("_")


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", ""))


def _take_apart(node: fx.Node) -> None:
    """Write the items by a node each."""
    items: Any = node.args[0]
    if not all(user.target is operator.getitem for user in node.users):
        return
    for place in range(len(items)):
        with node.graph.inserting_before(node):
            args = tuple(_part(each, place, len(items)) for each in node.args)
            kwargs = {name: _part(each, place, len(items)) for name, each in node.kwargs.items()}
            part = node.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            part.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
    for user in [*node.users]:
        user.replace_all_uses_with(items[user.args[1]])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _part(argument: Any, place: int, num_items: int) -> Any:
    """Return what an operator of one item is given of an argument."""
    is_list = isinstance(argument, (list, tuple)) and len(argument) == num_items
    return [argument[place]] if is_list else argument


def _meet(node: fx.Node) -> bool:
    """Return whether an item is made from memory that an earlier one is written to."""
    items: Any = node.args[0]
    written: dict[int, list[tuple[Any, Any]]] = defaultdict(list)
    for place, item in enumerate(items):
        used = [_part(each, place, len(items)) for each in (*node.args, *node.kwargs.values())]
        if any(_overlaps(extent, written[storage]) for storage, extent in _extents(used)):
            return True
        for storage, extent in _extents([item]):
            written[storage].append(extent)
    return False


def _extents(tree: Any) -> Iterable[tuple[int, tuple[Any, Any]]]:
    """Storages of tensors, and the first and last element in it; those of symbolic sizes may be anywhere."""
    for value in map(_value, tree_leaves(tree)):
        if isinstance(value, Tensor) and value.layout is torch.strided:
            first = last = value.storage_offset()
            for size, stride in zip(value.shape, value.stride(), strict=True):
                last += (size - 1) * stride
            if type(first) is not int or type(last) is not int:
                first, last = 0, float("inf")
            yield storage_id(value), (first * value.itemsize, (last + 1) * value.itemsize)


def _overlaps(extent: tuple[Any, Any], others: Iterable[tuple[Any, Any]]) -> bool:
    return any(extent[0] < end and start < extent[1] for start, end in others)


def _value(argument: Any) -> Any:
    if not isinstance(argument, fx.Node):
        return None
    return argument.meta.get("val", argument.meta.get("example_value"))


WORKAROUND = Workaround(
    "foreach-order",
    "wrong updates by operators of lists in which one item is made from another one, or is there twice",
    captured_pass=_write_in_turn,
)
