"""Let a small convolution's kernel do what follows it: the bias, what is added to it, relu, and cleared channels.

Each of these would be a kernel of its own, on the longest chain in most networks, as long as a third of the convolution
and a launch later. ``docs/decisions/own-kernels.md`` has the figures.

Private PyTorch APIs, one function each; tried on torch 2.11 (CUDA) and 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from millstream.kernels.channels_last import lay_out
from millstream.kernels.conv2d.conv2d import CONVOLVE, JOIN, KEPT_AT_ONCE, is_small_conv2d
from millstream.kernels.nodes import (
    ALIGNED_CHANNELS,
    add_node,
    arguments_of,
    changes_type,
    depths_of,
    may_be_ours,
    tidy,
    values_of,
    whole_of,
)
from millstream.passes.graph_pass import graph_pass

aten = torch.ops.aten


@dataclass
class _Epilogue:
    """The epilogue of a convolution's kernel, so far.

    Attributes:
        last: Whose value that is.
        outputs: The convolution's channels.
        kept: How many of them are wanted.
        bias: What is added to each channel.
        addend: What is added to each pixel of each channel; it may have channels after those.
        relu: Whether relu follows.
    """

    last: torch.fx.Node
    outputs: int
    kept: int
    bias: torch.fx.Node | None
    addend: torch.fx.Node | None = None
    relu: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return self.bias is None and self.addend is None and not self.relu


@graph_pass("epilogues", "lets small convolutions compute what follows them")
def absorb_epilogues(gm: torch.fx.GraphModule) -> None:
    """Let small convolutions do what follows them.

    **Contract**
    - The graph computes what it did, with fewer roundings on the way.
    - What follows is taken on for as long as nobody else reads what was there before: the first channels alone, a bias
      that need not be computed, one sum, relu, zeros in the other channels.
    - Nothing waits for longer than before: what is added is no deeper in the graph than the image.
    - Where nothing but such convolutions is concatenated, they may write where the whole is to be.
    """
    convolutions = [node for node in gm.graph.nodes if node.target is aten.convolution.default and _is_ours(node)]
    if not convolutions:
        return
    depths = depths_of(gm.graph)
    for node in convolutions:
        _absorb(gm.graph, node, depths)
    concatenations = [node for node in gm.graph.nodes if _is_of_channels(node)]
    for node in concatenations:
        node.args = ([part for each in node.args[0] for part in _parts(each)], 1)
    gm.graph.eliminate_dead_code()
    for node in concatenations:
        if node.users and _joins_whole_results(node):
            node.target, node.args = JOIN, node.args[:1]
    tidy(gm)


def _is_of_channels(node: torch.fx.Node) -> bool:
    """Return whether this concatenates channels of images."""
    return (
        node.target is aten.cat.default
        and len(node.args) == 2
        and node.args[1] in (1, -3)
        and not node.kwargs
        and node.meta["val"].dim() == 4
    )


def _parts(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return what this consists of, if it is made only to be concatenated again."""
    return node.args[0] if _is_of_channels(node) and len(node.users) == 1 else [node]  # type: ignore[return-value]


def _joins_whole_results(node: torch.fx.Node) -> bool:
    """Return whether each part of a concatenation is all that one of our convolutions computes."""
    parts: Any = node.args[0]
    return len(set(parts)) == len(parts) and all(part.target is CONVOLVE and len(part.users) == 1 for part in parts)


def _is_ours(node: torch.fx.Node) -> bool:
    values, bias = values_of(node), arguments_of(node)[2]
    return (
        may_be_ours(values[0])
        and is_small_conv2d(values, node.meta["val"])
        and (bias is None or _given(bias, values[0].dtype) is not None)
    )


