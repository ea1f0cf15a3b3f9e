"""Gradients of average pooling with ``ceil_mode``, whose last windows hang over the edge of the image.

Eager divides by as much of a window as lies on the padded image. Inductor divides by the whole of it, so its own
dividing is left out here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from millstream._torch.workarounds import Decompositions, Workaround

aten = torch.ops.aten

_BACKWARD = {aten.avg_pool2d_backward.default: 2, aten.avg_pool3d_backward.default: 3}


def _divide_by_what_lies_on_the_image(table: Decompositions) -> Decompositions:
    return {**table, **{operator: partial(_divide_first, operator, dims) for operator, dims in _BACKWARD.items()}}


def _divide_first(operator: Any, dims: int, gradient: Tensor, image: Tensor, *options: Any) -> Any:
    """Divide the gradient by each window's size, and only sum then."""
    *window, ceil_mode, count_include_pad, divisor = options
    if not ceil_mode or not count_include_pad or divisor is not None:
        return NotImplemented
    kernel, stride, padding = (
        list(each) * (dims // len(each)) for each in (window[0], window[1] or window[0], window[2])
    )
    sizes = torch.ones((), dtype=torch.int64, device=gradient.device)
    for i in range(dims):
        starts = torch.arange(gradient.shape[i - dims], device=gradient.device) * stride[i] - padding[i]
        ends = (starts + kernel[i]).clamp(max=image.shape[i - dims] + padding[i])
        sizes = sizes[..., None] * (ends - starts)
    return operator(gradient / sizes, image, *window, ceil_mode, count_include_pad, 1)


WORKAROUND = Workaround(
    "pytorch#198119",
    "wrong gradients of average pooling with ceil_mode",
    decompose=_divide_by_what_lies_on_the_image,
)
