"""What values between a product and its use are made of, where no more is done than to rotate heads by a position.

Rotary embedding is written in many ways: with halves or with whole heads, before or after a transposition. What it
comes to is found by counting: of each number it is known which results of a product it is the sum of, and by which
numbers of which factors these are multiplied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from millstream.kernels.rows.head_products import SIZES

aten = torch.ops.aten

CASTS = {torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.clone.default}
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_VIEWS = {
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    aten.select.int,
    aten.expand.default,
}
_SEEDED = torch.Tag.nondeterministic_seeded
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}


class Term(NamedTuple):
    """A part of each number of a value: a result of a product, times a number of some factor.

    Attributes:
        result: Which one, counted over all products.
        sign: 1 or -1.
        place: Which number of the factor, in memory.
    """

    result: torch.Tensor
    sign: torch.Tensor
    place: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Term:
        return Term(*map(function, self))


Sum = Mapping[fx.Node | None, Term]
"""What a value is the sum of, by the factors: ``None`` for 1."""


class Rotation(NamedTuple):
    """Heads that have been rotated by the angles of a position, or that have not, with neither ``cos`` nor ``sin``.

    Attributes:
        start: The first result that they are made of; the others follow it.
        cos: As ``head_products.HeadProduct`` has it, and so on.
        sin: Likewise.
        second: Likewise.
    """

    start: int
    cos: fx.Node | None = None
    sin: fx.Node | None = None
    second: int = 0


class Sums:
    """What the values of a graph are sums of.

    Attributes:
        of: That, by node, of those that are sums of results of products.
        start: By product, the number of its first result.
    """

    def __init__(self, graph: fx.Graph, products: Collection[fx.Node]) -> None:
        self.of: dict[fx.Node, Sum] = {}
        self.start: dict[fx.Node, int] = {}
        self._equal = _first_equal(graph)
        start = 0
        for node in graph.nodes:
            if node in products:
                shape = node.meta["val"].shape
                ones = torch.ones(shape, dtype=torch.long)
                result = torch.arange(start, start + ones.numel()).view(shape)
                self.start[node] = start
                self.of[node] = {None: Term(result, ones, ones - 1)}
                start += ones.numel()
            elif node.op == "call_function" and any(each in self.of for each in node.all_input_nodes):
                found = self._sum(node)
                if found is not None:
                    self.of[node] = found

    def rotation(self, node: Any) -> Rotation | None:
        """How a value is rotated, if at all; ``None`` where it is anything else than results in their order."""
        found = self.of.get(node)
        if found is None or node.target in _SPLITS:
            return None
        if {*found} == {None}:
            term = found[None]
            start = int(term.result.min())
            return Rotation(start) if _follows(term.result, start) and bool((term.sign == 1).all()) else None
        return _rotation_of(found, node.meta["val"].shape[-1]) if len(found) == 2 else None

    def _sum(self, node: fx.Node) -> Sum | None:
        target, args = node.target, cast("tuple[Any, ...]", node.args)
        if target is aten.mul.Tensor:
            return self._scaled(*args)
        if target is aten.cat.default and not node.kwargs:
            return self._joined(*args)
        if target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
            one, other = (self.of.get(each) for each in args)  # type: ignore[arg-type]
            if one is None or other is None or {*one} & {*other}:
                return None
            other = other if target is aten.add.Tensor else _negated(other)
            shape = node.meta["val"].shape
            return {factor: term.map(lambda x: x.expand(shape)) for factor, term in (*one.items(), *other.items())}
        own = self.of.get(args[0]) if isinstance(args[0], fx.Node) else None
        if own is None:
            return None
        if target is aten.neg.default:
            return _negated(own)
        change = _change(node)
        return None if change is None else {factor: term.map(change) for factor, term in own.items()}

    def _scaled(self, one: Any, other: Any) -> Sum | None:
        if other in self.of:
            one, other = other, one
        own = self.of[one]
        if {*own} != {None} or other in self.of or not isinstance(other, fx.Node):
            return None
        found = self._places(other)
        if found is None:
            return None
        factor, places = found
        result, sign, places = torch.broadcast_tensors(*own[None][:2], places)
        return {factor: Term(result, sign, places)}

    def _places(self, node: fx.Node) -> tuple[fx.Node, torch.Tensor] | None:
        """What a factor is a view of, and which of its numbers it has where."""
        change = _change(node) if node.target not in CASTS else None
        if change is not None:
            found = self._places(node.all_input_nodes[0])
            return None if found is None else (found[0], change(found[1]))
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_contiguous() or not value.is_floating_point():
            return None
        return self._equal(node), torch.arange(value.numel()).view(value.shape)

    def _joined(self, parts: Any, dim: int = 0) -> Sum | None:
        sums: list[Any] = [self.of.get(each) for each in parts]
        if any(each is None or {*each} != {*sums[0]} for each in sums):
            return None
        terms: dict[Any, list[Term]] = {factor: [own[factor] for own in sums] for factor in sums[0]}
        return {
            factor: Term(*(torch.cat(each, dim) for each in zip(*own, strict=True))) for factor, own in terms.items()
        }


def _rotation_of(found: Sum, size: int) -> Rotation | None:
    """How heads of some size are rotated; ``None`` where this is another sum."""
    if size not in SIZES or None in found:
        return None
    start = min(int(term.result.min()) for term in found.values())
    signs = torch.tensor([-1, 1]).repeat_interleave(size // 2)
    for cos, sin in ((*found,), (*found,)[::-1]):
        one, other = found[cos], found[sin]
        swapped = other.result.reshape(-1, 2, size // 2).flip(1)
        places = one.place.reshape(-1, size)
        if (
            _follows(one.result, start)
            and _follows(swapped, start)
            and bool((one.sign == 1).all())
            and bool((other.sign == signs).all())
            and torch.equal(one.place, other.place)
            and torch.equal(places, places[:1].expand_as(places))
        ):
            second = int(places[0, size // 2])
            row = torch.arange(size // 2)
            if second in (0, size // 2) and torch.equal(places[0], torch.cat([row, row + second])):
                return Rotation(start, cos, sin, second)
    return None


def _change(node: fx.Node) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What a node does to the places of numbers, none of which it changes; ``None`` if it does something else."""
    target: Any = node.target
    if len(node.all_input_nodes) != 1:
        return None
    if target in CASTS and not node.kwargs.get("device"):
        return (lambda x: x) if is_wide(node) else None
    if target is operator.getitem and getattr(node.args[0], "target", None) in _SPLITS:
        split: Any = node.args[0]
        return lambda x: split.target(x, *split.args[1:], **split.kwargs)[node.args[1]]
    if target in _SPLITS:
        return lambda x: x  # whose items are taken
    if target in _RESHAPES:
        return lambda x: x.reshape(node.meta["val"].shape)
    return (lambda x: target(x, *node.args[1:], **node.kwargs)) if target in _VIEWS else None


