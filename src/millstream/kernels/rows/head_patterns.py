"""Find products that give queries, keys and values of a token, and let our kernel rotate and write them, too."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from millstream.kernels.nodes import add_node, tidy
from millstream.kernels.rows.head_products import LONGEST, MULTIPLY_HEADS, SIZES
from millstream.kernels.rows.head_sums import CASTS, Rotation, Sums, is_wide
from millstream.kernels.rows.product_patterns import Product, find_products, rewrite_products, stripped
from millstream.kernels.rows.row_products import DTYPES, MULTIPLY

aten = torch.ops.aten


class Part(NamedTuple):
    """Some results of a product, from the one at ``start`` on."""

    product: fx.Node
    start: int
    width: int


class Heads(NamedTuple):
    """Queries, keys and values that come of products of one row.

    Attributes:
        parts: Where each of the three comes from.
        query: The queries, rotated.
        writes: Nodes that give the caches of keys and values with what is new.
        rotation: Of queries and keys.
    """

    parts: tuple[Part, ...]
    query: fx.Node
    writes: tuple[fx.Node, fx.Node]
    rotation: Rotation

    @property
    def length(self) -> int:
        """Of the row."""
        return int(_row_of(self.parts[0].product).meta["val"].shape[1])

    @property
    def num_products(self) -> int:
        """How many numbers are multiplied."""
        return self.length * sum(each.width for each in self.parts)

    @property
    def name(self) -> str:
        """What they have in common with others."""
        widths, cache = " + ".join(str(each.width) for each in self.parts), self.writes[0].meta["val"]
        dtype = str(cache.dtype).removeprefix("torch.")
        return f"heads of {cache.shape[3]}, product 1 x {self.length} x ({widths}) {dtype}"

    @property
    def inputs(self) -> list[Any]:
        """What the kernel comes after: all that it reads, with the products in whose place it stands."""
        writes: Any = self.writes
        caches = [each for node in writes for each in (node.args[0], node.args[1][2])]
        return [*(part.product for part in self.parts), self.rotation.cos, self.rotation.sin, *caches]


def find_heads(graph: fx.Graph) -> list[Heads]:
    """Return those in a graph that our kernel can compute."""
    writes = [node for node in graph.find_nodes(op="call_function", target=aten.index_put.default) if _is_ours(node)]
    if not writes:
        return []
    products = {each.node: each for each in find_products(graph)}
    known = (node for node in graph.nodes if node in products or node.target is MULTIPLY)
    plain = {node for node in known if _is_plain(node, products)}
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        return [each for each in _find(Sums(graph, plain), writes) if _is_alone(each, graph)]


def rewrite_heads(gm: fx.GraphModule, is_wanted: Callable[[Heads], bool]) -> None:
    """Let our kernel compute some of them, in place."""
    chosen = {part.product for each in find_heads(gm.graph) if is_wanted(each) for part in each.parts}
    rewrite_products(gm, [each for each in find_products(gm.graph) if each.node in chosen])
    for each in find_heads(gm.graph):
        if is_wanted(each) and all(part.product.target is MULTIPLY for part in each.parts):
            _replace(gm.graph, each)
    tidy(gm)


# --- what there is ---------------------------------------------------------------------------------------------------


def _is_ours(node: fx.Node) -> bool:
    """Whether this gives an input with one new position, and nothing else reads that input as it was."""
    cache, indices, new, *accumulates = (list(arg) if isinstance(arg, (list, tuple)) else arg for arg in node.args)
    if cache.op not in ("placeholder", "get_attr") or any(accumulates) or node.kwargs:  # type: ignore[union-attr]
        return False
    writes = [user for user in cache.users if user is not node]  # type: ignore[union-attr]
    if [(each.target, each.args[:2], len(each.users)) for each in writes] != [(aten.copy_.default, (cache, node), 0)]:
        return False
    if len(indices) != 3 or indices[:2] != [None, None] or any(each.op == "output" for each in node.users):  # type: ignore[arg-type,index]
        return False
    value, position, added = (each.meta["val"] for each in (cache, indices[2], new))  # type: ignore[index,union-attr]
    return (
        all(isinstance(length, int) for length in value.shape)
        and value.dim() == 4
        and value.shape[0] == 1
        and value.shape[3] in SIZES
        and value.stride(3) == 1
        and value.dtype in DTYPES
        and position.shape == (1,)
        and position.dtype in (torch.int32, torch.int64)
        and added.shape == (1, value.shape[1], 1, value.shape[3])
        and added.dtype is value.dtype
    )


def _is_plain(node: fx.Node, products: dict[fx.Node, Product]) -> bool:
    """Whether a product is of one row, with nothing after it."""
    if node.meta["val"].shape[0] != 1 or _row_of(node).meta["val"].shape[1] > LONGEST:
        return False
    product: Any = products.get(node)
    if product is None:
        return node.args[2] is node.args[6] is None and not node.args[9]
    return product.gate is product.halves is product.addend is None and not product.activation


def _find(sums: Sums, writes: Sequence[fx.Node]) -> Iterator[Heads]:
    """Put together what comes of one row, in the order of the graph."""
    known = [(node, found) for node in sums.of if (found := sums.rotation(node)) is not None]
    written: list[Any] = [(node, found) for node in writes if (found := sums.rotation(node.args[2])) is not None]
    for key, rotation in written:
        source = _source(sums, rotation)
        values = [
            (node, other)
            for node, other in written
            if other.cos is None and _source(sums, other) == source and _are_alike(node, key)
        ]
        queries = [
            (node, other)
            for node, other in known
            if other[1:] == rotation[1:] and other.start != rotation.start and _source(sums, other) == source
        ]
        if rotation.cos is None or len(values) != 1 or not queries:
            continue
        (value, of_value), (query, of_query) = values[0], queries[0]
        read = ((query, of_query), (key.args[2], rotation), (value.args[2], of_value))
        parts = tuple(_part(sums, of.start, node.meta["val"].numel()) for node, of in read)
        heads = Heads(parts, _end_of_casts(query), (key, value), rotation)
        if _is_whole(heads) and _is_read_alone(heads, sums):
            yield heads


def _product(sums: Sums, rotation: Rotation) -> fx.Node:
    return max((start, node.name, node) for node, start in sums.start.items() if start <= rotation.start)[2]


def _part(sums: Sums, start: int, width: int) -> Part:
    product = _product(sums, Rotation(start))
    return Part(product, start - sums.start[product], width)


def _source(sums: Sums, rotation: Rotation) -> tuple[Any, ...]:
    """What a product has in common with others of the same row, however often that is written."""
    node = _product(sums, rotation)
    options = (*node.args[4:6], *node.args[7:9]) if node.target is MULTIPLY else ()
    return (stripped(_row_of(node)), node.meta["val"].dtype, _bias_of(node) is None, *options)


def _are_alike(value: fx.Node, key: fx.Node) -> bool:
    """Whether two caches have the same sizes, and get the same position."""
    one, other = (each.args[0].meta["val"] for each in (value, key))  # type: ignore[union-attr]
    return bool(one.shape == other.shape and value.args[1] == key.args[1])


def _is_whole(heads: Heads) -> bool:
    """Whether each part is of one product."""
    return heads.query.meta["val"].dtype in DTYPES and all(
        part.start + part.width <= part.product.meta["val"].shape[1] for part in heads.parts
    )


def _is_read_alone(heads: Heads, sums: Sums) -> bool:
    """Whether nothing reads what the kernel does not write: parts of the products on the way."""
    ends, waiting = {heads.query, *heads.writes}, [part.product for part in heads.parts]
    for node in waiting:
        users = [user for user in node.users if user not in ends]
        if any(user not in sums.of for user in users):
            return False
        waiting += [user for user in users if user not in waiting]
    return True


def _is_alone(heads: Heads, graph: fx.Graph) -> bool:
    """Whether there is a place for the kernel: after all that it reads, before all that reads what it writes."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    last = max(order[each] for each in heads.inputs)
    users = [user for end in (heads.query, *heads.writes) for user in end.users]
    return all(order[user] > last for user in users)


