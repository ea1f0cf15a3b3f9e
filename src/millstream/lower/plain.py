"""A functional graph, run as plain Python."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

_COPY = torch.ops.aten.copy_.default


def plain_forward(graph: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Return what runs a graph node by node.

    An input is what it was before, also where it is read after it was written.

    That is what graphs of AOT autograd mean, and not what they say where one input's new value is another one's old:
    ``copy_(a, b)`` may well stand after ``copy_(b, c)``. So inputs that are written are read from copies.
    """
    fresh = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    inputs = fresh.graph.find_nodes(op="placeholder")
    writes = fresh.graph.find_nodes(op="call_function", target=_COPY)
    written = [node.args[0] for node in writes]
    for source in inputs:
        if source in written:
            with fresh.graph.inserting_after(inputs[-1]):
                kept = fresh.graph.call_function(_copied, (source,))
            source.replace_all_uses_with(kept, lambda user, kept=kept: user is not kept)  # type: ignore[misc]
    for node, target in zip(writes, written, strict=True):
        node.args = (target, *node.args[1:])
    fresh.recompile()
    return lambda values: fresh.forward(*values)  # type: ignore[no-any-return]


def _copied(value: torch.Tensor) -> torch.Tensor:
    """A tensor in memory of its own, at the same place in it."""
    memory = value.new_empty(value.untyped_storage().nbytes() // value.element_size())
    return memory.as_strided(value.shape, value.stride(), value.storage_offset()).copy_(value)
