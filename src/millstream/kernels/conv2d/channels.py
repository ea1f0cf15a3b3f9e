"""Convolutions with as many channels as tensor cores load at a time.

cuDNN computes a convolution of 18 channels in half precision as one of 24: it clears and fills an enlarged copy of the
image, one of the weight, and cuts the result out of a third, in five kernels more. Here the graph says so itself, and
the kernels that are there anyway do it: the one that makes the image writes the zeros after it, the one that reads the
result leaves out what is behind it, and the one that puts a weight's channels last enlarges it.
``docs/decisions/own-kernels.md`` has the figures. The numbers stay what they are: only zeros are added to sums.

Private PyTorch APIs, one function each; tried on torch 2.11 (CUDA) and 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.constant_folding import constant_fold

from millstream.kernels import nodes
from millstream.kernels.conv2d.conv2d import is_small_conv2d
from millstream.kernels.nodes import ALIGNED_CHANNELS, add_node, arguments_of, may_be_ours, tidy, values_of
from millstream.passes.graph_pass import graph_pass

_FEW_CHANNELS = 4  # of an image as it comes from outside; for these cuDNN has kernels of its own
_DTYPES = (torch.float16, torch.bfloat16)

aten = torch.ops.aten

_READERS_OF_PARTS = {aten.cat.default, aten._unsafe_index.Tensor, aten.mean.dim, aten.constant_pad_nd.default}
"""Beside pointwise operators, which read a part of a tensor as easily as a whole one."""


@graph_pass("channels", "enlarges convolutions whose channels are no multiple of 8")
def align_channels(gm: torch.fx.GraphModule) -> None:
    """Enlarge, by zeros, the channels of convolutions that cuDNN would enlarge, or our kernel can compute only so."""
    convolutions = [node for node in gm.graph.nodes if _is_misaligned(node)]
    if not convolutions:
        return
    images: dict[torch.fx.Node, torch.fx.Node] = {}
    weights = [_align(gm.graph, node, images) for node in sorted(convolutions, key=_is_product)]
    tidy(gm)
    _fold(gm, {weight for weight in weights if weight is not None and weight.args[0].op == "get_attr"})  # type: ignore[union-attr]


def _fold(gm: torch.fx.GraphModule, nodes: set[torch.fx.Node]) -> None:
    """Compute what is made of constants, once: weights of a model with ``freeze=True`` are."""
    if nodes:
        constant_fold(gm, nodes.__contains__)


def _is_misaligned(node: torch.fx.Node) -> bool:
    if node.target is not aten.convolution.default:
        return False
    image, weight, _, _, _, _, transposed, _, groups = arguments_of(node)
    value = weight.meta["val"]
    return (
        nodes.on_gpu(value)
        and value.dim() == 4
        and value.dtype in _DTYPES
        and image.meta["val"].dim() == 4
        and not transposed
        and groups == 1
        and bool(_missing(value.shape[0]) or _missing(value.shape[1]))
        and (value.shape[1] > _FEW_CHANNELS or _becomes_ours(node))
    )


def _becomes_ours(node: torch.fx.Node) -> bool:
    """Return whether our own kernel computes a convolution that is enlarged."""
    image, weight, _, *options = values_of(node)
    sizes = [channels + _missing(channels) for channels in weight.shape[:2]]
    enlarged = weight.new_empty([*sizes, *weight.shape[2:]])
    return may_be_ours(image) and is_small_conv2d([image, enlarged, None, *options], node.meta["val"])


def _is_product(node: torch.fx.Node) -> bool:
    """Return whether a convolution is a product of matrices."""
    return arguments_of(node)[1].meta["val"].shape[2:] == (1, 1)


def _missing(channels: int) -> int:
    return -channels % ALIGNED_CHANNELS


def _align(
    graph: torch.fx.Graph, node: torch.fx.Node, images: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node | None:
    """Enlarge one convolution, and return its enlarged weight; ``None`` where it stays as it is.

    Args:
        graph: Of the convolution.
        node: The convolution.
        images: What was enlarged before, by what it was made of.
    """
    image, weight, bias, *options = arguments_of(node)
    outputs, inputs = weight.meta["val"].shape[:2]
    more_inputs, more_outputs = _missing(inputs), _missing(outputs)
    if not all(map(_reads_parts, node.users)):
        more_outputs = 0
    if not (more_inputs or more_outputs):
        return None
    if more_inputs and image not in images:
        if _is_product(node) and image.op == "placeholder":
            return None  # cuDNN enlarges nothing for it, and nobody makes the image here
        images[image] = _enlarge_image(graph, image, more_inputs)
    with graph.inserting_before(node):
        enlarged = add_node(
            graph, aten.constant_pad_nd.default, (weight, [0] * 5 + [more_inputs, 0, more_outputs]), node
        )
        result = add_node(
            graph,
            node.target,
            (images[image] if more_inputs else image, enlarged, None if more_outputs else bias, *options),
            node,
        )
        if more_outputs:
            result = add_node(graph, aten.slice.Tensor, (result, 1, 0, outputs), node)
            if bias is not None:  # as Inductor does
                column = add_node(graph, aten.view.default, (bias, [outputs, 1, 1]), node)
                result = add_node(graph, aten.add.Tensor, (result, column), node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return enlarged


def _enlarge_image(graph: torch.fx.Graph, image: torch.fx.Node, more: int) -> torch.fx.Node:
    """Make the image larger where it is made; users that can do so read their part of it, so that it is made once."""
    users = [user for user in image.users if _reads_parts(user)]
    made = image
    while made.op == made.next.op == "placeholder":  # these stay together
        made = made.next
    with graph.inserting_after(made):
        enlarged = add_node(graph, aten.constant_pad_nd.default, (image, [0] * 5 + [more]), image)
    if users:
        with graph.inserting_after(enlarged):
            part = add_node(graph, aten.slice.Tensor, (enlarged, 1, 0, image.meta["val"].shape[1]), image)
        for user in users:
            user.replace_input_with(image, part)
    return enlarged


def _reads_parts(user: torch.fx.Node) -> bool:
    tags: Any = getattr(user.target, "tags", ())
    return user.target in _READERS_OF_PARTS or torch.Tag.pointwise in tags
