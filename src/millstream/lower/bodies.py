"""Operators of control flow in a graph → one node each, with programs for their bodies.

**Contract**
- A body is lowered as any graph is, control flow in it included.
- Afterwards no operator of control flow is left in the graph, or a ``LoweringError`` says why not.

**Steps**, for each operator: lower its bodies; find what has to be copied on the way into them and out of them; put a
node of ``millstream::control`` in its place.

The operators' arguments are as PyTorch 2.11 and 2.13 have them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from millstream._torch.compiler.symbols import is_symbolic
from millstream._torch.tracing import is_higher_order
from millstream.errors import LoweringError
from millstream.lower.control_flow import CONTROL, Body, Control, Flow, register
from millstream.lower.origins import source_line
from millstream.program import Program, TensorLayout, Value

#: Lowers the graph of a body, with examples of its inputs.
Lower = Callable[[fx.GraphModule, list[Any]], Program]

_FLOWS = frozenset(Flow)


def has_control_flow(gm: fx.GraphModule) -> bool:
    """Return whether there is an operator of control flow in a graph."""
    return any(_is_flow(node) for node in gm.graph.nodes)


def _is_flow(node: fx.Node) -> bool:
    return is_higher_order(node.target) and node.target.name() in _FLOWS  # type: ignore[union-attr]


def take_control_flow(gm: fx.GraphModule, lower: Lower, *, is_backward: bool) -> list[Control]:
    """Put one node in the place of each operator of control flow, in place.

    Args:
        gm: Of aten operators, without mutation; its nodes carry their values in ``meta["val"]``.
        lower: Makes programs of bodies.
        is_backward: Whether it is a backward pass, in which PyTorch runs bodies once more.

    Returns:
        What the nodes refer to, to be held as long as the graph is used.

    Raises:
        LoweringError: An operator cannot become a node.
    """
    found = [_replace(gm, node, lower, is_backward=is_backward) for node in filter(_is_flow, list(gm.graph.nodes))]
    for node in gm.graph.find_nodes(op="get_attr") if found else ():
        if not node.users and isinstance(getattr(gm, str(node.target), None), fx.GraphModule):
            gm.graph.erase_node(node)
    return found


def _replace(gm: fx.GraphModule, node: fx.Node, lower: Lower, *, is_backward: bool) -> Control:
    flow = Flow(node.target.name())  # type: ignore[union-attr]
    if node.kwargs.get("mutated_arg_indices"):
        raise _refusal(flow, node, "changes a tensor in place")
    bodies, operands, num_carried, num_sliced = _parts(flow, node)
    results = [_apart(_layout(value, flow, node)) for value in tree_leaves(node.meta.get("val"))]
    given = [_layout(each.meta.get("val") if isinstance(each, fx.Node) else each, flow, node) for each in operands]
    devices = {layout.device for layout in (*results, *given)}
    if len(devices) > 1:
        raise _refusal(flow, node, f"has tensors on {' and '.join(sorted(map(str, devices)))}")
    turns = given[num_carried].size[0] if num_sliced else 0
    first = 1 if flow is Flow.COND else 0  # what decides is not given to the bodies
    parts = [*given[first:]]
    parts[num_carried : num_carried + num_sliced] = map(_slice_of, parts[num_carried : num_carried + num_sliced])
    made = [_body(gm, each, flow, node, num_carried, lower) for each in bodies]
    control = Control(
        flow,
        tuple(_fitted(body, parts, results, num_carried, flow, number) for number, body in enumerate(made)),
        num_carried,
        num_sliced,
        turns,
        tuple(given),
        tuple(results),
    )
    if is_backward and control.draws:
        raise _refusal(flow, node, "draws random numbers, which PyTorch draws again in the backward pass")
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(CONTROL, (operands, register(control)))
    values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in operands]
    # Inductor may lay out what it computes anew, but for operators that say how they are given it, and by this name.
    new.meta = {**node.meta, "val": tree_leaves(node.meta["val"]), "eager_input_vals": ((values, 0), {})}
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    return control


def _parts(flow: Flow, node: fx.Node) -> tuple[list[fx.Node], list[Any], int, int]:
    """An operator's bodies; its operands in order; how many values are carried, and how many are sliced."""
    args: Any = node.args
    match flow:
        case Flow.COND:
            pred, *bodies, operands = args
            return bodies, [pred, *operands], 0, 0
        case Flow.WHILE_LOOP:
            *bodies, carried, others = args
            return bodies, [*carried, *others], len(carried), 0
        case Flow.SCAN:
            body, carried, sliced, others = args
            return [body], [*carried, *sliced, *others], len(carried), len(sliced)
        case Flow.MAP:
            body, sliced, others = args
            return [body], [*sliced, *others], 0, len(sliced)


