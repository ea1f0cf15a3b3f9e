"""Functions that operators of control flow are given: what they use comes in as an operand, what they write goes out.

PyTorch lets the functions of ``cond`` and ``while_loop`` write tensors where there are no gradients. Everything below
sees functions that write nothing: such a tensor is copied in, changed there, returned, and copied back.

**Contract**
- Of the functions of ``cond`` and ``while_loop``, none writes a tensor that it is given.
- No function has a constant tensor of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from millstream._torch.tensors import FakeTensor
from millstream._torch.tracing import is_higher_order, known_shapes
from millstream.passes.cleanup import move_constants
from millstream.passes.graph_pass import graph_pass

_CLONE, _COPY, _LIFT = (
    torch.ops.aten.clone.default,
    torch.ops.aten.copy_.default,
    torch.ops.aten.lift_fresh_copy.default,
)
FLOWS = frozenset({"cond", "while_loop", "scan", "map_impl"})
"""Names of the operators."""


@graph_pass("pure-bodies", "hands what the functions of control flow use in, and what they write out")
def make_bodies_pure(gm: fx.GraphModule) -> None:
    """Change the operators of control flow in a graph and their functions, in place."""
    flows = [node for node in gm.graph.nodes if is_higher_order(node.target) and node.target.name() in FLOWS]
    for node in flows:
        bodies = [
            getattr(gm, str(each.target)) for each in node.args if isinstance(each, fx.Node) and each.op == "get_attr"
        ]
        for body in bodies:
            move_constants(body, is_aten=False)  # while one can still see where to
            make_bodies_pure.run(body)
        _hand_constants_in(gm, node, bodies)
        if node.target.name() in ("cond", "while_loop"):
            _hand_writes_out(gm, node, bodies)
        for body in bodies:
            _drop_unused_constants(body)
            body.recompile()
    if flows:
        gm.recompile()


def _hand_constants_in(gm: fx.GraphModule, node: fx.Node, bodies: Sequence[fx.GraphModule]) -> None:
    for body in bodies:
        for each in body.graph.find_nodes(op="get_attr"):
            constant = getattr(body, str(each.target))
            if not isinstance(constant, Tensor):
                continue
            user = next(iter(each.users))
            value = user.meta.get("val")
            elsewhere = _elsewhere(node) if constant.dim() == 0 and constant.device.type == "cpu" else None
            if elsewhere is not None:  # a number, which operators take from any device
                constant = constant.to(elsewhere)
                value = value.to(elsewhere) if isinstance(value, Tensor) else value
            name = f"_of_{node.name}_{len(gm._buffers)}"
            gm.register_buffer(name, constant)
            with gm.graph.inserting_before(node):
                operand = gm.graph.call_function(_LIFT, (gm.graph.get_attr(name),))
            operand.meta.update({**user.meta, "val": value})
            *args, others = node.args
            node.args = (*args, (*others, operand))  # type: ignore[misc]
            for other in bodies:
                new = _added_input(other.graph, operand)
                if other is body:
                    each.replace_all_uses_with(new)
            body.graph.erase_node(each)


def _drop_unused_constants(body: fx.GraphModule) -> None:
    """They would be inputs of the whole graph, in host memory."""
    used = {str(node.target) for node in body.graph.find_nodes(op="get_attr")}
    for name in [name for name, _ in body.named_buffers(recurse=False) if name not in used]:
        delattr(body, name)


def _elsewhere(node: fx.Node) -> torch.device | None:
    """The device of what control flow is given, if that is not the host."""
    values = [each.meta.get("val") for each in node.all_input_nodes]
    devices = {each.device for each in values if isinstance(each, Tensor) and each.device.type != "cpu"}
    return devices.pop() if len(devices) == 1 else None


def _added_input(graph: fx.Graph, like: fx.Node) -> fx.Node:
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        new = graph.placeholder(like.name)
    new.target = new.name  # as a name of its own in the code, too
    new.meta.update(like.meta)
    return new


def _hand_writes_out(gm: fx.GraphModule, node: fx.Node, bodies: Sequence[fx.GraphModule]) -> None:
    """Write a node's operands after it, and none of them within."""
    written = sorted(set().union(*map(_written, bodies)))
    if not written:
        return
    *first, others = node.args
    is_loop = node.target.name() == "while_loop"  # type: ignore[union-attr]
    carried: list[Any] = list(first.pop()) if is_loop else []  # type: ignore[arg-type]
    operands: list[Any] = [*carried, *others]  # type: ignore[misc]
    changed = [operands[place] for place in written]
    if is_loop:  # they have another value in each turn
        rest = [each for place, each in enumerate(operands) if place >= len(carried) and place not in written]
        node.args = (*first, (*carried, *changed), tuple(rest))
        node.kwargs = {}
    num_results = len(_results(bodies[-1].graph))
    for body in bodies:
        inputs = body.graph.find_nodes(op="placeholder")
        if is_loop:
            for place in reversed(written):
                inputs[len(carried) - 1].append(inputs[place])
        if not is_loop or body is bodies[-1]:
            _return_written(body.graph, [inputs[place] for place in written])
    after = node
    for number, target in enumerate(changed):
        with gm.graph.inserting_after(after):
            new = gm.graph.call_function(operator.getitem, (node, num_results + number))
        with gm.graph.inserting_after(new):
            after = gm.graph.call_function(_COPY, (target, new))
        for each in (new, after):
            each.meta.update(target.meta)
    for key in ("val", "example_value"):
        if key in node.meta:
            node.meta[key] = (*node.meta[key], *(target.meta[key] for target in changed))


def _return_written(graph: fx.Graph, inputs: Sequence[fx.Node]) -> None:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    results = _results(graph)
    for each in inputs:
        with graph.inserting_before(first):
            copy = graph.call_function(_CLONE, (each,))
        copy.meta.update(each.meta)
        each.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)
        results.append(copy)
    graph.output_node().args = (tuple(results),)


def _results(graph: fx.Graph) -> list[Any]:
    return tree_leaves(graph.output_node().args)


def _written(body: fx.GraphModule) -> set[int]:
    """Positions of the inputs that a function writes."""
    given = run_on_fakes(body)
    return {place for place, each in enumerate(given) if isinstance(each, Tensor) and each._version}


def run_on_fakes(body: fx.GraphModule) -> list[Any]:
    """Run a function on fake tensors like those that it is given, and return these; none if it is given none."""
    inputs = [_value(node) for node in body.graph.find_nodes(op="placeholder")]
    fakes = [each for each in inputs if isinstance(each, FakeTensor)]
    if not fakes:
        return []
    with torch.inference_mode(False), torch.no_grad(), known_shapes(fakes), fakes[0].fake_mode:
        given = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)
            if isinstance(each, Tensor)
            else each
            for each in inputs
        ]
        fx.Interpreter(body).run(*given)
    return given


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))
