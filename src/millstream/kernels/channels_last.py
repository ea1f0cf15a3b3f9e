"""Images with their channels last: whether Inductor lays them out so, and results that lie in memory as without.

Inductor finds out which strides a graph's results have from the graph as it gets it. There an image may have more
channels than its user sees, or its channels in another place, and its strides would tell of it.

Private PyTorch APIs, one function each; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import register_lowering
from torch._prims_common import make_channels_last_strides_for

from millstream._torch.workarounds import replaced
from millstream.kernels.nodes import add_node
from millstream.passes.graph_pass import graph_pass

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


def puts_channels_last(gm: torch.fx.GraphModule) -> bool:
    """Return whether Inductor would put the channels of images last in a graph for inference."""
    return bool(GraphLowering.decide_layout_opt(gm, is_inference=True))


@graph_pass("strides", "keeps the strides of results where convolutions are changed")
def keep_strides(gm: torch.fx.GraphModule) -> None:
    """Say in the graph which strides its results have, where convolutions decide, before anything is done to these."""
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
    """Return whether it has more than one dimension and no gaps; others have the strides of what they are a part of."""
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


def lay_out(tensor: Any) -> Any:
    """Have channels last, with nothing between."""
    tensor.realize()  # or each of its readers would have it recomputed
    size = tensor.get_size()
    return ir.ExternKernel.require_exact_strides(tensor, make_channels_last_strides_for(size) if len(size) > 1 else [1])


@contextlib.contextmanager
def taken_for_convolutions(operators: Collection[Any]) -> Iterator[None]:
    """Let Inductor take operators for convolutions where it decides which images are to have their channels last."""
    find = GraphLowering.find_nodes_prefer_channels_last

    def find_ours(self: GraphLowering) -> Any:
        graph: Any = self.module.graph  # type: ignore[union-attr]
        ours = {node: node.target for node in graph.nodes if node.target in operators}
        for node in ours:
            node.target = torch.ops.aten.convolution.default
        try:
            return find(self)
        finally:
            for node, target in ours.items():
                node.target = target

    with replaced(GraphLowering, "find_nodes_prefer_channels_last", find_ours):
        yield
