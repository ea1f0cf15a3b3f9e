"""Find products of few rows, with the norm before them and what follows, and let our kernel compute all of it.

Models write norms and activations in many ways, and decompositions make others of them. A norm is known by its
operators, casts aside; an activation by its values.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from millstream.kernels.nodes import Writes, add_node, tidy
from millstream.kernels.rows.row_products import ACTIVATIONS, DTYPES, MULTIPLY, activated, is_row_product

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default)
_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
_CASTS = {torch.ops.prims.convert_element_type.default, aten._to_copy.default}
_POINTWISE = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.neg.default,
    aten.exp.default,
    aten.sigmoid.default,
    aten.silu.default,
    aten.gelu.default,
    aten.relu.default,
    aten.tanh.default,
    aten.erf.default,
    aten.reciprocal.default,
    aten.pow.Tensor_Scalar,
    aten.rsub.Scalar,
    torch.ops.prims.tanh.default,
}


@dataclass(frozen=True)
class Norm:
    """A norm of rows.

    Attributes:
        kind: One of ``row_products.NORMS``.
        of: What it is computed of.
        top: Its result.
        eps: Added under the root.
        scale: A vector by which it is multiplied.
        shift: A vector which is added.
    """

    kind: str
    of: fx.Node
    top: fx.Node
    eps: float
    scale: fx.Node | None
    shift: fx.Node | None


@dataclass(frozen=True)
class Product:
    """A product of few rows, and what our kernel computes with it.

    Attributes:
        node: The product.
        result: What our kernel's result stands for.
        norm: The norm of the rows, if it is computed for such products alone.
        gate: A second product, activated, by which this one is multiplied.
        halves: Whether the gate is the first half of this product's weight, 0, the second, 1, or none of it.
        activation: One of ``row_products.ACTIVATIONS``.
        addend: What is added at last.
    """

    node: fx.Node
    result: fx.Node
    norm: Norm | None = None
    gate: fx.Node | None = None
    halves: int | None = None
    activation: str = ""
    addend: fx.Node | None = None

    @property
    def covered(self) -> tuple[fx.Node, ...]:
        """The products that it stands for."""
        return (self.node,) if self.gate is None else (self.node, self.gate)


def find_products(graph: fx.Graph) -> list[Product]:
    """Return the products in a graph that our kernel can compute; each is in one of them."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    plain = [node for node in graph.nodes if _is_ours(node)]
    sharing: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in plain:
        sharing[stripped(node.args[-2])].append(node)
    found = {node: _with_activation(node, sharing[stripped(node.args[-2])]) for node in plain}
    for each in list(found.values()):
        if each.gate is not None:
            found.pop(each.gate, None)
    found = {node: _with_addend(each, order) for node, each in found.items()}
    writes = Writes(graph)
    found = {
        node: each if not writes.are_between(order[node], order[each.result]) else Product(node, node)
        for node, each in found.items()
    }
    covered = {node for each in found.values() for node in each.covered}
    left = [node for node in plain if node not in covered]  # gates of products that stay alone after all
    return [_with_norm(each, covered) for each in (*found.values(), *(Product(node, node) for node in left))]


def rewrite_products(gm: fx.GraphModule, products: Sequence[Product]) -> None:
    """Let our kernel compute these products, in place."""
    written = _written(gm.graph)
    chosen = {node for each in products for node in each.covered}
    now: dict[fx.Node, fx.Node] = {}
    for each in products:
        norm = each.norm if each.norm is not None and _ends_in(each.norm.top, chosen) else None
        _replace(gm.graph, replace(each, norm=norm), written, now)
    tidy(gm)


# --- what there is ---------------------------------------------------------------------------------------------------


def _is_ours(node: fx.Node) -> bool:
    if node.target not in _PRODUCTS or node.kwargs:
        return False
    *bias, rows, columns = (arg.meta["val"] for arg in node.args)  # type: ignore[union-attr]
    if not all(isinstance(length, int) for length in (*rows.shape, *columns.shape)):
        return False
    if rows.dtype not in DTYPES or not rows.is_contiguous() or any(each.dim() != 1 for each in bias):
        return False
    return columns.stride(0) == 1 and is_row_product(rows, columns.t())


