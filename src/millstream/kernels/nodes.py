"""Nodes of FX graphs that hold convolutions: their arguments and values, and new ones in their place."""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._triton import has_triton

ALIGNED_CHANNELS = 8  # of 2 bytes: what tensor cores load at a time
_ORIGIN = ("stack_trace", "nn_module_stack")  # where in the user's code a node comes from


def may_be_ours(image: torch.Tensor) -> bool:
    """Return whether kernels of our own can be had where this image is."""
    return on_gpu(image) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return bool(has_triton())


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, real or fake, is on a GPU."""
    return tensor.is_cuda


def has_channels_last(*tensors: torch.Tensor) -> bool:
    """Return whether each of them lies in memory as our kernel reads and writes it."""
    return all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors)


def arguments_of(node: torch.fx.Node) -> list[Any]:
    """All arguments of a convolution in order, however they were passed."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return [*node.args, *(node.kwargs[name] for name in names[len(node.args) :])]


def values_of(node: torch.fx.Node) -> list[Any]:
    """All arguments of a convolution in order, tensors as fake ones."""
    return values(arguments_of(node))


def values(arguments: Iterable[Any]) -> list[Any]:
    """Arguments, tensors as fake ones."""
    return [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in arguments]


def depths_of(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """The longest chain of nodes that leads to each."""
    depths: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        depths[node] = max((depths[each] + 1 for each in node.all_input_nodes), default=0)
    return depths


def add_node(graph: torch.fx.Graph, target: Any, args: tuple[Any, ...], origin: torch.fx.Node) -> torch.fx.Node:
    """Add a call with its value, on behalf of another node."""
    node = graph.call_function(target, args)
    node.meta = {key: origin.meta[key] for key in _ORIGIN if key in origin.meta}
    given = tree_map_only(torch.fx.Node, lambda arg: arg.meta["val"], args)
    modes = [value.fake_mode for value in tree_leaves(given) if isinstance(value, torch._subclasses.FakeTensor)]
    with modes[0] if modes else contextlib.nullcontext():
        node.meta["val"] = target(*given)
    return node


def tidy(gm: torch.fx.GraphModule) -> None:
    """Finish a change of a graph: nothing is left that nobody uses, and all is in order."""
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()


def changes_type(node: torch.fx.Node) -> bool:
    """Return whether this is the same numbers in another type, as under autocast."""
    return node.target is torch.ops.prims.convert_element_type.default


def whole_of(node: torch.fx.Node) -> torch.fx.Node:
    """Return what this is the first channels of; itself, if of nothing."""
    if node.target is torch.ops.aten.slice.Tensor and node.args[1:] == (1, 0, node.meta["val"].shape[1]):
        return node.args[0]  # type: ignore[return-value]
    return node


def zeros_of(node: torch.fx.Node) -> list[int]:
    """Return how many zeros this puts around each dimension of an image, the last one first.

    Empty if it is no such thing.
    """
    if node.target is not torch.ops.aten.constant_pad_nd.default or node.meta["val"].dim() != 4 or any(node.args[2:]):
        return []
    return list(node.args[1])  # type: ignore[arg-type]


class Writes:
    """The places in a graph where operators write into what they are given: no reader may be moved past them."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        schemas = (getattr(node.target, "_schema", None) for node in graph.nodes)
        self._places = [place for place, schema in enumerate(schemas) if getattr(schema, "is_mutable", False)]

    def are_between(self, start: int, end: int) -> bool:
        """Return whether there is one between two places, the first one included."""
        return bisect_left(self._places, start) < bisect_left(self._places, end)
