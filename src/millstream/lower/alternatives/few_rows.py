"""Products of a few rows as sums of Inductor's own, which are fused with what comes before and after them.

A library's product of one row takes a launch or a call, and leaves its result in memory, for as little as a few
thousand operations; and on a GPU it reads the weight at half the speed of memory. Sums are computed in float32, as
libraries do, and rounded once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch

from millstream.kernels.nodes import add_node, tidy
from millstream.lower.alternatives.alternative import Alternative, Sites, aten, on_gpu, products_of

MOST_ROWS = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _find(graph: torch.fx.Graph) -> Sites:
    sites: dict[str, list[float]] = defaultdict(list)
    for node, group, weight in products_of(graph):
        if _may_be_sum(node):
            sites[group].append(weight)
    return sites


def _may_be_sum(node: torch.fx.Node) -> bool:
    rows = node.args[-2].meta["val"]  # type: ignore[union-attr]
    return (
        rows.shape[0] <= MOST_ROWS
        and rows.dtype in _DTYPES
        and all(arg.meta["val"].dtype is rows.dtype for arg in node.args)  # type: ignore[union-attr]
    )


def _rewrite(gm: torch.fx.GraphModule, groups: Collection[str]) -> None:
    graph = gm.graph
    for node, group, _ in products_of(graph):
        if group in groups and _may_be_sum(node):
            dtype = node.meta["val"].dtype
            with graph.inserting_before(node):

                def wide(arg: torch.fx.Node, node: torch.fx.Node = node) -> torch.fx.Node:
                    if arg.meta["val"].dtype is torch.float32:
                        return arg
                    return add_node(graph, torch.ops.prims.convert_element_type.default, (arg, torch.float32), node)

                *bias, rows, columns = (wide(arg) for arg in node.args)  # type: ignore[arg-type]
                left = add_node(graph, aten.unsqueeze.default, (rows, 2), node)
                right = add_node(graph, aten.unsqueeze.default, (columns, 0), node)
                terms = add_node(graph, aten.mul.Tensor, (left, right), node)
                result = add_node(graph, aten.sum.dim_IntList, (terms, [1]), node)
                if bias:
                    result = add_node(graph, aten.add.Tensor, (result, bias[0]), node)
                if dtype is not torch.float32:
                    result = add_node(graph, torch.ops.prims.convert_element_type.default, (result, dtype), node)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
    tidy(gm)


def _find_on_gpu(graph: torch.fx.Graph) -> Sites:
    return _find(graph) if on_gpu(graph) else {}


FEW_ROWS = Alternative(
    "few-rows",
    "products of up to 8 rows are sums, fused with their neighbours",
    _find,
    _rewrite,
    is_usual=True,
)
TUNED_ROWS = Alternative(
    "tuned-rows",
    "products of up to 8 rows are sums, whose block sizes are searched for one by one",
    _find_on_gpu,
    _rewrite,
    options={"coordinate_descent_tuning": True},
)
"""By itself: sums that lose to a library's product as they are may win once they read memory at full speed."""
