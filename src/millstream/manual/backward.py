"""``ms.dual_stream_backward``: the two gradients of a layer side by side, in eager mode.

The gradient for a layer's input is on the way to the rest of the backward pass, that for its weight and bias is not.
Each is computed by the kernels that PyTorch would have used, the second on an auxiliary stream; the results are the
same bits. A layer's two gradients are joined before the next layer's begin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from millstream._torch.operators import is_being_traced
from millstream.errors import ArgumentError
from millstream.manual.auxiliary import aux_streams

Model = TypeVar("Model", bound=nn.Module)
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def dual_stream_backward(model: Model, *, enabled: bool = True) -> Model:
    """Let a model's convolutions and linear layers compute their two gradients side by side, on two streams.

    For models that run eagerly or are captured in a CUDA graph by hand; ``ms.step`` needs none of it. Layers of
    exactly the classes ``nn.Conv1d`` to ``Conv3d``, ``nn.ConvTranspose1d`` to ``3d`` and ``nn.Linear`` take part. They
    stay where they are, with their parameters and hooks; their class becomes a subclass of what it was.

    Args:
        model: Changed in place.
        enabled: False makes the layers what they were.

    Returns:
        The model.

    Raises:
        ArgumentError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"dual_stream_backward() takes a module, not {type(model).__name__}.")
    table = _DUAL if enabled else {dual: plain for plain, dual in _DUAL.items()}
    for module in model.modules():
        if type(module) in table:
            module.__class__ = table[type(module)]
    return model


def _side_by_side(first: Callable[[], Any], second: Callable[[], Any], device: torch.device) -> tuple[Any, Any]:
    """Run ``first`` on the current stream and ``second`` beside it; after it, where there is no memory for both."""
    with aux_streams(2, device) as (_, aux):
        one = first()
        try:
            return one, aux(second)
        except torch.OutOfMemoryError:
            pass
    return one, second()


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        return torch.convolution(x, weight, bias, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        x, weight, bias, *options = inputs
        ctx.save_for_backward(x, weight)
        ctx.bias_size = None if bias is None else list(bias.shape)
        ctx.options = options

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]

        def compute(*mask: bool) -> Gradients:
            return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
                grad, x, weight, ctx.bias_size, *ctx.options, list(mask)
            )

        nothing = [None] * len(ctx.options)
        if not _is_worth_two(ctx):
            return (*compute(*needed), *nothing)
        (for_input, _, _), (_, for_weight, for_bias) = _side_by_side(
            lambda: compute(True, False, False), lambda: compute(False, True, needed[2]), grad.device
        )
        return (for_input, for_weight, for_bias, *nothing)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[0], inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad

        def compute_input() -> Tensor | None:
            return (_rows(grad) @ weight).view(x.shape) if needed[0] else None

        def compute_weight() -> tuple[Tensor | None, Tensor | None]:
            rows = _rows(grad)
            return rows.t() @ _rows(x) if needed[1] else None, rows.sum(0) if needed[2] else None

        if not _is_worth_two(ctx):
            return (compute_input(), *compute_weight())
        for_input, for_others = _side_by_side(compute_input, compute_weight, grad.device)
        return (for_input, *for_others)


def _is_worth_two(ctx: Any) -> bool:
    """Whether both gradients are wanted; not where gradients of gradients are: those are PyTorch's matter."""
    return bool(ctx.needs_input_grad[0] and ctx.needs_input_grad[1] and not torch.is_grad_enabled())


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _is_plain(x: Any, weight: Tensor, num_dims: int | None) -> bool:
    """Whether a call is one that the functions above know: with gradients to come, batched, not being captured."""
    return (
        torch.is_grad_enabled()
        and type(x) in (Tensor, nn.Parameter)
        and x.requires_grad
        and weight.requires_grad
        and (x.dim() >= 2 if num_dims is None else x.dim() == num_dims)
        and not is_being_traced()
    )


def _cast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Cast as autocast would, where it is on."""
    kind = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    is_cast = [t is not None and t.is_floating_point() and t.dtype is not torch.float64 for t in tensors]
    return [t.to(dtype) if cast and t is not None else t for t, cast in zip(tensors, is_cast, strict=True)]


class _DualConvolution(nn.modules.conv._ConvNd):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002 - nn's name
        dims = len(self.kernel_size)
        if isinstance(self.padding, str) or not _is_plain(input, weight, dims + 2):
            return super()._conv_forward(input, weight, bias)  # type: ignore[misc,no-any-return]
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)  # noqa: A001
            padding = (0,) * dims
        options = self.stride, padding, self.dilation, False, (0,) * dims, self.groups
        return _Convolution.apply(*_cast(input, weight, bias), *options)  # type: ignore[no-any-return]


class _DualTransposed(nn.modules.conv._ConvTransposeNd):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002 - nn's name
        dims = len(self.kernel_size)
        if not _is_plain(input, self.weight, dims + 2):
            return super().forward(input, output_size)  # type: ignore[misc,no-any-return]
        forms: Any = self.stride, self.padding, self.kernel_size, dims, self.dilation
        extra = self._output_padding(input, output_size, *forms)
        options = self.stride, self.padding, self.dilation, True, tuple(extra), self.groups
        return _Convolution.apply(*_cast(input, self.weight, self.bias), *options)  # type: ignore[no-any-return]


class DualConv1d(_DualConvolution, nn.Conv1d):
    """``nn.Conv1d`` with its gradients side by side."""


class DualConv2d(_DualConvolution, nn.Conv2d):
    """``nn.Conv2d`` with its gradients side by side."""


class DualConv3d(_DualConvolution, nn.Conv3d):
    """``nn.Conv3d`` with its gradients side by side."""


class DualConvTranspose1d(_DualTransposed, nn.ConvTranspose1d):
    """``nn.ConvTranspose1d`` with its gradients side by side."""


class DualConvTranspose2d(_DualTransposed, nn.ConvTranspose2d):
    """``nn.ConvTranspose2d`` with its gradients side by side."""


class DualConvTranspose3d(_DualTransposed, nn.ConvTranspose3d):
    """``nn.ConvTranspose3d`` with its gradients side by side."""


class DualLinear(nn.Linear):
    """``nn.Linear`` with its gradients side by side."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn's name
        """Apply the layer."""
        if not _is_plain(input, self.weight, None):
            return super().forward(input)
        return _Linear.apply(*_cast(input, self.weight, self.bias))  # type: ignore[no-any-return]


_DUAL: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: DualConv1d,
    nn.Conv2d: DualConv2d,
    nn.Conv3d: DualConv3d,
    nn.ConvTranspose1d: DualConvTranspose1d,
    nn.ConvTranspose2d: DualConvTranspose2d,
    nn.ConvTranspose3d: DualConvTranspose3d,
    nn.Linear: DualLinear,
}
