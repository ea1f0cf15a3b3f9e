"""Depthwise convolutions of few outputs, by a kernel of our own.

cuDNN's is made for large batches; figures of both are in ``docs/decisions/0012``.

Tried on torch 2.11, Triton 3.6.
"""

from __future__ import annotations

import math
from typing import Any

import torch

MOST_OUTPUTS = 1 << 19
"""Beyond, the device is full, and cuDNN's kernel does more with it."""

_RUN = 4  # pixels side by side
_TILE_RUNS = 16
_TILE_CHANNELS = 16
_NUM_WARPS = 2  # each thread has one run and four channels
_MOST_TAPS = 81  # the loop over them is unrolled
_DTYPES = (torch.float16, torch.bfloat16)
_CHANNELS_AT_ONCE = 8  # 16 bytes of 2-byte numbers, the longest load


def is_small_depthwise(arguments: list[Any], output: Any) -> bool:
    """Whether our kernel does what ``aten.convolution`` does for these arguments, and in less time.

    Args:
        arguments: The nine of ``aten.convolution``, tensors real or fake.
        output: Such a tensor as it returns.
    """
    image, weight, bias, stride, _, _, transposed, _, groups = arguments
    if bias is not None or transposed or len(stride) != 2 or groups == 1:
        return False
    channels_last = torch.channels_last
    return (
        image.dtype in _DTYPES
        and weight.dtype is image.dtype
        and groups == image.shape[1] == weight.shape[0]
        and math.prod(weight.shape[2:]) <= _MOST_TAPS
        and 0 < output.numel() <= MOST_OUTPUTS
        and image.numel() < 1 << 31
        and weight.is_contiguous()
        and image.is_contiguous(memory_format=channels_last)
        and output.is_contiguous(memory_format=channels_last)
    )


def convolve_depthwise(
    image: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    *,
    out: torch.Tensor,
) -> None:
    """Do what ``aten.convolution`` does for such a convolution, into ``out``. Sums are in single precision."""
    from millstream.lower.depthwise_kernel import depthwise  # Triton is there where there is a GPU

    _, _, height, width = image.shape
    num_images, _, out_height, out_width = out.shape
    at_once = math.gcd(groups, _CHANNELS_AT_ONCE)
    runs_a_line = -(-out_width // _RUN)
    num_runs = num_images * out_height * runs_a_line
    depthwise[-(-num_runs // _TILE_RUNS), -(-groups // _TILE_CHANNELS)](
        image,
        weight,
        out,
        num_runs,
        runs_a_line,
        height,
        width,
        out_height,
        out_width,
        groups // at_once,
        *padding,
        *stride,
        *dilation,
        AT_ONCE=at_once,
        KERNEL_HEIGHT=weight.shape[2],
        KERNEL_WIDTH=weight.shape[3],
        RUN=_RUN,
        TILE_RUNS=_TILE_RUNS,
        TILE_CHANNELS=_TILE_CHANNELS,
        num_warps=_NUM_WARPS,
    )
