"""Products of a few rows with a weight, by our kernel for convolutions: a row is an image of one pixel.

cuBLAS gives the last layer of a network for one image to few multiprocessors (``docs/decisions/own-kernels.md``).
"""

from __future__ import annotations

from typing import Any

import torch

from millstream.kernels.conv2d.conv2d import CONVOLVE, is_small_conv2d
from millstream.kernels.nodes import add_node, may_be_ours, tidy
from millstream.passes.graph_pass import graph_pass

MOST_ROWS = 64
"""Of a product: more were not tried."""

aten = torch.ops.aten

_PRODUCTS = (aten.addmm.default, aten.mm.default)


@graph_pass("linear-layers", "makes convolutions of linear layers for few rows")
def take_linear_layers(gm: torch.fx.GraphModule) -> None:
    """Let our kernel compute linear layers for few rows."""
    products = [node for node in gm.graph.nodes if _is_ours(node)]
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in products:
        _replace(gm.graph, node, copies)
    if products:
        tidy(gm)


def _is_ours(node: torch.fx.Node) -> bool:
    if node.target not in _PRODUCTS or node.kwargs:
        return False
    arguments: Any = node.args
    *bias, rows, columns = (arg.meta["val"] for arg in arguments)
    size, outputs = rows.shape, columns.shape[1]
    if not all(isinstance(length, int) for length in (*size, outputs)):
        return False
    if not may_be_ours(rows) or size[0] > MOST_ROWS or not columns.t().is_contiguous():
        return False
    if not rows.is_contiguous() and sum(user.target in _PRODUCTS for user in arguments[-2].users) == 1:
        return False  # a copy for it alone would take as long as is gained
    if any(each.shape != (outputs,) or each.dtype is not rows.dtype for each in bias):
        return False
    image, weight = rows.new_empty([*size, 1, 1]), columns.new_empty([outputs, size[1], 1, 1])
    options = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    return is_small_conv2d([image, weight, None, *options], rows.new_empty([size[0], outputs, 1, 1]))


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, copies: dict[torch.fx.Node, torch.fx.Node]) -> None:
    """Let our kernel compute a product.

    Args:
        graph: Of the product.
        node: The product.
        copies: Of factors that have gaps, each made once.
    """
    *bias, rows, columns = node.args
    size, outputs = _size(rows)[0], _size(columns)[1]
    with graph.inserting_before(node):
        if not rows.meta["val"].is_contiguous():  # type: ignore[union-attr]
            if rows not in copies:
                copies[rows] = add_node(graph, aten.clone.default, (rows,), node)  # type: ignore[index]
                copies[rows].kwargs = {"memory_format": torch.contiguous_format}  # type: ignore[index]
            rows = copies[rows]  # type: ignore[index]
        weight = add_node(graph, aten.permute.default, (columns, [1, 0]), node)
        image, weight = (
            add_node(graph, aten.view.default, (each, [*_size(each), 1, 1]), node) for each in (rows, weight)
        )
        arguments = (image, weight, *(bias or [None]), None, False, outputs, [1, 1], [0, 0])
        result = add_node(graph, CONVOLVE, arguments, node)
        node.replace_all_uses_with(add_node(graph, aten.view.default, (result, [size, outputs]), node))


def _size(node: Any) -> torch.Size:
    return node.meta["val"].shape  # type: ignore[no-any-return]
