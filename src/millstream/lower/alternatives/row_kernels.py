"""Kernels of our own for a few rows: products with what is around them, and attention whose keys are divided."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch

from millstream._torch.workarounds import left_out
from millstream.kernels import registry
from millstream.kernels.nodes import may_be_ours
from millstream.lower.alternatives.alternative import Alternative, Sites, name_product


def _may_be_had(graph: torch.fx.Graph) -> bool:
    off = left_out()
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    on = any(may_be_ours(value) for value in values if isinstance(value, torch.Tensor))
    return on and registry.SWITCH not in off and registry.ROWS not in off


def _group(product: Any) -> str:
    rows, columns = (arg.meta["val"] for arg in product.node.args[-2:])
    return name_product(rows.shape, columns.shape, rows.dtype)


def _find_products(graph: torch.fx.Graph) -> Sites:
    sites: dict[str, list[float]] = defaultdict(list)
    for product in registry.find_row_products(graph) if _may_be_had(graph) else ():
        factors: Any = [node.args[-2:] for node in product.covered]
        sites[_group(product)].append(
            float(sum(rows.meta["val"].shape[0] * columns.meta["val"].numel() for rows, columns in factors))
        )
    return sites


def _rewrite_products(gm: torch.fx.GraphModule, groups: Collection[str]) -> None:
    products = registry.find_row_products(gm.graph)
    registry.rewrite_row_products(gm, [each for each in products if _group(each) in groups])


def _name_attention(node: torch.fx.Node) -> str:
    query, key = (arg.meta["val"] for arg in node.args[:2])  # type: ignore[union-attr]
    sizes = f"{query.shape[0]} x {query.shape[1]} x {query.shape[2]} over {key.shape[2]} x {key.shape[3]}"
    return f"attention {sizes} {str(query.dtype).removeprefix('torch.')}"


def _find_attention(graph: torch.fx.Graph) -> Sites:
    sites: dict[str, list[float]] = defaultdict(list)
    for node in registry.find_row_attention(graph) if _may_be_had(graph) else ():
        sites[_name_attention(node)].append(float(2 * node.args[1].meta["val"].numel()))  # type: ignore[union-attr]
    return sites


def _rewrite_attention(gm: torch.fx.GraphModule, groups: Collection[str]) -> None:
    nodes = registry.find_row_attention(gm.graph)
    registry.rewrite_row_attention(gm, [each for each in nodes if _name_attention(each) in groups])


def _find_heads(graph: torch.fx.Graph) -> Sites:
    sites: dict[str, list[float]] = defaultdict(list)
    for heads in registry.find_row_heads(graph) if _may_be_had(graph) else ():
        sites[heads.name].append(float(heads.num_products))
    return sites


def _rewrite_heads(gm: torch.fx.GraphModule, groups: Collection[str]) -> None:
    registry.rewrite_row_heads(gm, lambda heads: heads.name in groups)


ROW_PRODUCTS = Alternative(
    "row-products",
    "products of up to 8 rows, with the norm before and what follows, are kernels of our own",
    _find_products,
    _rewrite_products,
    is_usual=True,
)
SPLIT_ATTENTION = Alternative(
    "split-attention",
    "attention of up to 16 queries is divided over its keys, by kernels of our own",
    _find_attention,
    _rewrite_attention,
    is_usual=True,
)
HEAD_PRODUCTS = Alternative(
    "head-products",
    "queries, keys and values of a token are one kernel, which rotates them and writes the cache",
    _find_heads,
    _rewrite_heads,  # not usual before its tests have passed on a GPU
)
