"""What becomes of a batch that is divided, operator by operator: the proof that its rows do not depend on each other.

A value is *whole*, the same for all pieces of the batch; or *split* along a dimension, of which each piece has a part;
or a *sum* of what the pieces give; or *local*, of which only the pieces themselves know what it is. A rule says for an
operator with split arguments what its results are, and how its other arguments have to be cut. What no rule allows
looks across the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import prod
from typing import Any

import torch
from torch.fx import Node

aten, prims = torch.ops.aten, torch.ops.prims


class Unsplit(Enum):
    """Kinds of values that are not split."""

    SAME = auto()
    SUM = auto()
    LOCAL = auto()


@dataclass(frozen=True)
class Blocks:
    """Several batches in a row, each of which is split.

    Attributes:
        dim: Along which they are.
        count: How many.
    """

    dim: int
    count: int


SAME, SUM, LOCAL = Unsplit
Kind = int | Unsplit | Blocks | tuple[int | Unsplit, ...]
"""Of a value, or of each of several results; a number is the dimension that is split."""


class LooksAcross(Exception):  # noqa: N818  what it says becomes an error's text
    """An operator for which the rows of a batch depend on each other, or nobody knows; says why."""


@dataclass(frozen=True)
class Splitting:
    """An operator, for a piece of the batch.

    Attributes:
        kind: Of its results.
        cut: Arguments that are whole and have to be cut, and along which dimension.
        args: Its arguments, where sizes among them are those of the whole batch.
        scale: What each piece's result is multiplied by; ``None`` for nothing.
        target: What computes it for a piece; ``None`` for the operator itself.
    """

    kind: Kind
    cut: Mapping[Node, int] = field(default_factory=dict)
    args: tuple[Any, ...] | None = None
    scale: float | None = None
    target: Any = None

    @property
    def dim(self) -> int:
        """The dimension along which its result is split, which it has to be."""
        if not isinstance(self.kind, int):
            raise LooksAcross("adds to a sum over the batch")
        return self.kind


class Kinds:
    """What is known of values so far.

    Args:
        pieces: Of the batch.
    """

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self.of: dict[Node, Kind] = {}

    def split_of(self, value: Any) -> int | None:
        """The dimension along which a value is split; ``None`` where it is whole."""
        if not isinstance(value, Node):
            return None
        kind = self.of[value]
        if kind is SAME:
            return None
        if isinstance(kind, int):
            return kind
        raise LooksAcross("takes several batches in a row, a sum over the batch, or what is no tensor")

    def dim_of(self, value: Any) -> int:
        """The dimension along which a value is split, which it has to be."""
        if (dim := self.split_of(value)) is None:
            raise LooksAcross("has no rows")
        return dim


Rule = Callable[[Any, Kinds], Splitting]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Make a function the rule of operators."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


def find_rule(target: Any) -> Rule:
    """Return the rule of an operator.

    Raises:
        LooksAcross: There is none.
    """
    if (found := RULES.get(target)) is not None:
        return found
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and not target._schema.is_mutable:
        return pointwise
    raise LooksAcross("is not known to treat its rows one by one")


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of the whole value."""
    return tuple(node.meta["val"].shape)


def require(condition: bool, why: str) -> None:
    """Refuse what is not so.

    Raises:
        LooksAcross: With the reason.
    """
    if not condition:
        raise LooksAcross(why)


# --- element by element, and views -----------------------------------------------------------------------------------


def pointwise(node: Any, kinds: Kinds) -> Splitting:
    """Arguments are aligned at the last dimension."""
    return _aligned(node, node.all_input_nodes, kinds)


def _aligned(node: Node, arguments: Sequence[Node], kinds: Kinds) -> Splitting:
    size = shape_of(node)
    found = {kinds.split_of(each): each for each in arguments}
    dims = {dim + len(size) - len(shape_of(each)) for dim, each in found.items() if dim is not None}
    require(len(dims) == 1, "combines rows with others")
    (dim,) = dims
    cut = {}
    for each in arguments:
        own = dim - len(size) + len(shape_of(each))
        if kinds.split_of(each) is None:
            if own >= 0 and shape_of(each)[own] == size[dim] != 1:
                cut[each] = own
        else:
            require(kinds.split_of(each) == own, "combines rows with others")
    return Splitting(dim, cut)


