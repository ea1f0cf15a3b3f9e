"""Reading and writing FX graphs of aten operators."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

_ORIGIN = ("stack_trace", "nn_module_stack")  # where in the user's code a node comes from


def arguments_of(node: torch.fx.Node) -> list[Any]:
    """The nine arguments of a convolution in order, however they were passed."""
    names = [argument.name for argument in torch.ops.aten.convolution.default._schema.arguments]
    return [*node.args, *(node.kwargs[name] for name in names[len(node.args) :])]


def add_node(graph: torch.fx.Graph, target: Any, args: tuple[Any, ...], origin: torch.fx.Node) -> torch.fx.Node:
    """Add a call with its value, on behalf of another node."""
    node = graph.call_function(target, args)
    node.meta = {key: origin.meta[key] for key in _ORIGIN if key in origin.meta}
    values = tree_map_only(torch.fx.Node, lambda arg: arg.meta["val"], args)
    modes = [value.fake_mode for value in tree_leaves(values) if isinstance(value, torch._subclasses.FakeTensor)]
    with modes[0] if modes else contextlib.nullcontext():
        node.meta["val"] = target(*values)
    return node
