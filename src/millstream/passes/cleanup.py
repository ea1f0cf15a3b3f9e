"""Tidy up a traced graph: drop what computes nothing, find out which inputs it writes.

The passes change ``gm.graph`` in place; ``gm.recompile()`` is left to their caller, which does it once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx

from millstream._torch.tensors import storage_id
from millstream.passes.graph_pass import graph_pass

IS_DECIDED = "millstream_is_decided"
"""Marks a node that draws a number for a branch that goes one way whatever is drawn."""


@graph_pass("idle-nodes", "drops profiler marks, `detach` and values that nobody uses")
def drop_idle_nodes(gm: fx.GraphModule) -> None:
    """Remove profiler marks, ``detach`` and unused values, in place.

    ``detach`` shares memory with its argument and differs from it in autograd only, which the graph is past; half of
    the nodes of an unrolled network are such.
    """
    drop_marks(gm)
    gm.graph.eliminate_dead_code()
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.rand.default):
        if node.meta.get(IS_DECIDED) and not node.users:
            gm.graph.erase_node(node)


def drop_marks(gm: fx.GraphModule) -> None:
    """Remove profiler marks and ``detach`` alone, in place: of two traces the same is left."""
    for node in reversed(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if "profiler" in str(node.target) and not node.users:
            gm.graph.erase_node(node)
        elif node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


@graph_pass("exact-powers", "computes `1 - beta ** step` of optimizers as exactly as Python does")
def subtract_powers_exactly(gm: fx.GraphModule) -> None:
    """Compute ``beta ** step - 1`` and ``1 - beta ** step`` of optimizers by ``expm1``, in place.

    An eager optimizer computes them in Python's numbers. Of counts in single precision too little is left of the
    difference: RAdam's updates were wrong by 2 %, and by far more where ``beta`` is closer to one. In double precision
    a power would be recomputed for each element of a parameter, since the compiler fuses the two.
    """
    aten = torch.ops.aten
    for power in gm.graph.find_nodes(op="call_function", target=aten._foreach_pow.ScalarAndTensor):
        beta, steps = power.args
        parts = sorted(power.users, key=lambda part: part.args[1])
        if not (isinstance(beta, float) and 0 < beta < 1) or len(parts) != len(steps):
            continue
        readers = (node for node in gm.graph.nodes if not power.users.keys().isdisjoint(node.all_input_nodes))
        changes = list(islice(readers, 2))
        told = [(node.target, node.args[1:]) for node in changes if list(node.args[:1]) == [parts]]
        if told[:1] == [(aten._foreach_sub_.Scalar, (1,))]:
            done, is_turned = changes[:1], False
        elif told == [(aten._foreach_neg_.default, ()), (aten._foreach_add_.Scalar, (1,))]:
            done, is_turned = changes, True
        else:
            continue
        with gm.graph.inserting_before(power):
            values = _powers_less_one(gm.graph, steps, math.log(beta), is_turned=is_turned)
        for part, value in zip(parts, values, strict=True):
            value.meta.update(part.meta)
            part.replace_all_uses_with(value)
        for node in (*done, *parts, power):
            gm.graph.erase_node(node)


def _powers_less_one(graph: fx.Graph, steps: Sequence[fx.Node], log: float, *, is_turned: bool) -> list[fx.Node]:
    """``exp(step * log) - 1`` of each step, or less that where it is turned, as new nodes."""
    aten = torch.ops.aten

    def of(node: fx.Node) -> fx.Node:
        value = graph.call_function(aten.expm1.default, (graph.call_function(aten.mul.Tensor, (node, log)),))
        return graph.call_function(aten.neg.default, (value,)) if is_turned else value

    if steps[0].meta["val"].device.type != "cpu":
        return [of(step) for step in steps]
    # A CPU's loops would compute it for every eight elements; what is seen by its strides is computed before.
    together = of(graph.call_function(aten.stack.default, (list(steps),)))
    known = graph.call_function(aten.as_strided.default, (together, [len(steps)], [1]))
    picked = [graph.call_function(aten.select.int, (known, 0, i)) for i in range(len(steps))]
    return [graph.call_function(aten.clone.default, (each,)) for each in picked]


def written_storages(gm: fx.GraphModule) -> set[int]:
    """Storages (of the fake values in ``node.meta``) that the graph's operators write."""
    return storages_written_by(gm.graph.nodes)


def storages_written_by(nodes: Iterable[fx.Node]) -> set[int]:
    """The same for some of its nodes."""
    return {storage_id(tensor) for argument in _written_arguments(nodes) for tensor in _values(argument)}


