"""Results lie in memory as they would without what is done to convolutions.

Inductor finds out which strides a graph's results have from the graph as it gets it. There an image may have more
channels than its user sees, or its channels in another place, and its strides would tell of it.

Private PyTorch APIs, one function each; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from millstream.kernels.conv2d.channels import add_node

_library = torch.library.Library("millstream", "FRAGMENT")
_library.define("keep_strides(Tensor result, int[] strides) -> Tensor", tags=torch.Tag.pointwise)
KEEP = torch.ops.millstream.keep_strides.default


@torch.library.impl(_library, "keep_strides", "CompositeExplicitAutograd")
def _keep(result: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """A result with such strides. Inductor copies it if it has others."""
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)


@torch.library.register_fake("millstream::keep_strides", lib=_library)
def _(result: torch.Tensor, strides: list[int]) -> torch.Tensor:
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)


def keep_strides(gm: torch.fx.GraphModule) -> None:
    """Say in the graph which strides its results have, where convolutions decide; the graph is changed in place.

    Args:
        gm: Of aten operators, as it was before anything is done to convolutions; its nodes carry their values in
            ``meta["val"]``.
    """
    behind: set[torch.fx.Node] = set()  # convolutions and what comes after them
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.convolution.default or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    output = next(iter(reversed(gm.graph.nodes)))
    for result in output.all_input_nodes:
        value: Any = result.meta.get("val")
        if result in behind and isinstance(value, torch.Tensor) and _is_dense(value):
            with gm.graph.inserting_before(output):
                kept = add_node(gm.graph, KEEP, (result, [*value.stride()]), result)
            output.replace_input_with(result, kept)
    gm.recompile()


def _is_dense(value: torch.Tensor) -> bool:
    """Whether it has more than one dimension and no gaps; others have the strides of what they are a part of."""
    extent = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride != extent:
            return False
        extent *= size
    return value.dim() > 1


# --- what Inductor is told -------------------------------------------------------------------------------------------


@register_lowering(KEEP, type_promotion_kind=None)
def _lower(result: Any, strides: Any) -> Any:
    return ir.ExternKernel.require_exact_strides(result, strides)