@rule(aten._to_copy.default, aten.detach.default, aten.alias.default)
def _same(node: Any, kinds: Kinds) -> Splitting:
    return pointwise(node, kinds)


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def _view(node: Any, kinds: Kinds) -> Splitting:
    source = node.args[0]
    before, after, kind = shape_of(source), shape_of(node), kinds.of[source]
    batches = kind if isinstance(kind, Blocks) else Blocks(kinds.dim_of(source), 1)
    ahead = prod(before[: batches.dim]) * batches.count
    require(0 not in before, "is empty")
    for place in range(len(after)):
        # Both dimensions begin where as many elements are ahead: the rows of a piece lie together in both.
        if prod(after[:place]) == ahead and after[place] != 1:
            require(after[place] % kinds.pieces == 0, "mixes rows")
            size = [each // kinds.pieces if at == place else each for at, each in enumerate(after)]
            return Splitting(place, args=(source, size))
    raise LooksAcross("mixes rows")


@rule(aten.as_strided.default)
def _as_strided(node: Any, kinds: Kinds) -> Splitting:
    """Of all elements in their order it is a view."""
    value, source = node.meta["val"], node.args[0].meta["val"]
    in_order = value.is_contiguous() and source.is_contiguous() and value.numel() == source.numel()
    require(in_order and not value.storage_offset(), "reads memory in an order of its own")
    return replace(_view(node, kinds), target=aten.view.default)


@rule(aten.permute.default)
def _permute(node: Any, kinds: Kinds) -> Splitting:
    source, order = node.args
    dim, rank = kinds.dim_of(source), len(shape_of(source))
    return Splitting([each % rank for each in order].index(dim))


@rule(aten.transpose.int)
def _transpose(node: Any, kinds: Kinds) -> Splitting:
    source, *ends = node.args
    rank, dim = len(shape_of(source)), kinds.dim_of(source)
    first, second = (each % rank for each in ends)
    return Splitting({first: second, second: first}.get(dim, dim))


@rule(aten.t.default)
def _t(node: Any, kinds: Kinds) -> Splitting:
    source = node.args[0]
    dim = kinds.dim_of(source)
    return Splitting(1 - dim if len(shape_of(source)) == 2 else dim)


@rule(aten.unsqueeze.default)
def _unsqueeze(node: Any, kinds: Kinds) -> Splitting:
    source, place = node.args
    dim = kinds.dim_of(source)
    return Splitting(dim + (place % len(shape_of(node)) <= dim))


@rule(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(node: Any, kinds: Kinds) -> Splitting:
    source, places = node.args
    rank, dim, size = len(shape_of(source)), kinds.dim_of(source), shape_of(source)
    gone = [each % rank for each in (places if isinstance(places, (list, tuple)) else [places])]
    require(dim not in gone, "squeezes the batch")
    return Splitting(dim - sum(each < dim and size[each] == 1 for each in gone))


@rule(aten.expand.default)
def _expand(node: Any, kinds: Kinds) -> Splitting:
    source = node.args[0]
    size = list(shape_of(node))
    dim = kinds.dim_of(source) + len(size) - len(shape_of(source))
    size[dim] //= kinds.pieces
    return Splitting(dim, args=(source, size, *node.args[2:]))


@rule(aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def _part(node: Any, kinds: Kinds) -> Splitting:
    source = node.args[0]
    position = 1 if node.target in (aten.select.int, aten.slice.Tensor, aten.unbind.int) else 2
    at = (node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)) % len(shape_of(source))
    dim = kinds.dim_of(source)
    require(at != dim, "takes some of the rows")
    if node.target in (aten.select.int, aten.unbind.int):
        dim -= at < dim
    if node.target in (aten.select.int, aten.slice.Tensor):
        return Splitting(dim)
    return Splitting((dim,) * len(node.meta["val"]))


@rule(aten.slice_scatter.default, aten.select_scatter.default)
def _put_part(node: Any, kinds: Kinds) -> Splitting:
    base, part = node.args[:2]
    at = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % len(shape_of(base))
    lacks = len(shape_of(base)) > len(shape_of(part))  # the dimension of a selection
    dim, own = kinds.split_of(base), kinds.split_of(part)
    row = kinds.dim_of(base) if own is None else own + (lacks and own >= at)
    require(dim in (row, None) and row != at, "puts rows among others")
    cut = {base: row} if dim is None else {}
    return Splitting(row, cut | ({part: row - (lacks and row > at)} if own is None else {}))


@rule(aten.repeat.default)
def _repeat(node: Any, kinds: Kinds) -> Splitting:
    source, times = node.args
    dim = kinds.dim_of(source) + len(times) - len(shape_of(source))
    require(times[dim] == 1, "repeats rows")
    return Splitting(dim)


@rule(aten.cat.default)
def _cat(node: Any, kinds: Kinds) -> Splitting:
    parts, at = node.args[0], (node.args[1] if len(node.args) > 1 else 0) % len(shape_of(node))
    if all(kinds.of[each] == at for each in parts) and len({shape_of(each) for each in parts}) == 1:
        return Splitting(Blocks(at, len(parts)))
    found = _aligned(node, parts, kinds)
    require(found.kind != at, "puts rows after others")
    return replace(found, cut={each: found.dim for each in parts if kinds.split_of(each) is None})


# --- products and sums -----------------------------------------------------------------------------------------------


@rule(aten.mm.default, aten.bmm.default)
def _product(node: Any, kinds: Kinds) -> Splitting:
    left, right = node.args
    return _multiply(left, right, kinds)


def _multiply(left: Any, right: Any, kinds: Kinds) -> Splitting:
    rows, of_sum = len(shape_of(left)) - 2, len(shape_of(left)) - 1
    one, two = kinds.split_of(left), kinds.split_of(right)
    if rows and (one == 0 or two == 0):  # of a batch of products
        require(one in (0, None) and two in (0, None), "multiplies rows by others")
        return Splitting(0, {each: 0 for each in (left, right) if kinds.split_of(each) is None})
    if one == rows and two is None:
        return Splitting(rows)
    if one is None and two == of_sum:
        return Splitting(of_sum)
    require(one in (of_sum, None) and two in (rows, None), "multiplies rows by others")
    return Splitting(SUM, {**({left: of_sum} if one is None else {}), **({right: rows} if two is None else {})})


@rule(aten.addmm.default)
def _addmm(node: Any, kinds: Kinds) -> Splitting:
    bias, left, right = node.args
    found = _multiply(left, right, kinds)
    require(kinds.split_of(bias) is None, "adds rows to products")
    size, own = shape_of(bias), found.dim - 2 + len(shape_of(bias))
    return replace(found, cut={bias: own} if own >= 0 and size[own] != 1 else {})


_VARIANCES = (aten.var.correction, aten.var_mean.correction)


@rule(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, *_VARIANCES)
def _reduce(node: Any, kinds: Kinds) -> Splitting:
    source = node.args[0]
    rank, dim = len(shape_of(source)), kinds.dim_of(source)
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    gone = {each % rank for each in given or range(rank)}
    keeps = node.kwargs.get("keepdim", False)
    if node.target not in _VARIANCES and len(node.args) > 2:
        keeps = node.args[2]
    if dim in gone:
        return _sum_of_pieces(node, kinds)
    left = dim if keeps else dim - sum(each < dim for each in gone)
    return Splitting((left, left) if node.target is aten.var_mean.correction else left)


@rule(aten.sum.default, aten.mean.default)
def _reduce_all(node: Any, kinds: Kinds) -> Splitting:
    kinds.split_of(node.args[0])
    return _sum_of_pieces(node, kinds)


def _sum_of_pieces(node: Any, kinds: Kinds) -> Splitting:
    if node.target in (aten.mean.dim, aten.mean.default):
        return Splitting(SUM, scale=1 / kinds.pieces)
    require(node.target in (aten.sum.dim_IntList, aten.sum.default), "looks at all rows at once")
    return Splitting(SUM)


# --- indices ---------------------------------------------------------------------------------------------------------


@rule(aten.gather.default, aten.scatter_add.default, aten.scatter.src, aten.scatter.value)
def _gather(node: Any, kinds: Kinds) -> Splitting:
    at, arguments = node.args[1], node.all_input_nodes
    found = _aligned(node, arguments, kinds)
    require(found.kind != at % len(shape_of(node)), "takes rows from others")
    require(len({shape_of(each)[found.dim] for each in arguments}) == 1, "takes some of the rows")
    return replace(found, cut={each: found.dim for each in arguments if kinds.split_of(each) is None})


@rule(aten.embedding.default)
def _embedding(node: Any, kinds: Kinds) -> Splitting:
    table, index = node.args[:2]
    require(kinds.split_of(table) is None, "looks rows up among rows")
    return Splitting(kinds.dim_of(index))


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(node: Any, kinds: Kinds) -> Splitting:
    gradient, index = node.args[:2]
    by_frequency = node.args[4] if len(node.args) > 4 else False
    require(kinds.split_of(gradient) == kinds.split_of(index) and not by_frequency, "counts rows")
    return Splitting(SUM)


@rule(aten._unsafe_masked_index_put_accumulate.default)
def _add_at(node: Any, kinds: Kinds) -> Splitting:
    base, mask, indices, values = node.args
    require(_is_zero(base), "adds to what is there")
    dims = {kinds.split_of(each) for each in (mask, *indices, values) if isinstance(each, Node)}
    require(len(indices) == 1 and len(dims) == 1, "adds rows of another kind")
    return Splitting(SUM)


@rule(aten.index_put.default)
def _index_put(node: Any, kinds: Kinds) -> Splitting:
    base, indices, values = node.args[:3]
    accumulates = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    require(accumulates and len(indices) == 1 and _is_zero(base), "writes rows among rows")
    require(indices[0].meta["val"].dtype is not torch.bool, "writes rows among rows")
    rank = len(shape_of(indices[0])) + len(shape_of(base)) - 1
    require(len(shape_of(values)) == rank, "adds rows of another kind")
    require(kinds.split_of(indices[0]) == kinds.split_of(values), "adds rows of another kind")
    return Splitting(SUM)


def _is_zero(node: Any) -> bool:
    return bool(node.target is aten.full.default and node.args[1] == 0)