def _end_of_casts(node: fx.Node) -> fx.Node:
    """The last of the casts of a value that is read by nothing but the next one."""
    while len(node.users) == 1 and (user := next(iter(node.users))).target in CASTS and is_wide(user):
        node = user
    return node


def _row_of(product: fx.Node) -> Any:
    return product.args[0 if product.target is MULTIPLY else -2]


def _bias_of(product: fx.Node) -> Any:
    if product.target is MULTIPLY:
        return product.args[3]
    return product.args[0] if len(product.args) == 3 else None


# --- what becomes of it ----------------------------------------------------------------------------------------------


def _replace(graph: fx.Graph, heads: Heads) -> None:
    """Let our kernel compute heads, whose products are ours already."""
    products = [part.product for part in heads.parts]
    order = {node: place for place, node in enumerate(graph.nodes)}
    row, _, _, _, scale, shift, _, norm, eps, *_ = products[0].args
    query, writes = heads.query.meta["val"], heads.writes
    with graph.inserting_before(max(heads.inputs, key=order.__getitem__).next):
        weights = [_slice(graph, part, part.product.args[1]) for part in heads.parts]
        biases = [_slice(graph, part, part.product.args[3]) for part in heads.parts]
        position, caches = writes[0].args[1][2], [node.args[0] for node in writes]  # type: ignore[index]
        is_constant = all(each.args[10] for each in products)
        options = (norm, eps, heads.rotation.second, is_constant, query.dtype)
        given = (row, *weights, *biases, scale, shift, heads.rotation.cos, heads.rotation.sin, position, *caches)
        new, *filled = _functional(graph, (*given, *options), heads)
        new = add_node(graph, aten.view.default, (new, list(query.shape)), heads.query)
    heads.query.replace_all_uses_with(new)
    for old, cache in zip(writes, filled, strict=True):
        old.replace_all_uses_with(cache)


def _slice(graph: fx.Graph, part: Part, whole: Any) -> Any:
    """The part of a weight, or of a bias, that some results come from."""
    if whole is None or part.width == whole.meta["val"].shape[0]:
        return whole
    return add_node(graph, aten.slice.Tensor, (whole, 0, part.start, part.start + part.width), part.product)


def _functional(graph: fx.Graph, args: tuple[Any, ...], heads: Heads) -> list[fx.Node]:
    """Add the operator as graphs have those that write: what it writes is among its results, and only later in place.

    Returns:
        The queries, and both caches with what is new.
    """
    named = dict(zip((each.name for each in MULTIPLY_HEADS._schema.arguments), args, strict=True))
    node = graph.call_function(torch.ops.higher_order.auto_functionalized, (MULTIPLY_HEADS,), named)
    query = heads.query.meta["val"]
    node.meta = {key: heads.query.meta[key] for key in ("stack_trace", "nn_module_stack") if key in heads.query.meta}
    node.meta["val"] = (query.new_empty(1, query.numel()), *(each.meta["val"] for each in heads.writes))
    results = []
    for number, value in enumerate(node.meta["val"]):
        results.append(graph.call_function(operator.getitem, (node, number)))
        results[-1].meta["val"] = value
    return results
