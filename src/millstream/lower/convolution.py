"""Convolutions that write into memory of the plan's, instead of allocating their results themselves.

PyTorch's ``convolution`` takes no output argument, but what it calls for cuDNN does. With it every temporary of a
convolutional network can lie where the plan says, which matters on several streams: memory that an operator allocates
can be reused only on the stream that it ran on.

Private PyTorch APIs, one function each; tried on torch 2.11 (CUDA).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import in_kernel_invocation_manager

_IMAGES = (4, 5)  # dimensions: batch, channels, and two or three of space


def is_cudnn_convolution(node: torch.fx.Node) -> bool:
    """Whether a node is a convolution that PyTorch gives to cuDNN as it is: no bias, and nothing to be copied first."""
    if node.target is not torch.ops.aten.convolution.default:
        return False
    values: Any = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in arguments_of(node)]
    image, weight, bias, stride, padding, dilation, transposed, output_padding, groups = values
    if bias is not None or transposed or not image.is_cuda or image.dim() not in _IMAGES or image.numel() == 0:
        return False
    arguments: Any = (image, weight, None, stride, padding, dilation, transposed, output_padding, groups, None)
    with in_kernel_invocation_manager(image.fake_mode), image.fake_mode:
        backend = torch._C._select_conv_backend(*arguments)
        if backend != torch._C._ConvBackend.Cudnn:  # pyrefly: ignore[missing-attribute]
            return False
        layout = torch._C._conv_determine_backend_memory_format(image, weight, backend)
    return bool(image.is_contiguous(memory_format=layout))


def arguments_of(node: torch.fx.Node) -> list[Any]:
    """The nine arguments of a convolution in order, however they were passed."""
    names = [argument.name for argument in torch.ops.aten.convolution.default._schema.arguments]
    return [*node.args, *(node.kwargs[name] for name in names[len(node.args) :])]


def convolve(
    image: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    *,
    out: torch.Tensor,
) -> None:
    """Do what ``aten.convolution`` does for such a convolution, into ``out``."""
    cudnn = torch.backends.cudnn
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    flags = (cudnn.benchmark, deterministic, cudnn.allow_tf32)
    torch.ops.aten.cudnn_convolution.out(image, weight, padding, stride, dilation, groups, *flags, out=out)