def _given(bias: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node | None:
    """A bias as it is there, or was there before it was rounded; ``None`` where a kernel must compute it first."""
    origin = bias.all_input_nodes[0] if changes_type(bias) else bias
    value = origin.meta["val"]
    is_there = origin.op in ("placeholder", "get_attr") and value.dim() == 1 and value.dtype in (dtype, torch.float32)
    return origin if is_there and bias.meta["val"].dtype is dtype else None


def _absorb(graph: torch.fx.Graph, node: torch.fx.Node, depths: dict[torch.fx.Node, int]) -> None:
    image, weight, bias, stride, padding, *_ = arguments_of(node)
    outputs = weight.meta["val"].shape[0]
    epilogue = _Epilogue(node, outputs, outputs, None if bias is None else _given(bias, node.meta["val"].dtype))
    while len(epilogue.last.users) == 1:
        user = next(iter(epilogue.last.users))
        if not _take(epilogue, user, depths, depths[image]):
            break
        epilogue.last = user
    if epilogue.is_empty:
        return
    last = epilogue.last
    arguments = (image, weight, epilogue.bias, epilogue.addend, epilogue.relu, epilogue.kept, stride, padding)
    with graph.inserting_before(last):
        result = add_node(graph, CONVOLVE, arguments, node)
        depths[result] = depths[last]
        if last.meta["val"].shape[1] < outputs:
            result = add_node(graph, aten.slice.Tensor, (result, 1, 0, epilogue.kept), node)
    depths.setdefault(result, depths[last])
    last.replace_all_uses_with(result)


def _take(epilogue: _Epilogue, user: torch.fx.Node, depths: dict[torch.fx.Node, int], ready: int) -> bool:
    """Let the kernel do what this node does, if it can; return whether it does.

    Args:
        epilogue: What it does already.
        user: The only reader of that.
        depths: The longest chain of nodes that leads to each.
        ready: The depth of the image. What comes later is not waited for: the convolution could begin before.
    """
    width = epilogue.last.meta["val"].shape[1]
    if width != epilogue.kept:
        return False  # what is read after this are the cleared channels, too
    is_bare = epilogue.addend is None and not epilogue.relu
    if user.target is aten.slice.Tensor and is_bare and width == epilogue.outputs:
        kept = user.meta["val"].shape[1]
        if user.args[1:] != (1, 0, kept) or kept % KEPT_AT_ONCE:
            return False
        epilogue.kept = kept
        return True
    if user.target is aten.add.Tensor and not epilogue.relu and not user.kwargs and len(user.args) == 2:
        return _take_sum(epilogue, user, depths, ready)
    if user.target is aten.relu.default and not epilogue.relu:
        epilogue.relu = True
        return True
    more = epilogue.outputs - epilogue.kept
    return bool(more) and user.target is aten.constant_pad_nd.default and user.args[1:] == ([0] * 5 + [more],)


def _take_sum(epilogue: _Epilogue, user: torch.fx.Node, depths: dict[torch.fx.Node, int], ready: int) -> bool:
    others = [arg for arg in user.args if arg is not epilogue.last]
    if len(others) != 1 or not isinstance(others[0], torch.fx.Node):
        return False
    other = others[0]
    value, result = other.meta["val"], user.meta["val"]
    if value.dtype is not result.dtype or result.dtype is not epilogue.last.meta["val"].dtype:
        return False
    if result.shape != epilogue.last.meta["val"].shape:
        return False
    if value.shape == (epilogue.kept, 1, 1) and other.target is aten.view.default and epilogue.bias is None:
        column = other.all_input_nodes[0]
        epilogue.bias = _given(column, result.dtype)
        return epilogue.bias is not None
    whole = whole_of(other)
    if depths[whole] > ready:
        return False
    width = whole.meta["val"].shape[1] if value.shape == result.shape else 0
    if epilogue.addend is not None or not width or width % ALIGNED_CHANNELS or whole.meta["val"].numel() >= 1 << 31:
        return False
    epilogue.addend = whole
    return True


# --- what Inductor is told -------------------------------------------------------------------------------------------


@register_lowering(CONVOLVE, type_promotion_kind=None)
def _lower(image: Any, weight: Any, bias: Any, addend: Any, *options: Any) -> Any:
    """Call the operator with tensors that lie in memory as our kernel reads them."""
    tensors = [None if tensor is None else lay_out(tensor) for tensor in (image, weight, bias, addend)]
    result: Any = ir.FallbackKernel.create(CONVOLVE, *tensors, *options)
    return ir.TensorBox.create(result)


@register_lowering(JOIN, type_promotion_kind=None)
def _lower_join(parts: Any) -> Any:
    result: Any = ir.FallbackKernel.create(JOIN, [lay_out(part) for part in parts])
    return ir.TensorBox.create(result)
