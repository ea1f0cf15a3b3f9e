"""A training step is split along its batch: forward and backward pass for each piece, and sums of what they give.

**Contract**
- Each operator on parts of the batch is proven to treat its rows one by one, or to sum over them
  (``batch_rules.py``); the parts' shapes are compared with those of the whole. What is not proven is refused.
- Gradients, and whatever else is a sum or a mean over the batch, are added in the order of the pieces, in single
  precision at least. Up to that rounding, results are those of the whole batch.
- What is random is drawn for the whole batch and cut, so that each row has the numbers that it had.

**Steps**
1. What depends on no sum that parameters are part of: whole values, and sums over the batch's own numbers, such as how
   many targets are ignored.
2. Piece by piece, in the order of the program, all that is split; sums grow after each piece.
3. What depends on these sums: clipping, the optimizer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from millstream.errors import CaptureError
from millstream.passes import batch_layers  # noqa: F401  whose rules are known by then
from millstream.passes.batch_rules import (
    LOCAL,
    SAME,
    SUM,
    Blocks,
    Kind,
    Kinds,
    LooksAcross,
    Splitting,
    find_rule,
    shape_of,
)
from millstream.passes.graph_pass import graph_pass

aten, prims = torch.ops.aten, torch.ops.prims

_LINEAR = (
    prims.convert_element_type.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.view.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
"""Of a sum over the batch they may be taken before the pieces are added."""
_SHORT = (torch.float16, torch.bfloat16)
UNDIVIDED = "Leave out micro_batches=, or change that line."


@graph_pass("micro-batches", "splits a step along its batch", otherwise=lambda gm, *_: gm)
def split_batch(gm: GraphModule, pieces: int, static: Collection[int]) -> GraphModule:
    """Return the graph of a step for so many pieces of its batch.

    Args:
        gm: Of functional operators, with what is known of values, as AOT autograd makes it.
        pieces: Two or more.
        static: Positions of the inputs that are no part of the batch.

    Raises:
        CaptureError: The batch cannot be divided; the message names the operator and the line.
    """
    return _Splitter(gm, pieces, static).build()


class _Splitter:
    """A split graph in the making."""

    def __init__(self, gm: GraphModule, pieces: int, static: Collection[int]) -> None:
        self.gm, self.pieces, self.kinds = gm, pieces, Kinds(pieces)
        self.splittings: dict[Node, Splitting] = {}
        self.own: set[Node] = set()  # values that come from the batch alone
        self.late: set[Node] = set()  # whole values that depend on sums of which parameters are a part
        self.new = Graph()
        self.whole: dict[Node, Node] = {}
        self.parts: dict[tuple[Node, int], Node] = {}
        self.sums: dict[Node, Node] = {}
        self.cuts: dict[tuple[Node, int, int], Node] = {}
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.mode = detect_fake_mode([node.meta.get("val") for node in placeholders])
        self.batch = [node for at, node in enumerate(placeholders) if at not in static and _has_rows(node)]

    def build(self) -> GraphModule:
        self._check_batch()
        for node in self.gm.graph.nodes:
            try:
                self._find_kind(node)
            except LooksAcross as reason:
                raise _refusal(node, str(reason)) from None
        for node in self.gm.graph.find_nodes(op="placeholder"):
            self._emit_whole(node)
        self._emit_all()
        (output,) = self.gm.graph.find_nodes(op="output")
        self.new.output(map_arg(output.args[0], self._get_whole)).meta = dict(output.meta)
        split = GraphModule(self.gm, self.new)
        split.meta = dict(self.gm.meta)
        return split

    def _emit_all(self) -> None:
        """Emit the three steps."""
        early = self._needed_for([node for node in self._split_nodes() if self._is_sum(node) and node in self.own])
        for node in self.gm.graph.nodes:
            if node in early:
                for piece in range(self.pieces):
                    self._emit_part(node, piece)
            elif node not in self.splittings and node not in self.late and node.op not in ("placeholder", "output"):
                self._emit_whole(node)
        for piece in range(self.pieces):
            for node in self._split_nodes():
                if node not in early:
                    self._emit_part(node, piece)
        for node in self.gm.graph.nodes:
            if node in self.late and node not in self.splittings:
                self._emit_whole(node)

    # --- what is what ------------------------------------------------------------------------------------------------

    def _check_batch(self) -> None:
        sizes = {shape_of(node)[0] for node in self.batch}
        if len(sizes) != 1:
            told = ", ".join(map(str, sorted(sizes))) or "none"
            raise CaptureError(
                f"The arguments of the step have no common first size to divide ({told}).", remedy=UNDIVIDED
            )
        (size,) = sizes
        if size % self.pieces or size < 2 * self.pieces:
            raise CaptureError(
                f"A batch of {size} cannot be divided into {self.pieces} pieces of the same size, 2 or more.",
                remedy="Give another number as micro_batches=.",
            )

    def _find_kind(self, node: Node) -> None:
        inputs, kinds = node.all_input_nodes, self.kinds.of
        if node in self.batch:
            self.own.add(node)
            kinds[node] = 0
            self.splittings[node] = Splitting(0)
            return
        if node.op not in ("placeholder", "get_attr") and all(each in self.own for each in inputs):
            self.own.add(node)
        if any(each in self.late or (self._is_sum(each) and each not in self.own) for each in inputs):
            self.late.add(node)
        is_split = any(kinds[each] is not SAME and kinds[each] is not SUM for each in inputs)
        is_linear = node.target in _LINEAR and kinds[inputs[0]] is SUM and _loses_nothing(node)
        if node.op == "output" or not (is_split or is_linear):
            kinds[node] = SAME
            return
        if node.target is operator.getitem:
            kinds[node] = kinds[inputs[0]][node.args[1]]  # type: ignore[index]
            self.splittings[node] = Splitting(kinds[node])
        elif is_linear:
            self.splittings[node] = Splitting(SUM)
        else:
            if any(kinds[each] is SAME and each in self.late for each in inputs) or any(
                kinds[each] is SUM and each not in self.own for each in inputs
            ):
                raise LooksAcross("reads what was computed from all rows")
            with_sums = {each: SAME for each in inputs if kinds[each] is SUM}
            kinds |= with_sums  # which have been added by then
            found = find_rule(node.target)(node, self.kinds)
            kinds |= dict.fromkeys(with_sums, SUM)
            self.splittings[node] = found
        kinds[node] = self.splittings[node].kind
        self.late.discard(node)

    def _is_sum(self, node: Node) -> bool:
        return self.kinds.of[node] is SUM

    def _split_nodes(self) -> list[Node]:
        return [node for node in self.gm.graph.nodes if node in self.splittings and node.op != "placeholder"]

    def _needed_for(self, nodes: Sequence[Node]) -> set[Node]:
        """Return these, and the split ones that they come from."""
        found, left = set(nodes), list(nodes)
        while left:
            new = {each for each in left.pop().all_input_nodes if each in self.splittings and each.op != "placeholder"}
            left += new - found
            found |= new
        return found

    # --- the new graph -----------------------------------------------------------------------------------------------

    def _emit_whole(self, node: Node) -> None:
        self.whole[node] = self._copy(node, self._get_whole, node.args, node.meta.get("val"))

    def _emit_part(self, node: Node, piece: int) -> None:
        found = self.splittings[node]

        def get(each: Node) -> Node:
            if each in self.splittings and not self._is_sum(each):
                return self._get_part(each, piece)
            if self._is_sum(each) and self._is_linear(node):
                return self.parts[each, piece]
            return self._cut(each, found.cut[each], piece) if each in found.cut else self._get_whole(each)

        try:
            made = self._copy(node, get, node.args if found.args is None else found.args, target=found.target)
        except RuntimeError as error:
            raise _refusal(node, f"does not take a piece: {str(error).partition(chr(10))[0]}") from error
        if found.scale is not None:
            made = self._call(aten.mul.Tensor, (made, found.scale), node)
        self._check_shapes(node, made, found.kind)
        self.parts[node, piece] = made
        if found.kind is SUM and any(not self._is_linear(each) for each in node.users):
            if made.meta["val"].dtype in _SHORT:
                made = self._call(prims.convert_element_type.default, (made, torch.float32), node)
            before = self.sums.get(node)
            self.sums[node] = made if before is None else self._call(aten.add.Tensor, (before, made), node)

    def _is_linear(self, node: Node) -> bool:
        """Whether it takes a sum before the pieces are added."""
        return node.target in _LINEAR and self.splittings.get(node) == Splitting(SUM)

    def _get_part(self, node: Node, piece: int) -> Node:
        if node.op == "placeholder":
            return self._cut(node, 0, piece)
        return self.parts[node, piece]

    def _cut(self, node: Node, dim: int, piece: int) -> Node:
        """A piece's part of a whole value."""
        key = node, dim, piece
        if key not in self.cuts:
            size = shape_of(node)[dim] // self.pieces
            whole = self._get_whole(node)
            self.cuts[key] = self._call(aten.slice.Tensor, (whole, dim, piece * size, (piece + 1) * size), node)
        return self.cuts[key]

    def _get_whole(self, node: Node) -> Node:
        kind = self.kinds.of[node]
        if node in self.whole or kind is SAME:
            return self.whole[node]
        if kind is SUM:
            self.whole[node] = self._sum(node)
        elif isinstance(kind, int):
            parts = [self.parts[node, piece] for piece in range(self.pieces)]
            self.whole[node] = self._call(aten.cat.default, (parts, kind), node)
        else:
            raise _refusal(node, "gives what only pieces know")
        return self.whole[node]

    def _sum(self, node: Node) -> Node:
        dtype, total = node.meta["val"].dtype, self.sums[node]
        return self._call(prims.convert_element_type.default, (total, dtype), node) if dtype in _SHORT else total

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], source: Node) -> Node:
        made = self.new.call_function(target, args)
        made.meta = {name: value for name, value in source.meta.items() if name not in ("val", "tensor_meta")}
        made.meta["val"] = self._run(made)
        return made

    def _copy(
        self, node: Node, get: Callable[[Node], Node], args: tuple[Any, ...], value: Any = None, target: Any = None
    ) -> Node:
        """The same with other arguments; what comes out of it is found, where it is not known."""
        args, kwargs = map_arg((args, node.kwargs), get)
        made = self.new.create_node(node.op, target or node.target, args, kwargs, node.name, node.type)
        made.meta = dict(node.meta)
        if value is None and node.op == "call_function":
            made.meta.pop("tensor_meta", None)
            made.meta["val"] = self._run(made)
        return made

    def _run(self, made: Node) -> Any:
        args, kwargs = map_arg((made.args, made.kwargs), lambda each: each.meta["val"])
        with self.mode:  # type: ignore[union-attr]
            return made.target(*args, **kwargs)  # type: ignore[operator]

    def _check_shapes(self, node: Node, made: Node, kind: Kind) -> None:
        """See that parts have the shapes that their kinds promise."""
        pairs = [(node.meta.get("val"), made.meta.get("val"), kind)]
        if isinstance(kind, tuple):
            pairs = list(zip(node.meta["val"], made.meta["val"], kind, strict=True))
        for whole, part, one in pairs:
            if one is LOCAL or not isinstance(whole, torch.Tensor):
                continue
            size = list(whole.shape)
            if isinstance(one, int | Blocks):
                size[one.dim if isinstance(one, Blocks) else one] //= self.pieces
            if not isinstance(part, torch.Tensor) or list(part.shape) != size or part.dtype != whole.dtype:
                raise _refusal(node, f"gives something else than {size} for a piece, and {list(whole.shape)} for all")


def _loses_nothing(node: Node) -> bool:
    """Whether it has fractions, and as many digits of them as what it is made from."""
    before, after = node.all_input_nodes[0].meta["val"].dtype, node.meta["val"].dtype
    return before.is_floating_point and torch.promote_types(before, after) is after


def _has_rows(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _refusal(node: Node, why: str) -> CaptureError:
    lines = (node.stack_trace or "").strip().splitlines()
    code = f" ({lines[-1].strip()})" if lines else ""
    return CaptureError(f"The batch cannot be divided: {node.target} {why}{code}.", remedy=UNDIVIDED)
