"""Choose the nodes that our kernel for convolutions computes, and where it may write its results."""

from __future__ import annotations

from typing import Any

import torch

from millstream.kernels.conv2d.conv2d import CONVOLVE, JOIN, convolve_2d, is_small_conv2d
from millstream.kernels.family import NodeWriter
from millstream.kernels.nodes import arguments_of, has_channels_last, may_be_ours, values_of


def bind_conv2d(node: torch.fx.Node) -> NodeWriter | None:
    """Our kernel for a convolution, with what follows it, or for a small one as it is."""
    own = _bind(node)
    return own and own._replace(join=_find_join(node))


def _bind(node: torch.fx.Node) -> NodeWriter | None:
    if node.target is CONVOLVE:
        image, weight, bias, addend, relu, *options = arguments_of(node)
        parts = [name for name, part in {"bias": bias, "sum": addend, "relu": relu}.items() if part]
        is_product = image.meta["val"].shape[2:] == weight.meta["val"].shape[2:] == (1, 1)
        added = dict.fromkeys("relu" if part == "relu" else "add" for part in parts)
        ops = ("linear" if is_product else "convolution", *added)
        name = convolve_2d.__name__ + (f" with {' and '.join(parts)}" if parts else "")
        last = (node, image, weight, *([] if addend is None else [addend]))
        return NodeWriter(convolve_2d, (image, weight, bias, addend, relu, *options), name, ops=ops, last=last)
    if node.target is not torch.ops.aten.convolution.default:
        return None
    given, output = values_of(node), node.meta["val"]
    if given[2] is not None or not may_be_ours(given[0]) or not is_small_conv2d(given, output):
        return None
    image, weight, _, stride, padding, *_ = arguments_of(node)
    arguments = (image, weight, None, None, False, output.shape[1], stride, padding)
    return NodeWriter(convolve_2d, arguments, convolve_2d.__name__, last=(node, image, weight))


def _find_join(node: torch.fx.Node) -> torch.fx.Node | None:
    """The concatenation of which one of our convolutions may write its part; ``None`` where there is none.

    Its parts are all of such convolutions, read by nobody else, and the whole is not handed to the caller, whose memory
    the plan does not give.
    """
    join = next(iter(node.users), None)
    if join is None or join.target is not JOIN:
        return None
    if not has_channels_last(join.meta["val"]) or _is_returned(join):
        return None
    parts: Any = join.args[0]
    for part in parts:
        own = _bind(part) if isinstance(part, torch.fx.Node) and set(part.users) == {join} else None
        if own is None or not own.fits:
            return None
    return join


def _is_returned(node: torch.fx.Node) -> bool:
    return any(user.op == "output" or (user.target is torch.as_strided and _is_returned(user)) for user in node.users)
