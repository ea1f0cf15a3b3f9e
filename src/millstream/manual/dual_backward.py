"""``ms.manual.dual_stream_backward``: the two gradients of a layer side by side, in eager mode.

The gradient for a layer's input is on the way to the rest of the backward pass, that for its weight and bias is not.
Each is computed by the kernels that PyTorch would have used, the second on an auxiliary stream; the results are the
same bits.

**How it is kept safe**
- A layer's weight and bias go through a *gate*, a node of autograd that is recorded on the auxiliary stream and passes
  its gradient on as it is. So autograd takes their gradients to be made there, and lets whatever uses them, and in the
  end the caller, wait for that stream by its own rules. Nothing else waits: the pass continues beside them.
- What the auxiliary stream reads was allocated on the layer's stream. It is held until that stream has come after its
  use: at the latest when ``MOST_PENDING`` later layers, or ``MOST_PENDING_BYTES``, are issued. That bounds memory.
- Where memory for the second gradient is not to be had, it is computed after the first.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from millstream._torch.autograd.hooks import after_backward, current_backward_pass
from millstream._torch.dispatcher import is_being_traced, is_transformed
from millstream.device import DeviceContext, Event, Stream, context
from millstream.errors import ArgumentError

Model = TypeVar("Model", bound=nn.Module)
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

MOST_PENDING, MOST_PENDING_BYTES = 4, 32 << 20


def dual_stream_backward(model: Model, *, enabled: bool = True) -> Model:
    """Let a model's convolutions and linear layers compute their two gradients side by side, on two streams.

    For models that run eagerly or are captured in a CUDA graph by hand; ``ms.step`` needs none of it. Layers of
    exactly the classes ``nn.Conv1d`` to ``Conv3d``, ``nn.ConvTranspose1d`` to ``3d`` and ``nn.Linear`` take part. They
    stay where they are, with their parameters and hooks; their class becomes a subclass of what it was. On the CPU, and
    under ``MILLSTREAM_ENGINE=serial``, they compute one gradient after the other.

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


class _Side:
    """The auxiliary stream beside one stream, and what is pending there."""

    def __init__(self, context: DeviceContext, main: Stream) -> None:
        self.context, self.main = context, main
        (self.stream,) = lent = context.streams.lend(main, 1)
        context.streams.take_back(lent)  # others of this thread may use it between: that only orders them
        self._pending: deque[tuple[Event, int, tuple[Tensor, ...]]] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._pass = -1  # of the last backward pass

    def compute(self, first: Callable[[], Any], second: Callable[[], Any], *used: Tensor) -> tuple[Any, Any]:
        """Compute the first thing on the neighbour and the second beside it, or after it where memory is short.

        Args:
            first: What the backward pass waits for.
            second: What it does not wait for.
            used: What ``second`` reads that was allocated on the neighbour.
        """
        event = self.context.events.acquire()
        event.record(self.main)
        one = first()
        event.wait(self.stream)
        try:
            with self.context.on(self.stream):
                other = second()
        except torch.OutOfMemoryError:
            self._finish()
            event.record(self.stream)
            event.wait(self.main)
            self.context.events.release(event)
            return one, second()
        event.record(self.stream)
        with self._lock:
            self._pending.append((event, sum(tensor.nbytes for tensor in used), used))
            self._num_bytes += self._pending[-1][1]
            while len(self._pending) > MOST_PENDING or (
                self._num_bytes > MOST_PENDING_BYTES and len(self._pending) > 1
            ):
                self._join_oldest()
            if self._pass != current_backward_pass():
                self._pass = current_backward_pass()
                after_backward(self._finish)
        return one, other

    def _finish(self) -> None:
        with self._lock:
            while self._pending:
                self._join_oldest()

    def _join_oldest(self) -> None:
        """Let the neighbour come after the oldest use; then what was used may be freed."""
        event, num_bytes, _ = self._pending.popleft()
        event.wait(self.main)
        self._num_bytes -= num_bytes
        self.context.events.release(event)


class _Sides(threading.local):
    """A thread's auxiliary streams, by context and by the identity of the stream that they are beside."""

    def __init__(self) -> None:
        self.found: dict[tuple[DeviceContext, int], _Side] = {}

    def find(self, x: Tensor) -> _Side | None:
        """The one beside the current stream; ``None`` where there is but one stream."""
        if x.device.type != "cuda" or os.environ.get("MILLSTREAM_ENGINE") == "serial":
            return None
        found = context(x.device)
        key = found, found.driver.current_stream_id()
        side = self.found.get(key)
        if side is None:
            side = self.found[key] = _Side(found, found.current_stream())
        return side


_sides = _Sides()