def is_wide(node: fx.Node) -> bool:
    """Whether numbers are the same but for rounding, to at least half precision."""
    dtype = node.meta["val"].dtype
    return dtype.is_floating_point and dtype.itemsize >= 2  # type: ignore[no-any-return]


def _negated(terms: Sum) -> Sum:
    return {factor: term._replace(sign=-term.sign) for factor, term in terms.items()}


def _follows(results: torch.Tensor, start: int) -> bool:
    return torch.equal(results.flatten(), torch.arange(start, start + results.numel()))


def _first_equal(graph: fx.Graph) -> Callable[[fx.Node], fx.Node]:
    """What finds the first node that computes what another one does: models compute angles once a layer."""
    first: dict[Any, fx.Node] = {}
    known: dict[fx.Node, fx.Node] = {}

    def key(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return known[arg]
        if isinstance(arg, (list, tuple)):
            return tuple(map(key, arg))
        return type(arg), arg

    for node in graph.nodes:
        known[node] = node
        target: Any = node.target
        if target is not operator.getitem:
            if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
                continue
            if target._schema.is_mutable:
                first.clear()  # what comes after may read other values
            if target._schema.is_mutable or _SEEDED in target.tags:
                continue
        named = tuple((name, key(arg)) for name, arg in sorted(node.kwargs.items()))
        known[node] = first.setdefault((target, key(node.args), named), node)
    return known.__getitem__
