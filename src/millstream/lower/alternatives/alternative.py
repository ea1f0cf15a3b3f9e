"""The definition of an alternative to the usual kernels, and what products in a graph have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten

Sites = Mapping[str, list[float]]
"""By what sites have in common, the weight of each of them: what it reads, computes and writes, in elements."""


@dataclass(frozen=True)
class Alternative:
    """Another way to compute some of a graph's operators.

    Attributes:
        name: By which ``MILLSTREAM_WITHOUT`` switches it off.
        effect: What it does, in a few words.
        find: Says at which sites of a graph of aten operators it can be had.
        rewrite: Changes the graph at the sites of these groups.
        options: Of Inductor, for the whole program.
        of_products: Of Inductor, for the products of these groups.
        without: Names of what is left out meanwhile, as ``MILLSTREAM_WITHOUT`` does.
        is_usual: Whether it is tried unless asked not to, and not with ``tune="now"`` alone.
    """

    name: str
    effect: str
    find: Callable[[torch.fx.Graph], Sites]
    rewrite: Callable[[torch.fx.GraphModule, Collection[str]], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    of_products: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    is_usual: bool = False


WHOLE = "the program"
"""What stands for all of its sites."""

PRODUCTS = (aten.mm.default, aten.addmm.default)


def name_product(rows: Any, columns: Any, dtype: Any) -> str:
    """Return what a product has in common with others, by the sizes of its factors."""
    m, k, n = rows[0], rows[1], columns[1]
    return f"product {m} x {k} x {n} {str(dtype).removeprefix('torch.')}"


def products_of(graph: torch.fx.Graph) -> list[tuple[torch.fx.Node, str, float]]:
    """The products of a graph, each with what it has in common with others, and its weight."""
    found = []
    for node in graph.nodes:
        if node.target in PRODUCTS and not node.kwargs:
            rows, columns = (arg.meta["val"] for arg in node.args[-2:])
            if all(isinstance(length, int) and length for length in (*rows.shape, *columns.shape)):
                (m, k), n = rows.shape, columns.shape[1]
                found.append((node, name_product(rows.shape, columns.shape, rows.dtype), float(m * k * n)))
    return found


def on_gpu(graph: torch.fx.Graph) -> bool:
    """Return whether a graph computes on a GPU."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