class _Gate(torch.autograd.Function):
    """Passes a parameter on, and its gradient, which is made on the stream that is current when it is called."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:  # noqa: ARG004
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ARG004
        return grads[0]


_gate: Callable[[Tensor], Tensor] = _Gate.apply  # type: ignore[assignment]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, side: _Side | None, dtype: Any, *options: Any
    ) -> Tensor:
        cast = _cast(weight, dtype)
        ctx.save_for_backward(x, cast)
        ctx.side, ctx.options = side, options
        ctx.bias_size = None if bias is None else list(bias.shape)
        ctx.dtypes = weight.dtype, weight.dtype if bias is None else bias.dtype
        return torch.convolution(x, cast, None if bias is None else _cast(bias, dtype), *options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]

        def compute(*mask: bool) -> Gradients:
            for_input, for_weight, for_bias = torch.ops.aten.convolution_backward(
                grad, x, weight, ctx.bias_size, *ctx.options, list(mask)
            )
            return for_input, _cast_back(for_weight, ctx.dtypes[0]), _cast_back(for_bias, ctx.dtypes[1])

        nothing = [None] * (2 + len(ctx.options))
        if not _is_worth_two(ctx):
            return (*compute(*needed), *nothing)
        (for_input, _, _), (_, for_weight, for_bias) = ctx.side.compute(
            lambda: compute(True, False, False), lambda: compute(False, True, needed[2]), grad, x
        )
        return (for_input, for_weight, for_bias, *nothing)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, side: _Side | None, dtype: Any) -> Tensor:
        cast = _cast(weight, dtype)
        ctx.save_for_backward(x, cast)
        ctx.side = side
        ctx.dtypes = weight.dtype, weight.dtype if bias is None else bias.dtype
        return F.linear(x, cast, None if bias is None else _cast(bias, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad

        def compute_input() -> Tensor | None:
            return (_rows(grad) @ weight).view(x.shape) if needed[0] else None

        def compute_others() -> tuple[Tensor | None, Tensor | None]:
            rows = _rows(grad)
            for_weight = rows.t() @ _rows(x) if needed[1] else None
            for_bias = rows.sum(0) if needed[2] else None
            return _cast_back(for_weight, ctx.dtypes[0]), _cast_back(for_bias, ctx.dtypes[1])

        if not _is_worth_two(ctx):
            return (compute_input(), *compute_others(), None, None)
        for_input, others = ctx.side.compute(compute_input, compute_others, grad, x)
        return (for_input, *others, None, None)


def _is_worth_two(ctx: Any) -> bool:
    """Return whether both gradients are wanted; not where gradients of gradients are: those are PyTorch's matter."""
    needed = ctx.needs_input_grad
    return bool(ctx.side is not None and needed[0] and needed[1] and not torch.is_grad_enabled())


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or tensor.dtype is torch.float64 else tensor.to(dtype)


def _cast_back(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if gradient is None else gradient.to(dtype)


def _is_plain(x: Any, weight: Tensor, num_dims: int | None) -> bool:
    """Return whether a call is one that the functions above know.

    With gradients to come, batched, not being captured.
    """
    return (
        torch.is_grad_enabled()
        and type(x) in (Tensor, nn.Parameter)
        and x.requires_grad
        and weight.requires_grad
        and (x.dim() >= 2 if num_dims is None else x.dim() == num_dims)
        and not is_being_traced()
        and not is_transformed()
    )


def _apply(function: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """Call one of the functions above, casting as autocast would; parameters go through gates on the other stream."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    side = _sides.find(x)
    if side is not None:
        with side.context.on(side.stream):
            weight = _gate(weight)
            bias = None if bias is None else _gate(bias)
    x = _cast(x, dtype)
    with torch.autocast(kind, enabled=False):
        return function.apply(x, weight, bias, side, dtype, *options)  # type: ignore[no-any-return]


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
        return _apply(_Convolution, input, weight, bias, *options)


class _DualTransposed(nn.modules.conv._ConvTransposeNd):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002 - nn's name
        dims = len(self.kernel_size)
        if not _is_plain(input, self.weight, dims + 2):
            return super().forward(input, output_size)  # type: ignore[misc,no-any-return]
        forms: Any = self.stride, self.padding, self.kernel_size, dims, self.dilation
        extra = self._output_padding(input, output_size, *forms)
        options = self.stride, self.padding, self.dilation, True, tuple(extra), self.groups
        return _apply(_Convolution, input, self.weight, self.bias, *options)


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
        return _apply(_Linear, input, self.weight, self.bias)


_DUAL: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: DualConv1d,
    nn.Conv2d: DualConv2d,
    nn.Conv3d: DualConv3d,
    nn.ConvTranspose1d: DualConvTranspose1d,
    nn.ConvTranspose2d: DualConvTranspose2d,
    nn.ConvTranspose3d: DualConvTranspose3d,
    nn.Linear: DualLinear,
}
