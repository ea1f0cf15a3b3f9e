"""Products with a factor in common as one: q, k and v of one input, gate and up, and their gradients.

The other factors are put side by side, which costs a copy of them. It is free where they are computed in the graph, as
casts of weights under autocast are: then they are written there at once. Where they are constants, as with
``freeze=True``, the copy is made once, when the program is lowered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch._dynamo.utils import detect_fake_mode
from torch._inductor.pattern_matcher import stable_topological_sort

from millstream.kernels.nodes import Writes, add_node, tidy
from millstream.lower.alternatives.alternative import Alternative, Sites, aten, products_of

_SAME = {
    aten.permute.default,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    torch.ops.prims.convert_element_type.default,
    aten._to_copy.default,
}

_Joined = dict[Any, torch.fx.Node]
"""What was put side by side, by its parts and the dimension."""

FEWEST_ROWS = 512
"""Of products whose other factors have to be copied in each call: that reads and writes as much as so many rows."""


class _Siblings:
    """Products with a factor in common.

    Attributes:
        nodes: They.
        side: Of the common factor: 0 left, 1 right.
    """

    def __init__(self, nodes: list[torch.fx.Node], side: int) -> None:
        self.nodes, self.side = nodes, side

    @property
    def name(self) -> str:
        dtype = str(self.nodes[0].meta["val"].dtype).removeprefix("torch.")
        m, k, n = *_factor(self.nodes[0], 0).meta["val"].shape, _factor(self.nodes[0], 1).meta["val"].shape[1]
        widths = " + ".join(str(_factor(node, 1 - self.side).meta["val"].shape[1 - self.side]) for node in self.nodes)
        return f"product {f'{m} x {k} x ({widths})' if self.side == 0 else f'({widths}) x {k} x {n}'} {dtype}"

    @property
    def others(self) -> list[torch.fx.Node]:
        return [_factor(node, 1 - self.side) for node in self.nodes]

    def merge(self, gm: torch.fx.GraphModule, joined: _Joined) -> None:
        """Replace them by one; ``joined`` has what was put side by side before."""
        graph, last = gm.graph, self.nodes[-1]
        with graph.inserting_before(last):
            other = _join(gm, self.others, 1 - self.side, last, joined)
            factors = (_factor(last, 0), other) if self.side == 0 else (other, _factor(last, 1))
            biases = [node.args[0] for node in self.nodes if len(node.args) == 3]
            if biases:
                bias = _join(gm, biases, 0, last, joined)  # type: ignore[arg-type]
                merged = add_node(graph, aten.addmm.default, (bias, *factors), last)
            else:
                merged = add_node(graph, aten.mm.default, factors, last)
            start = 0
            for node in self.nodes:
                end = start + node.meta["val"].shape[1 - self.side]
                part = add_node(graph, aten.slice.Tensor, (merged, 1 - self.side, start, end), node)
                node.replace_all_uses_with(part)
                start = end
        for node in self.nodes:
            graph.erase_node(node)


def _factor(node: torch.fx.Node, side: int) -> torch.fx.Node:
    return node.args[side - 2]  # type: ignore[return-value]


def _join(
    gm: torch.fx.GraphModule,
    parts: list[torch.fx.Node],
    dim: int,
    origin: torch.fx.Node,
    joined: _Joined,
) -> torch.fx.Node:
    """Put tensors side by side; those that are turned, as weights of linear layers, before that."""
    graph = gm.graph
    if all(each.target is aten.permute.default for each in parts):
        plain = _join(gm, [each.args[0] for each in parts], 1 - dim, origin, joined)  # type: ignore[misc]
        return add_node(graph, aten.permute.default, (plain, [1, 0]), origin)
    key = (*parts, dim)
    if key not in joined:
        if all(each.op == "get_attr" for each in parts):
            values = [getattr(gm, str(each.target)) for each in parts]
            name = f"_joined_{len(joined)}_{parts[0].name}"
            with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                setattr(gm, name, torch.cat(values, dim))
            first = next(iter(graph.nodes))
            with graph.inserting_before(first):
                joined[key] = graph.get_attr(name)
                mode = detect_fake_mode([each.meta["val"] for each in parts])
                value = getattr(gm, name)
                joined[key].meta["val"] = mode.from_tensor(value) if mode else value
        else:
            joined[key] = add_node(graph, aten.cat.default, (parts, dim), origin)
    return joined[key]


def _value_of(node: Any) -> Any:
    """Return what nodes with the same value have in common: layers make rows of their input, and cast it, each."""
    if isinstance(node, torch.fx.Node) and node.target in _SAME and not node.kwargs:
        return (node.target, *(_value_of(arg) for arg in node.args))
    return tuple(map(_value_of, node)) if isinstance(node, (list, tuple)) else node


def _groups(graph: torch.fx.Graph) -> Iterator[_Siblings]:
    """Products that can become one; each is in one group at most."""
    products = [node for node, _, _ in products_of(graph)]
    alike = defaultdict(list)
    for node in products:
        for side in (0, 1):
            common, other = (_factor(node, each).meta["val"] for each in (side, 1 - side))
            biases = [node.args[0].meta["val"]] if len(node.args) == 3 else []  # type: ignore[union-attr]
            if biases and (side == 1 or biases[0].dim() != 1 or biases[0].shape[0] != other.shape[1]):
                continue
            length = common.shape[1 - side]
            is_turned = _factor(node, 1 - side).target is aten.permute.default
            alike[_value_of(_factor(node, side)), side, length, other.dtype, len(biases), is_turned].append(node)
    taken: set[torch.fx.Node] = set()
    writes = Writes(graph)
    order = {node: place for place, node in enumerate(graph.nodes)}
    before = _ancestors(graph, {node for nodes in alike.values() if len(nodes) > 1 for node in nodes})
    for (_, side, *_), nodes in alike.items():
        free = [node for node in nodes if node not in taken]
        siblings = _Siblings(free, side)
        if len(free) < 2 or any(before[node] & {*free} for node in free):
            continue
        if _is_worth_it(siblings) and not writes.are_between(order[free[0]], order[free[-1]]):
            taken.update(free)
            yield siblings


def _is_worth_it(siblings: _Siblings) -> bool:
    """Return whether putting the other factors side by side costs little enough."""
    sources = [each.args[0] if each.target is aten.permute.default else each for each in siblings.others]
    rows = _factor(siblings.nodes[0], siblings.side).meta["val"].shape[siblings.side]
    is_copied = any(each.op == "placeholder" for each in sources)  # type: ignore[union-attr]
    return not is_copied or rows >= FEWEST_ROWS


def _ancestors(graph: torch.fx.Graph, among: set[torch.fx.Node]) -> dict[torch.fx.Node, set[torch.fx.Node]]:
    """For each node, those of some nodes that it is computed from."""
    before: dict[torch.fx.Node, set[torch.fx.Node]] = {}
    for node in graph.nodes:
        found: set[torch.fx.Node] = set()
        for each in node.all_input_nodes:
            found |= before[each] | ({each} & among)
        before[node] = found
    return before


def _find(graph: torch.fx.Graph) -> Sites:
    sites: dict[str, list[float]] = defaultdict(list)
    weights = {node: weight for node, _, weight in products_of(graph)}
    for siblings in _groups(graph):
        sites[siblings.name].append(sum(weights[node] for node in siblings.nodes))
    return sites


def _rewrite(gm: torch.fx.GraphModule, groups: Collection[str]) -> None:
    joined: _Joined = {}
    for siblings in [each for each in _groups(gm.graph) if each.name in groups]:
        siblings.merge(gm, joined)
    stable_topological_sort(gm.graph)
    tidy(gm)


SIBLINGS = Alternative(
    "siblings",
    "products with a factor in common, as of q, k and v, are one",
    _find,
    _rewrite,
    is_usual=True,
)
