"""The gradients of a convolution, apart.

PyTorch computes the gradients of a convolution's input and of its weight in one operator, which launches the kernels of
one after those of the other. Only the first is what the rest of the backward pass waits for. As two operators they
can run beside each other on two streams; each masks out what the other computes, so the kernels are the same ones and
the numbers too (MXNet's dual-stream backward, https://github.com/apache/mxnet/pull/14006).
"""

from __future__ import annotations

import copy
import operator

import torch

from millstream.passes.graph_pass import graph_pass

_BACKWARD = torch.ops.aten.convolution_backward.default
_MASK = 10  # position of ``output_mask`` among the arguments


@graph_pass("convolution-gradients", "computes a convolution's two gradients by a kernel each, on a GPU", lambda gm: gm)
def split_gradients(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Split every convolution's backward operator on a CUDA device in two.

    Args:
        gm: Graph of aten operators; its nodes carry their values in ``meta["val"]``. It stays as it is.

    Returns:
        The graph with split gradients; ``gm`` itself where there is nothing to split.
    """
    if not any(node.target is _BACKWARD and _worth_splitting(node) for node in gm.graph.nodes):
        return gm
    split = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in list(split.graph.nodes):
        if node.target is _BACKWARD and _worth_splitting(node):
            _split(split.graph, node)
    split.graph.lint()
    split.recompile()
    return split


def _worth_splitting(node: torch.fx.Node) -> bool:
    mask = node.args[_MASK]
    value = node.args[0].meta.get("val")  # type: ignore[union-attr]
    simple = all(user.target is operator.getitem for user in node.users)
    return simple and bool(mask[0] and mask[1]) and _on_device(value)  # type: ignore[index]


def _on_device(value: object) -> bool:
    """Return whether a node's value lies where streams run beside each other."""
    return isinstance(value, torch.Tensor) and value.is_cuda


def _split(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    arguments, mask = node.args[:_MASK], node.args[_MASK]
    values = node.meta.get("val")
    parts = []
    with graph.inserting_before(node):
        for own in ([True, False, False], [False, True, mask[2]]):  # type: ignore[index]
            part = graph.call_function(_BACKWARD, (*arguments, own))
            part.meta = dict(node.meta)
            if values is not None:
                part.meta["val"] = tuple(v if wanted else None for v, wanted in zip(values, own, strict=True))
            parts.append(part)
    for user in list(node.users):
        index = user.args[1]
        user.args = (parts[0] if index == 0 else parts[1], index)
    graph.erase_node(node)
