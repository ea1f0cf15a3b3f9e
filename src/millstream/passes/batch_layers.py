"""Rules for layers: pooling, convolutions and attention treat images and sequences by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from millstream.passes.batch_rules import LOCAL, SUM, Kinds, Splitting, require, rule, shape_of

aten, prims = torch.ops.aten, torch.ops.prims


@rule(
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    prims._low_memory_max_pool_with_offsets.default,
    prims._low_memory_max_pool_offsets_to_indices.default,
)
def _pool(node: Any, kinds: Kinds) -> Splitting:
    """Of images by themselves."""
    found = {each: kinds.split_of(each) for each in node.all_input_nodes}
    require({*found.values()} <= {0, None} and all(len(shape_of(each)) == 4 for each in found), "has no rows")
    values = node.meta["val"]
    kind = (0,) * len(values) if isinstance(values, (tuple, list)) else 0
    return Splitting(kind, {each: 0 for each, dim in found.items() if dim is None})


@rule(aten.convolution.default)
def _convolution(node: Any, kinds: Kinds) -> Splitting:
    source, weight, bias = node.args[:3]
    require(kinds.split_of(source) == 0 and len(shape_of(source)) == len(shape_of(weight)), "has no rows")
    require(kinds.split_of(weight) is None and kinds.split_of(bias) is None, "has rows for weights")
    return Splitting(0)


@rule(aten.convolution_backward.default)
def _convolution_backward(node: Any, kinds: Kinds) -> Splitting:
    gradient, source, weight = node.args[:3]
    require(kinds.split_of(gradient) == 0 and kinds.split_of(weight) is None, "has rows for weights")
    require(len(shape_of(gradient)) == len(shape_of(weight)), "has no rows")
    return Splitting((0, SUM, SUM), {source: 0} if kinds.split_of(source) is None else {})


_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
_ATTENTION_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)


@rule(*_ATTENTION, *_ATTENTION_BACKWARD)
def _attend(node: Any, kinds: Kinds) -> Splitting:
    """Of sequences by themselves; what else it returns is for its own backward pass."""
    named = dict(zip((each.name for each in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    require(not named.get("dropout_p", 0.0), "draws for all rows at once")
    mask = named.get("attn_mask", named.get("attn_bias"))
    cut = {}
    for each in (named[name] for name in ("query", "key", "value")):
        if kinds.split_of(each) is None:
            cut[each] = 0
        else:
            require(kinds.split_of(each) == 0, "has no rows")
    if isinstance(mask, Node):
        if kinds.split_of(mask) is None and shape_of(mask)[0] != 1 and len(shape_of(mask)) == 4:
            cut[mask] = 0
        require(kinds.split_of(mask) in (0, None), "has no rows")
    results = node.meta["val"]
    if node.target in _ATTENTION_BACKWARD:
        require(not (isinstance(mask, Node) and len(results) > 3 and results[3] is not None), "trains a mask")
        return Splitting(tuple(0 if number < 3 else LOCAL for number in range(len(results))), cut)
    return Splitting(tuple(0 if number < 2 else LOCAL for number in range(len(results))), cut)