def _with_activation(node: fx.Node, products: Collection[fx.Node]) -> Product:
    """A product with the activation, or the gate, that follows it.

    Args:
        node: The product.
        products: All of the same rows.
    """
    plain = Product(node, _end_of_views(node))
    halves = _halves(plain.result)
    if halves is not None and len(node.args) == 2:
        for number, half in enumerate(halves):
            name, end = _activation(half)
            other = _factor(end, lambda x, other=halves[1 - number]: x is other)
            if name and other is not None:
                return Product(node, other, halves=number, activation=name)
    name, end = _activation(node)
    if name:
        return replace(plain, result=end, activation=name)
    if len(node.args) == 2:
        gates = [each for each in products if each is not node and _are_alike(node, each) and len(each.args) == 2]
        for gate in gates:
            name, end = _activation(gate)
            product = _factor(end, lambda x: x is node) if name else None
            if product is not None:
                return Product(node, product, gate=gate, activation=name)
    return plain


def _are_alike(node: fx.Node, other: fx.Node) -> bool:
    return node.args[-1].meta["val"].shape == other.args[-1].meta["val"].shape  # type: ignore[union-attr]


def _factor(end: fx.Node, is_other: Callable[[fx.Node], bool]) -> fx.Node | None:
    """The product of something, read by nothing else, with something else that is read by nothing else."""
    end = _end_of_views(end, casts=True)
    (user,) = end.users if len(end.users) == 1 else (None,)
    if user is None or user.target is not aten.mul.Tensor or len({*user.all_input_nodes}) != 2:
        return None
    (other,) = (each for each in user.all_input_nodes if each is not end)
    while other.target in _VIEWS | _CASTS and len(other.users) == 1:
        (other,) = other.all_input_nodes
    return user if is_other(other) and len(other.users) == 1 else None


