"""What the nodes of a graph return is kept as AOT autograd has found it.

AOT autograd notes a copy of each value, and Inductor has the graph that it is given run once more with fake tensors,
because its passes have changed some nodes.

Private APIs of AOT autograd and of Inductor's compiler; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._functorch._aot_autograd import graph_capture
from torch._inductor import compile_fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_flatten, tree_leaves

from millstream._torch.compiler.fake_lists import quick_fake_lists
from millstream._torch.compiler.symbols import is_symbolic
from millstream._torch.workarounds import is_off, replaced
from millstream.lower.inductor.shortcuts.aten_graphs import quick_aten_graphs

_MADE = "millstream_made"
"""In a node's ``meta``: its number in AOT autograd's graph, and what it calls there with what."""


@contextlib.contextmanager
def values_kept() -> Iterator[None]:
    """Run nodes with fake tensors that passes have changed, and those that are given another value by these.

    A node keeps its value where it calls what it called, with the same numbers, and with nodes that keep theirs. Where
    it is run, it keeps its value if the new one has the same form and lies in the same memory.

    In AOT autograd's graph nothing is changed in place, so that values keep their form: they are noted themselves.
    Results of operators over lists are made like their operands. What is for other graphs than a step's is left out.
    """
    if is_off("shortcuts"):
        yield
        return
    create = graph_capture._create_graph
    run_passes, run_node = compile_fx._recursive_joint_graph_passes, FakeTensorProp.run_node
    kept: WeakKeyDictionary[FakeTensorProp, dict[int, fx.Node]] = WeakKeyDictionary()

    def create_without_copies(*args: Any, **kwargs: Any) -> Any:
        with _without_copies():
            return create(*args, **kwargs)

    def note_and_run_passes(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _note(gm.graph)
        return run_passes(gm, *args, **kwargs)

    def run_if_changed(self: FakeTensorProp, n: fx.Node) -> Any:
        number, before = _number(n), n.meta.get("val")
        nodes = kept.setdefault(self, {})
        if number is None or before is None or number in nodes:  # of several copies of a node, one keeps its value
            return run_node(self, n)
        if n.op == "call_function" and _is_unchanged(n, nodes):
            nodes[number] = n
            return before
        result = run_node(self, n)
        if not _is_same(n, before, result):
            return result
        nodes[number], n.meta["val"] = n, before
        return result if n.op == "get_attr" else before

    with (
        quick_fake_lists(),
        quick_aten_graphs(),
        replaced(graph_capture, "_create_graph", create_without_copies),
        replaced(compile_fx, "_recursive_joint_graph_passes", note_and_run_passes),
        replaced(FakeTensorProp, "run_node", run_if_changed),
    ):
        yield


@contextlib.contextmanager
def _without_copies() -> Iterator[None]:
    """Let a trace note values themselves, but for those that know more than their form, and on this thread alone."""
    copy, thread = proxy_tensor.snapshot_fake, get_ident()

    def copy_if_needed(val: torch.Tensor, include_real: bool = False) -> Any:
        if type(val) is not FakeTensor or include_real or val.requires_grad or get_ident() != thread:
            return copy(val, include_real)
        return val if val.constant is val.real_tensor is None else copy(val)

    with replaced(proxy_tensor, "snapshot_fake", copy_if_needed):
        yield


def _note(graph: fx.Graph) -> None:
    if is_symbolic([node.meta.get("val") for node in graph.find_nodes(op="placeholder")]):
        return
    for number, node in enumerate(graph.nodes):
        node.meta[_MADE] = number, None
    for node in graph.nodes:
        node.meta[_MADE] = _number(node), _call(node)


def _number(node: fx.Node) -> int | None:
    return node.meta.get(_MADE, (None,))[0]  # type: ignore[no-any-return]


def _call(node: fx.Node) -> Any:
    """What a node calls with what."""

    def describe(value: Any) -> Any:
        return ("node", _number(value)) if isinstance(value, fx.Node) else (type(value), value)

    return node.target, map_aggregate((node.args, node.kwargs), describe)


def _is_unchanged(node: fx.Node, kept: dict[int, fx.Node]) -> bool:
    return (
        (isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem)
        and all(kept.get(_number(each)) is each for each in node.all_input_nodes)  # type: ignore[arg-type]
        and node.meta[_MADE][1] == _call(node)
    )


def _is_same(node: fx.Node, before: Any, result: Any) -> bool:
    """Return whether values have the same form, and lie in the same memory as far as others do."""
    (old, old_tree), (new, new_tree) = tree_flatten(before), tree_flatten(result)
    if old_tree != new_tree or not all(isinstance(each, FakeTensor) for each in (*old, *new)):
        return False
    if any(each.layout is not torch.strided for each in (*old, *new)) or [*map(_form, old)] != [*map(_form, new)]:
        return False
    inputs = {_memory(each) for one in node.all_input_nodes for each in tree_leaves(one.meta.get("val"))}
    return all(
        _memory(a) == _memory(b) or (node.op == "call_function" and not inputs & {_memory(a), _memory(b)})
        for a, b in zip(old, new, strict=True)
    )


def _form(tensor: FakeTensor) -> Any:
    where = tensor.shape, tensor.stride(), tensor.storage_offset()
    return *where, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()


def _memory(tensor: Any) -> int | None:
    return tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else None