def _body(gm: fx.GraphModule, attribute: fx.Node, flow: Flow, node: fx.Node, num_carried: int, lower: Lower) -> Body:
    """A function of an operator's, as far as it can be told from itself."""
    module = getattr(gm, str(attribute.target))
    graph = copy.deepcopy(module.graph)
    placeholders = graph.find_nodes(op="placeholder")
    for each in placeholders[:num_carried]:  # what a turn returns does not share memory between elements
        layout = _layout(each.meta.get("val"), flow, node)
        if (apart := _apart(layout)) != layout:
            each.meta["val"] = each.meta["val"].new_empty_strided(apart.size, apart.stride)
    inputs = [each.meta.get("val") for each in placeholders]
    given = tuple(_layout(each, flow, node) for each in inputs)
    output = next(iter(reversed(graph.nodes)))
    leaves = tree_leaves(output.args)
    if not all(isinstance(leaf, fx.Node) for leaf in leaves):
        raise _refusal(flow, node, "returns what is no tensor")
    made = tuple(_apart(_layout(leaf.meta.get("val"), flow, node)) for leaf in leaves)
    with graph.inserting_before(output):
        for place, leaf in enumerate(leaves):
            if leaf.op != "call_function":  # a graph without operators is none to Inductor
                leaves[place] = graph.call_function(torch.ops.aten.clone.default, (leaf,))
                leaves[place].meta = {**leaf.meta}
    output.args = (tuple(leaves),)
    output.meta["user_visible_output_idxs"] = list(range(len(leaves)))  # of which Inductor keeps the strides
    program = lower(fx.GraphModule(module, graph), inputs)
    if program.mutated:
        raise _refusal(flow, node, "changes a tensor in place")
    return Body(program, given, frozenset(), made, frozenset())


def _fitted(
    body: Body,
    given: Sequence[TensorLayout],
    results: Sequence[TensorLayout],
    num_carried: int,
    flow: Flow,
    number: int,
) -> Body:
    """A body with what has to be copied on the way into it and out of it."""
    made = list(body.made)
    if flow is Flow.COND:
        made = list(results)
    elif flow is not Flow.WHILE_LOOP or number == 1:
        made[:num_carried] = body.given[:num_carried]  # the next turn takes them
    relaid = frozenset(place for place, want in enumerate(body.given) if given[place].stride != want.stride)
    program = body.program
    names = [leaf.name for leaf in program.outputs if isinstance(leaf, Value)]
    bases = list(map(program.graph.storage, map(program.base, names)))
    own = {name for kernel in program.graph.kernels for name in kernel.writes} - {*program.inputs}
    copied = frozenset(
        place
        for place, (name, base) in enumerate(zip(names, bases, strict=True))
        if base not in own or base in bases[:place] or not _lies_so(program.layout(name), made[place])
    )
    return Body(program, body.given, relaid, tuple(made), copied)


def _lies_so(layout: TensorLayout | None, wanted: TensorLayout) -> bool:
    return layout is not None and layout.stride == wanted.stride


def _layout(value: Any, flow: Flow, node: fx.Node) -> TensorLayout:
    if not isinstance(value, torch.Tensor):
        raise _refusal(flow, node, "takes or returns numbers, sizes or nothing beside tensors")
    if value.layout is not torch.strided or is_symbolic([*value.shape, *value.stride()]):
        raise _refusal(flow, node, "has sizes that are not known, or sparse tensors")
    return TensorLayout(tuple(value.shape), value.stride(), value.dtype, value.device)


def _apart(layout: TensorLayout) -> TensorLayout:
    """The layout of a result: no two elements share memory."""
    if all(size == 1 or stride for size, stride in zip(layout.size, layout.stride, strict=True)):
        return layout
    return replace(layout, stride=tuple(torch.empty(layout.size, device="meta").stride()))


def _slice_of(layout: TensorLayout) -> TensorLayout:
    return TensorLayout(layout.size[1:], layout.stride[1:], layout.dtype, layout.device)


def _refusal(flow: Flow, node: fx.Node, what: str) -> LoweringError:
    line = source_line(node)
    return LoweringError(
        f"Control flow inside a graph ({flow}) has no kernel graph where it {what}{f' ({line})' if line else ''}.",
        construct=str(flow),
    )