def _halves(node: fx.Node) -> list[fx.Node] | None:
    """Both halves of rows, where they are read as such alone."""
    users, width = [*node.users], node.meta["val"].shape[-1]
    last = (-1, node.meta["val"].dim() - 1)
    if len(users) == 1 and users[0].target in (aten.split.Tensor, aten.split_with_sizes.default):
        _, sizes, *dim = users[0].args
        if (dim or [0])[0] not in last or width % 2 or sizes not in (width // 2, [width // 2] * 2):
            return None
        halves = sorted((each for each in users[0].users if each.target is operator.getitem), key=lambda x: x.args[1])  # type: ignore[arg-type,return-value]
    elif len(users) == 2 and all(each.target is aten.slice.Tensor for each in users):
        halves = sorted(users, key=lambda x: x.args[2])  # type: ignore[arg-type,return-value]
        if any(each.args[1] not in last or each.meta["val"].shape[-1] * 2 != width for each in halves):
            return None
        if halves[0].args[2] != 0 or halves[1].args[2] != width // 2:
            return None
    else:
        return None
    return halves if len(halves) == 2 else None


def _with_addend(product: Product, order: dict[fx.Node, int]) -> Product:
    end = _end_of_views(product.result)
    (user,) = end.users if len(end.users) == 1 else (None,)
    if user is None or user.target is not aten.add.Tensor or user.kwargs or len({*user.all_input_nodes}) != 2:
        return replace(product, result=end)
    (other,) = (each for each in user.all_input_nodes if each is not end)
    value, sum_ = other.meta["val"], user.meta["val"]
    is_later = order[other] > order[product.node] and _depends(other, product.node, order)
    if value.shape != end.meta["val"].shape or not value.is_contiguous() or is_later or sum_.dtype not in DTYPES:
        return replace(product, result=end)
    return replace(product, result=_end_of_views(user), addend=other)


def _depends(node: fx.Node, on: fx.Node, order: dict[fx.Node, int]) -> bool:
    seen, todo = {node}, [node]
    while todo:
        for each in todo.pop().all_input_nodes:
            if each is on:
                return True
            if each not in seen and order[each] > order[on]:
                seen.add(each)
                todo.append(each)
    return False


def _with_norm(product: Product, covered: Collection[fx.Node]) -> Product:
    norm = _norm(product.node.args[-2])
    return replace(product, norm=norm if norm is not None and _ends_in(norm.top, covered) else None)


def _ends_in(node: fx.Node, products: Collection[fx.Node]) -> bool:
    """Whether such products alone read a value."""
    return all(user in products or (user.target in _VIEWS | _CASTS and _ends_in(user, products)) for user in node.users)


# --- norms -----------------------------------------------------------------------------------------------------------


def _norm(rows: Any) -> Norm | None:
    top = node = stripped(rows)
    length = rows.meta["val"].shape[-1]
    shift, node = _vector(node, aten.add.Tensor, length)
    scale, node = _vector(node, aten.mul.Tensor, length)
    if node.target is not aten.mul.Tensor or len({*node.all_input_nodes}) != 2:
        return None
    for factor, root in (node.args, node.args[::-1]):
        found = _normed(stripped(factor), stripped(root))
        if found is not None and _holds_rows(found[1], rows.meta["val"]):
            kind, of, eps = found
            return Norm(kind, of, top, eps, scale, shift)
    return None


def _holds_rows(node: fx.Node, rows: torch.Tensor) -> bool:
    value = node.meta["val"]
    return value.numel() == rows.numel() and value.shape[-1] == rows.shape[-1] and value.is_contiguous()


def _vector(node: fx.Node, target: Any, length: int) -> tuple[fx.Node | None, fx.Node]:
    """A vector that is added to rows, or by which they are multiplied, and the rows; ``None`` where there is none."""
    if node.target is target and not node.kwargs and len({*node.all_input_nodes}) == 2:
        for vector, other in (node.args, node.args[::-1]):
            value = vector.meta["val"]  # type: ignore[union-attr]
            if value.shape == (length,) and value.is_contiguous() and value.is_floating_point():
                return vector, stripped(other)  # type: ignore[return-value]
    return None, node


def _normed(factor: fx.Node, root: fx.Node) -> tuple[str, fx.Node, float] | None:
    if root.target is not aten.rsqrt.default:
        return None
    added = stripped(root.args[0])
    if added.target not in (aten.add.Tensor, aten.add.Scalar) or added.kwargs or not isinstance(added.args[1], float):
        return None
    square, eps = stripped(added.args[0]), added.args[1]
    if square.target is aten.mean.dim:
        powers, dims, *keep = square.args
        powers = stripped(powers)
        of = _squared(powers)
        if of is not None and of is factor and _is_last(dims, powers) and keep == [True]:
            return "rms", of, eps
    if square.target is operator.getitem and square.args[1] == 0 and factor.target is aten.sub.Tensor:
        both: Any = square.args[0]
        mean = stripped(factor.args[1])
        if both.target is not aten.var_mean.correction or mean.target is not operator.getitem:
            return None
        of, options = stripped(both.args[0]), both.kwargs
        is_whole = options.get("correction") == 0 and options.get("keepdim") is True and not factor.kwargs
        if mean.args == (both, 1) and of is stripped(factor.args[0]) and is_whole and _is_last(both.args[1], both):
            return "layer", of, eps
    return None


def _squared(node: fx.Node) -> fx.Node | None:
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
        return stripped(node.args[0])
    if node.target is aten.mul.Tensor and stripped(node.args[0]) is stripped(node.args[1]):
        return stripped(node.args[0])
    return None


def _is_last(dims: Any, node: fx.Node) -> bool:
    value = node.meta["val"]
    value = value[0] if isinstance(value, (tuple, list)) else value
    return list(dims) in ([-1], [value.dim() - 1])


def stripped(node: Any) -> fx.Node:
    """What this has the numbers of, in another shape or type."""
    while node.target in _VIEWS or (node.target in _CASTS and not node.kwargs.get("device")):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _end_of_views(node: fx.Node, *, casts: bool = False) -> fx.Node:
    """The last of the views of something that are read by nothing but the next one."""
    while len(node.users) == 1 and (user := next(iter(node.users))).target in (_VIEWS | _CASTS if casts else _VIEWS):
        node = user
    return node


# --- activations -----------------------------------------------------------------------------------------------------


def _activation(start: fx.Node) -> tuple[str, fx.Node]:
    """The activation of something, and its last operator; none where it is read by anything else, or is another one."""
    inside, todo = {start}, [start]
    while todo:
        for user in todo.pop().users:
            known = user.target in _POINTWISE | _VIEWS | _CASTS
            if user not in inside and known and inside.issuperset(user.all_input_nodes):
                inside.add(user)
                todo.append(user)
    ends = [node for node in inside if not inside.issuperset(node.users)]
    if len(ends) != 1 or ends[0] is start:
        return "", start
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        points = _points()
        found = _computed(start, ends[0], points)
        for name in ACTIVATIONS[1:]:
            wanted = activated(points, name)
            if found is not None and torch.allclose(found, wanted, rtol=1e-6, atol=1e-12, equal_nan=True):
                return name, ends[0]
    return "", start


def _points() -> torch.Tensor:
    """Numbers of each size and sign, at which two activations that are not the same differ."""
    sizes = torch.logspace(-4, 4, 257, dtype=torch.float64)
    return torch.cat([-sizes, torch.zeros(1, dtype=torch.float64), sizes])


def _computed(start: fx.Node, end: fx.Node, points: torch.Tensor) -> torch.Tensor | None:
    """What the operators between two nodes make of numbers, without rounding."""
    values: dict[fx.Node, torch.Tensor] = {start: points}

    def value_of(node: fx.Node) -> torch.Tensor:
        if node not in values:
            for each in node.all_input_nodes:
                value_of(each)
            if node.target in _VIEWS | _CASTS:
                values[node] = values[node.all_input_nodes[0]]
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return values[node]

    try:
        return value_of(end)
    except (RuntimeError, TypeError):
        return None


# --- what becomes of it ----------------------------------------------------------------------------------------------


def _written(graph: fx.Graph) -> set[fx.Node]:
    """What operators write, or may."""
    changing = (node for node in graph.nodes if getattr(getattr(node.target, "_schema", None), "is_mutable", False))
    return {_root(each) for node in changing for each in node.all_input_nodes}


def _root(node: fx.Node) -> fx.Node:
    views = _VIEWS | {aten.permute.default, aten.t.default, aten.slice.Tensor, aten.select.int, aten.transpose.int}
    while node.target in views:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _replace(graph: fx.Graph, product: Product, written: Collection[fx.Node], now: dict[fx.Node, fx.Node]) -> None:
    """Let our kernel compute a product.

    Args:
        graph: Of the product.
        product: It.
        written: What operators of the graph may write.
        now: By what was replaced, what stands for it; the result is noted.
    """
    node, result, norm = product.node, product.result, product.norm
    *bias, rows, _ = node.args
    number, length = rows.meta["val"].shape  # type: ignore[union-attr]
    with graph.inserting_before(result):
        weight, gate = _weight(graph, node), None
        if product.gate is not None:
            gate = _weight(graph, product.gate)
        elif product.halves is not None:
            half = node.meta["val"].shape[1] // 2
            parts = [add_node(graph, aten.slice.Tensor, (weight, 0, i * half, (i + 1) * half), node) for i in (0, 1)]
            weight, gate = parts[1 - product.halves], parts[product.halves]
        width = weight.meta["val"].shape[0]
        if norm is not None:
            rows = add_node(graph, aten.view.default, (now.get(norm.of, norm.of), [number, length]), node)
        addend = product.addend
        if addend is not None:
            addend = add_node(graph, aten.view.default, (now.get(addend, addend), [number, width]), node)
        roots = {_root(each) for each in (weight, gate) if each is not None}
        is_constant = not roots & {*written} and all(each.op in ("placeholder", "get_attr") for each in roots)
        scale, shift = (norm.scale, norm.shift) if norm is not None else (None, None)
        kind, eps = (norm.kind, norm.eps) if norm is not None else ("", 0.0)
        dtype = result.meta["val"].dtype
        options = (kind, eps, product.activation, is_constant, dtype)
        given = (rows, weight, gate, *(bias or [None]), scale, shift, addend)
        new = add_node(graph, MULTIPLY, (*given, *options), node)
        new = add_node(graph, aten.view.default, (new, list(result.meta["val"].shape)), result)
    result.replace_all_uses_with(new)
    now[result] = new
    while result.target in _VIEWS | _CASTS:
        (result,) = result.all_input_nodes
        now[result] = new


def _weight(graph: fx.Graph, node: fx.Node) -> fx.Node:
    columns: Any = node.args[-1]
    if columns.target is aten.permute.default:
        return columns.args[0]  # type: ignore[no-any-return]
    return add_node(graph, aten.permute.default, (columns, [1, 0]), node)
