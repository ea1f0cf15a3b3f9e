"""Find attention of few queries, and let our kernels compute it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from millstream.kernels.nodes import add_node, tidy
from millstream.kernels.rows.attention import ATTEND, JOIN, is_split_attention

aten = torch.ops.aten

OPERATORS = {
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
}


def find_attention(graph: fx.Graph) -> list[fx.Node]:
    """Return the attention in a graph that our kernels can compute."""
    return [node for node in graph.nodes if node.target in OPERATORS and _is_ours(node)]


def _is_ours(node: fx.Node) -> bool:
    given = _arguments(node)
    if given.get("dropout_p") or given.get("is_causal") or any(each.args[1] != 0 for each in node.users if each.users):
        return False
    query, key, value = (each.meta["val"] for each in _factors(given))
    mask = None if _mask(given) is None else _mask(given).meta["val"]
    sizes = (length for each in (query, key, value) for length in each.shape)
    return all(isinstance(length, int) for length in sizes) and is_split_attention(query, key, value, mask)


def _arguments(node: fx.Node) -> dict[str, Any]:
    schema: Any = node.target._schema  # type: ignore[union-attr]
    given = {each.name: each.default_value for each in schema.arguments}
    return {**given, **dict(zip(given, node.args, strict=False)), **node.kwargs}


def _factors(given: dict[str, Any]) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Query, key and value; where heads share keys, keys and values as they are before they are repeated."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    shared = _unrepeated(key), _unrepeated(value)
    if shared[0].meta["val"].shape == shared[1].meta["val"].shape:
        key, value = shared
    return query, key, value


def _unrepeated(node: fx.Node) -> fx.Node:
    """Keys of ``[batch, heads, keys, size]`` that were repeated for the heads which share them; else as they are."""
    whole, shape = node, node.meta["val"].shape
    while node.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.clone.default):
        (node,) = node.all_input_nodes
    if node.target is not aten.expand.default or node.meta["val"].dim() != 5:
        return whole
    (single,) = node.all_input_nodes
    while single.target is aten.slice.Tensor and single.meta["val"].shape == single.args[0].meta["val"].shape:  # type: ignore[union-attr]
        (single,) = single.all_input_nodes  # the whole, as ``x[:, :, None, :, :]`` gives
    if single.target is not aten.unsqueeze.default or single.args[1] != 2:
        return whole
    (own,) = single.all_input_nodes
    batch, heads, _, *rest = node.meta["val"].shape
    is_same = own.meta["val"].shape == (batch, heads, *rest) == (*shape[:1], heads, *shape[2:])
    return own if is_same else whole


def _mask(given: dict[str, Any]) -> Any:
    return given.get("attn_bias", given.get("attn_mask"))


def rewrite_attention(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
    """Let our kernels compute this attention, in place."""
    for node in nodes:
        given = _arguments(node)
        query, key, value = _factors(given)
        scale = given["scale"]
        scale = 1 / math.sqrt(query.meta["val"].shape[3]) if scale is None else scale
        with gm.graph.inserting_before(node):
            parts = add_node(gm.graph, ATTEND, (query, key, value, _mask(given), float(scale)), node)
            for result in [each for each in node.users if each.target is operator.getitem and each.users]:
                found = result.meta["val"]
                layout = (list(found.shape), list(found.stride()), found.dtype)
                joined = add_node(gm.graph, JOIN, (parts, key.meta["val"].shape[1], *layout), node)
                result.replace_all_uses_with(joined)
        for each in (*node.users, node):  # which may draw random numbers, and so do not go by themselves
            gm.graph.erase_node(each)
    tidy(gm)
