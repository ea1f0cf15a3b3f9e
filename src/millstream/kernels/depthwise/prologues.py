"""Let a small depthwise convolution's kernel do what stands in front of it: relu, and zeros around the image.

Where several convolutions read one image, as in NASNet's cells, relu would be a kernel of its own in front of them.

Private PyTorch APIs, one function each; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from millstream.kernels.channels_last import lay_out
from millstream.kernels.depthwise.depthwise import CONVOLVE_DEPTHWISE, is_small_depthwise
from millstream.kernels.nodes import add_node, arguments_of, may_be_ours, tidy, values_of, whole_of, zeros_of
from millstream.passes.graph_pass import graph_pass

aten = torch.ops.aten


@graph_pass("prologues", "lets depthwise convolutions compute what comes before them")
def absorb_prologues(gm: torch.fx.GraphModule) -> None:
    """Let small depthwise convolutions do what stands in front of them.

    **Contract**
    - The graph computes what it did.
    - What stands in front is taken on where nobody but such convolutions reads it: relu and a border of zeros.
    - An image that is the first channels of another is read from that. One that is enlarged by channels of zeros for
      its only reader is written so.
    """
    convolutions = [node for node in gm.graph.nodes if node.target is aten.convolution.default and _is_ours(node)]
    if not convolutions:
        return
    readers = set(convolutions)
    for node in convolutions:
        _absorb(gm.graph, node, readers)
    tidy(gm)


def _is_ours(node: torch.fx.Node) -> bool:
    values = values_of(node)
    return may_be_ours(values[0]) and is_small_depthwise(values, node.meta["val"])


def _absorb(graph: torch.fx.Graph, node: torch.fx.Node, readers: set[torch.fx.Node]) -> None:
    image, weight, _, stride, (above, beside), dilation, *_ = arguments_of(node)
    padding, relu, first = [beside, beside, above, above], False, image
    while True:
        whole = whole_of(first)
        if whole.meta["val"].numel() >= 1 << 31 or (whole is first and not _is_for_all(first, readers)):
            break
        if whole is first:
            relu |= first.target is aten.relu.default
            padding = [sum(both) for both in zip(padding, _border(first) or [0] * 4, strict=True)]
            whole = first.all_input_nodes[0]
        first = whole
    last = _enlarged(node)
    if first is image and last is node:
        return
    arguments = (first, weight, relu, last.meta["val"].shape[1], stride, padding, dilation)
    with graph.inserting_before(last):
        result = add_node(graph, CONVOLVE_DEPTHWISE, arguments, node)
    last.replace_all_uses_with(result)
    readers.add(result)


def _is_for_all(node: torch.fx.Node, readers: set[torch.fx.Node]) -> bool:
    """Return whether this is something that our kernel can do to its image, and nobody else reads it."""
    return (node.target is aten.relu.default or _border(node) is not None) and _is_read_by(node, readers)


def _is_read_by(node: torch.fx.Node, readers: set[torch.fx.Node]) -> bool:
    """Whether nobody reads this but as the image of some convolutions, or its first channels, or what they can do."""
    return all(
        user.args[1] is not node
        if user in readers
        else _is_for_all(user, readers) or (whole_of(user) is node and _is_read_by(user, readers))
        for user in node.users
    )


def _border(node: torch.fx.Node) -> list[int] | None:
    """Return how many zeros this puts to the left, the right, above and below of an image.

    ``None`` if it is no such thing.
    """
    sizes = zeros_of(node)
    return [*sizes, 0, 0][:4] if 0 < len(sizes) <= 4 and min(sizes) >= 0 else None


def _enlarged(node: torch.fx.Node) -> torch.fx.Node:
    """Return what puts zeros after the channels of this, if that is all it is for; else itself."""
    user = next(iter(node.users), node)
    sizes = zeros_of(user)
    return user if len(node.users) == 1 and len(sizes) == 6 and not any(sizes[:5]) and sizes[5] > 0 else node


# --- what Inductor is told -------------------------------------------------------------------------------------------


@register_lowering(CONVOLVE_DEPTHWISE, type_promotion_kind=None)
def _lower(image: Any, weight: Any, *options: Any) -> Any:
    """Call the operator with tensors that lie in memory as our kernel reads them."""
    result: Any = ir.FallbackKernel.create(
        CONVOLVE_DEPTHWISE, lay_out(image), ir.ExternKernel.require_contiguous(weight), *options
    )
    return ir.TensorBox.create(result)
