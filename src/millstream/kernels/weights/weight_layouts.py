"""Weights that are made ready for convolutions, by our kernel (``weights``) instead of Inductor's, one for each.

Private PyTorch APIs, one function each; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from millstream.kernels.conv2d.conv2d import CONVOLVE
from millstream.kernels.nodes import add_node, changes_type, may_be_ours, tidy, zeros_of
from millstream.kernels.weights.weights import CONVERT
from millstream.passes.graph_pass import graph_pass

MOST_BYTES = 512 << 10
"""Of a weight: the copy of a larger one takes longer than a launch, and Inductor tries for it which tiles are best."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

aten = torch.ops.aten


@graph_pass("conversions", "makes small weights ready by our kernel")
def take_conversions(gm: torch.fx.GraphModule) -> None:
    """Let our kernel make the weights ready that convolutions read.

    Those are meant that the caller passes, and that would be copied: for the order of their channels, for zeros after
    them, or for their type. What others read of a weight stays as it is.
    """
    converted: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in [node for node in gm.graph.nodes if node.target in (CONVOLVE, aten.convolution.default)]:
        ready: Any = node.args[1]
        given = _origin(ready)
        if not _is_to_be_converted(given, ready):
            continue
        if ready not in converted:
            value = ready.meta["val"]
            with gm.graph.inserting_before(node):
                converted[ready] = add_node(gm.graph, CONVERT, (given, [*value.shape], value.dtype), ready)
        node.update_arg(1, converted[ready])
    if converted:
        tidy(gm)


def _origin(node: torch.fx.Node) -> torch.fx.Node:
    """Return what a weight was before it was given zeros and another type, each once at most."""
    steps = [changes_type, _adds_channels]
    while taken := [step for step in steps if step(node)]:
        steps.remove(taken[0])
        node = node.all_input_nodes[0]
    return node


def _adds_channels(node: torch.fx.Node) -> bool:
    """Return whether this puts zeros after channels and does nothing else."""
    sizes = zeros_of(node)
    return len(sizes) in (6, 8) and not any(sizes[:5]) and not any(sizes[6:7]) and min(sizes) >= 0


def _is_to_be_converted(given: torch.fx.Node, ready: torch.fx.Node) -> bool:
    if given.op != "placeholder":
        return False
    weight, value = given.meta["val"], ready.meta["val"]
    is_last = weight.is_contiguous(memory_format=torch.channels_last)
    return (
        may_be_ours(weight)
        and weight.dim() == 4
        and weight.dtype in _DTYPES
        and value.dtype in _DTYPES
        and (is_last or weight.is_contiguous())
        and weight.shape[1] > 1  # of depthwise ones nothing is to be moved
        and 0 < value.nbytes <= MOST_BYTES
        and (given is not ready or not is_last)
    )


# --- what Inductor is told --------------------------------------------------------------------------------------------


@register_lowering(CONVERT, type_promotion_kind=None)
def _lower(weight: Any, *options: Any) -> Any:
    result: Any = ir.FallbackKernel.create(CONVERT, weight, *options)
    return ir.TensorBox.create(result)