def written_inputs(gm: fx.GraphModule) -> set[fx.Node]:
    """Placeholders that the graph's operators write by these names, or by views of them."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            roots[node] = node
        elif isinstance(value := node.meta.get("val"), Tensor):
            known = (arg for arg in node.all_input_nodes if arg in roots)
            seen = next((arg for arg in known if storage_id(arg.meta["val"]) == storage_id(value)), None)
            if seen is not None:
                roots[node] = roots[seen]
    found: set[fx.Node] = set()
    for argument in _written_arguments(gm.graph.nodes):
        nodes = argument if isinstance(argument, (list, tuple)) else [argument]
        found.update(roots[node] for node in nodes if node in roots)
    return found


def _written_arguments(nodes: Iterable[fx.Node]) -> Iterator[Any]:
    """Each argument that an operator writes: a node, a list of nodes, or nothing."""
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
                yield value


@graph_pass("copying-views", "lets a `view` copy where the compiler gives its source other strides")
def let_views_copy(gm: fx.GraphModule, written: set[int]) -> None:
    """Have ``view`` copy where it must, in place; not where it sees memory that is written.

    Some decompositions of the compiler's return other strides than the operator does, such as that of ``cat`` with an
    empty tensor, and a view of the result may not be possible any more.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        if storage_id(node.meta["val"]) not in written:
            node.target = torch.ops.aten.reshape.default


def _values(argument: object) -> Iterator[Tensor]:
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        if isinstance(value, Tensor):
            yield value
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _values(item)


@graph_pass(
    "unused-inputs", "drops inputs that nothing reads", lambda gm: [*range(len(gm.graph.find_nodes(op="placeholder")))]
)
def drop_unused_inputs(gm: fx.GraphModule) -> list[int]:
    """Remove placeholders that nothing uses, in place, and return the positions of those that stay."""
    kept: list[int] = []
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if node.users:
            kept.append(position)
        else:
            gm.graph.erase_node(node)
    return kept


@graph_pass("transfers", "has arguments moved to the device before the graph runs", lambda *_: {})
def hoist_transfers(gm: fx.GraphModule, arguments: list[fx.Node]) -> dict[fx.Node, torch.device]:
    """Take copies of arguments to another device out of the graph, in place.

    A step that calls ``x.to(device)`` would otherwise copy from memory whose address changes from call to call, which
    no CUDA graph can.

    Args:
        gm: The graph.
        arguments: Placeholders of arguments.

    Returns:
        The placeholders that must now be given on another device, and which.
    """
    written = written_storages(gm)
    hoisted: dict[fx.Node, torch.device] = {}
    for placeholder in arguments:
        copies = list(placeholder.users)
        devices = {node.kwargs.get("device") for node in copies if node.target is torch.ops.aten._to_copy.default}
        own = placeholder.meta["val"].device
        if len(devices) != 1 or not all(_is_transfer(node, own) for node in copies):
            continue
        if any(storage_id(node.meta["val"]) in written for node in copies):
            continue
        (device,) = devices
        assert isinstance(device, torch.device)
        hoisted[placeholder] = device
        for node in copies:
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in ("device", "non_blocking")}
            if node.meta["val"].dtype == placeholder.meta["val"].dtype and not node.kwargs.get("memory_format"):
                node.replace_all_uses_with(placeholder)
                gm.graph.erase_node(node)
        placeholder.meta["val"] = torch.empty_like(placeholder.meta["val"], device=device)
    return hoisted


def _is_transfer(node: fx.Node, device: torch.device) -> bool:
    return node.target is torch.ops.aten._to_copy.default and node.kwargs.get("device") not in (None, device)


_DETACHES = torch.ops.aten.detach.default, torch.ops.aten.detach_.default


@graph_pass("constants", "makes constants on the device that the graph copies them to")
def move_constants(gm: fx.GraphModule, *, is_aten: bool = True) -> None:
    """Make constants that the graph copies to another device constants on that device, in place.

    Not those that it has written by then, be it through a view.

    Args:
        gm: With constants.
        is_aten: Whether it is of aten operators alone, of which one sees what they write: then dead code goes as well.
    """
    copy, lift = torch.ops.aten._to_copy.default, torch.ops.aten.lift_fresh_copy.default
    written: set[int] = set()
    for node in list(gm.graph.nodes):
        if node.target is not copy:
            if node.target not in _DETACHES:  # of which the one in place writes nothing
                written |= storages_written_by([node])
            continue
        source: Any = node.args[0]  # a number's tensor itself, where ``torch.func`` has made it
        between: list[fx.Node] = []
        while isinstance(source, fx.Node) and source.target in (lift, *_DETACHES):
            between.append(source)
            source = source.args[0]
        if not isinstance(source, fx.Node) or source.op != "get_attr":
            continue
        value = (between[-1] if between else source).meta.get("val")
        if isinstance(value, Tensor) and storage_id(value) in written:
            continue
        options = {key: value for key, value in node.kwargs.items() if key in ("dtype", "device")}
        name = f"_moved_{node.name}"
        gm.register_buffer(name, getattr(gm, str(source.target)).to(**options))
        with gm.graph.inserting_before(node):
            moved = gm.graph.call_function(lift, (gm.graph.get_attr(name),))
        moved.meta.update(node.meta)
        node.replace_all_uses_with(moved)
        for each in (node, *between, source):
            if not each.users:
                gm.graph.erase_node(each)
    if is_aten:
        gm.graph.eliminate_dead_code()
