"""Tidy up a traced graph: drop what computes nothing, find out which inputs it writes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from millstream.capture.torch_private import storage_id


def drop_idle_nodes(gm: fx.GraphModule) -> None:
    """Remove profiler marks, ``detach`` and unused values, in place.

    ``detach`` shares memory with its argument and differs from it in autograd only, which the graph is past; half of the nodes
    of an unrolled network are such.
    """
    for node in reversed(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if "profiler" in str(node.target) and not node.users:
            gm.graph.erase_node(node)
        elif node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def written_storages(gm: fx.GraphModule) -> set[int]:
    """Storages (of the fake values in ``node.meta``) that the graph's operators write."""
    written: set[int] = set()
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
            written.update(storage_id(tensor) for tensor in _values(value))
    return written


def _values(argument: object) -> Iterator[Tensor]:
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        if isinstance(value, Tensor):
            yield value
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _values(item)


def drop_unused_inputs(gm: fx.GraphModule) -> list[int]:
    """Remove placeholders that nothing uses, in place, and return the positions of those that stay."""
    kept: list[int] = []
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if node.users:
            kept.append(position)
        else:
            gm.graph.erase_node(node)
    gm.recompile()
    return kept
