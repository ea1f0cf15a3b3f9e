"""The norm of many tensors, by sums of squares: what ``clip_grad_norm_`` computes.

It asks for the norm of the norms of all gradients. On a GPU each of those is a kernel, and for a large tensor two, each
of a microsecond, whatever is in them: a transformer has over a hundred. As sums of squares, which lie side by side, a
large tensor is read by one kernel, the squares of a small one are written by the kernel that computes it, and one sum
is left.
"""

from __future__ import annotations

import copy
import operator
from math import prod
from typing import Any

import torch
from torch import Tensor

from millstream.passes.graph_pass import graph_pass

_NORM = torch.ops.aten.linalg_vector_norm.default
_NORMS_OF_LIST = torch.ops.aten._foreach_norm.Scalar
_STACK = torch.ops.aten.stack.default

FEWEST = 4
"""Norms that are joined: fewer kernels than that are not worth it."""
SMALL = 8192
"""Elements up to which a tensor's squares are kept until the end."""
ROW = 4096, 16384
"""Elements of a large tensor that are summed to one: between these, by a block of threads."""


@graph_pass("joint-norms", "computes the norm of many norms by sums of squares, on a GPU", lambda gm: gm)
def join_norms(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Compute norms of norms, of tensors in single precision on a CUDA device, as roots of sums of squares.

    Args:
        gm: Graph of aten operators; its nodes carry their values in ``meta["val"]``. It stays as it is.

    Returns:
        The graph with joint norms; ``gm`` itself where there are none.
    """
    if not any(map(_is_joint, gm.graph.nodes)):
        return gm
    graph = copy.deepcopy(gm.graph)
    for node in [node for node in graph.nodes if _is_joint(node)]:
        _join(graph, node)
    graph.lint()
    return torch.fx.GraphModule(gm, graph)


def _is_joint(node: torch.fx.Node) -> bool:
    """Return whether a node is the norm of a stack of norms, which nothing else asks for."""
    stack = _normed(node)
    if stack is None or stack.target is not _STACK or len(stack.users) > 1 or stack.args[1:] not in ((), (0,)):
        return False
    norms = stack.args[0]
    return isinstance(norms, list | tuple) and len(norms) >= FEWEST and None not in map(_normed, norms)


def _normed(node: Any) -> torch.fx.Node | None:
    """Of which tensor a node is the norm; ``None`` where it is none, or not one that can be joined."""
    if not isinstance(node, torch.fx.Node):
        return None
    found: Any = None
    if node.target is _NORM and node.args[1:] in ((), (2,)) and not node.kwargs:
        found = node.args[0]
    elif node.target is operator.getitem:
        of_list, index = node.args
        if of_list.target is _NORMS_OF_LIST and of_list.args[1:] in ((), (2,)) and not of_list.kwargs:  # type: ignore[union-attr]
            found = of_list.args[0][index]  # type: ignore[union-attr,index]
    value = None if found is None else found.meta.get("val")
    if not isinstance(value, Tensor) or not _on_device(value) or value.dtype != torch.float32:
        return None
    return found if all(isinstance(size, int) for size in value.shape) else None


def _on_device(value: Tensor) -> bool:
    """Return whether a kernel is launched for each norm."""
    return value.is_cuda


def _join(graph: torch.fx.Graph, norm: torch.fx.Node) -> None:
    """Put the root of a sum of squares in the place of a norm of norms."""
    aten, stack = torch.ops.aten, norm.args[0]
    norms: Any = stack.args[0]  # type: ignore[union-attr]

    def call(target: Any, shape: list[int], *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        node.meta = {**norm.meta, "val": norm.meta["val"].new_empty(shape)}
        node.meta.pop("tensor_meta", None)
        return node

    with graph.inserting_before(norm):
        parts = []
        for each in norms:
            whole = _normed(each)
            assert whole is not None
            value = whole.meta["val"]
            rows = _rows_of(value)
            if rows is None or len(each.users) > 1:  # somebody reads it
                root = call(aten.reshape.default, [1], each, [1])
                parts.append(call(aten.mul.Tensor, [1], root, root))
                continue
            order, shape = rows
            turned = call(aten.permute.default, [], whole, order)
            turned.meta["val"] = value.permute(order)
            laid = call(aten.reshape.default, shape, turned, shape)
            squares = call(aten.mul.Tensor, shape, laid, laid)
            parts.append(squares if len(shape) == 1 else call(aten.sum.dim_IntList, shape[:1], squares, [1]))
        num_squares = sum(each.meta["val"].numel() for each in parts)
        total = call(aten.sum.default, [], call(aten.cat.default, [num_squares], parts))
        total = call(aten.sqrt.default, [], total)
    norm.replace_all_uses_with(total)
    lists = [each.args[0] for each in norms if each.target is operator.getitem]
    done: Any = dict.fromkeys((norm, stack, *norms, *lists))
    for node in done:
        if not node.users:
            graph.erase_node(node)


def _rows_of(value: Tensor) -> tuple[list[int], list[int]] | None:
    """How to look at a tensor so that its memory is read in order: an order of dimensions, and the shape after that.

    ``None`` where rows of it would be too short or too long.
    """
    num_elements = prod(value.shape)
    if not num_elements:
        return None
    order = sorted(range(value.dim()), key=lambda dimension: -value.stride(dimension))
    if num_elements <= SMALL:
        return order, [num_elements]
    length = next((each for each in range(ROW[0], ROW[1] + 1) if num_elements % each == 0), None)
    return None if length is None else (order, [num_elements // length, length])
