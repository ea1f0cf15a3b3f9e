"""SyncBatchNorm: statistics over the batches of all processes, exchanged by operators that a graph may have.

PyTorch's own issues collectives from a function of autograd, which no trace has. The numbers are the same up to
rounding: each process tells mean, variance and count of its values, and in the backward pass the two sums of its
gradients that the others need.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from millstream._torch.distributed.collectives import EXCHANGE
from millstream._torch.tensors import real_tensors
from millstream.data_parallel.agreement import agreement_of
from millstream.data_parallel.buckets import Bucket
from millstream.data_parallel.exchange import Exchange, gather_over, sum_over

_exchanges: WeakKeyDictionary[nn.Module, dict[Any, tuple[Exchange, Exchange]]] = WeakKeyDictionary()


def group_of(module: nn.SyncBatchNorm) -> Any:
    """The processes that share statistics in this call; ``None`` where each has its own."""
    if not module.training:
        return None
    group: Any = module.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def is_known(module: nn.SyncBatchNorm, time: int, x: Tensor) -> bool:
    """Return whether a run has made the collectives of that call."""
    return _key(time, x) in _exchanges.get(module, {})


def normalize(module: nn.SyncBatchNorm, x: Tensor, group: Any, time: int) -> Tensor:
    """Return what ``module`` makes of ``x`` in training, running statistics included.

    Args:
        module: In training.
        x: Channels are its second dimension.
        group: The processes.
        time: How often the same step has called it before.
    """
    of_values, of_gradients = _exchanges_of(module, x, group, time)
    rank = dist.get_rank(group)
    result, mean, variance, count = _Normalize.apply(
        x, module.weight, module.bias, module.eps, rank, of_values.key, of_gradients.key
    )
    if module.track_running_stats and module.running_mean is not None and module.running_var is not None:
        with torch.no_grad():
            module.num_batches_tracked.add_(1)  # type: ignore[union-attr]
            factor: Any = module.momentum
            if factor is None:  # the average of all batches
                factor = 1.0 / module.num_batches_tracked.to(mean.dtype)  # type: ignore[union-attr]
            for running, value in ((module.running_mean, mean), (module.running_var, variance * count / (count - 1))):
                running.copy_(running * (1 - factor) + value.to(running.dtype) * factor)
    return result  # type: ignore[no-any-return]


def _key(time: int, x: Tensor) -> Any:
    return time, x.shape[1], _exact(x.dtype), x.device


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _exchanges_of(module: nn.SyncBatchNorm, x: Tensor, group: Any, time: int) -> tuple[Exchange, Exchange]:
    known = _exchanges.setdefault(module, {})
    key = _key(time, x)
    if key not in known:
        size, rank, channels = dist.get_world_size(group), dist.get_rank(group), x.shape[1]
        with real_tensors():
            agreement = agreement_of(group, on_gpu=x.device.type == "cuda")
            length = 2 * channels + 1
            rows = torch.empty(size, length, dtype=_exact(x.dtype), device="meta")
            sums = torch.empty(2, channels, dtype=_exact(x.dtype), device="meta")
            known[key] = (
                Exchange(
                    Bucket((0,), (0,), size * length),
                    [rows],
                    group,
                    gather_over,
                    f"statistics of {channels} channels",
                    device=x.device,
                    agreement=agreement,
                    is_first=True,
                    sent=[slice(rank * length, (rank + 1) * length)],
                ),
                Exchange(
                    Bucket((0,), (0,), 2 * channels),
                    [sums],
                    group,
                    sum_over,
                    f"gradients of statistics of {channels} channels",
                    device=x.device,
                    agreement=agreement,
                    is_first=True,
                ),
            )
    return known[key]


class _Normalize(torch.autograd.Function):
    """Batch normalization whose statistics are those of all processes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        rank: int,
        of_values: int,
        of_gradients: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values, dimensions = x.to(_exact(x.dtype)), [0, *range(2, x.dim())]
        count = values.new_full((1,), x.numel() // x.shape[1])
        if x.numel():
            variance, mean = torch.var_mean(values, dimensions, correction=0)
        else:  # others still hear from this process
            variance = mean = values.new_zeros(x.shape[1])
        (rows,) = EXCHANGE([torch.cat([mean, variance, count])], of_values)
        means, variances, counts = rows.split([x.shape[1], x.shape[1], 1], 1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean).square())).sum(0) / total
        scale = (variance + eps).rsqrt()
        shape = [1, -1, *[1] * (x.dim() - 2)]
        result = (values - mean.view(shape)) * scale.view(shape)
        if weight is not None and bias is not None:
            result = result * weight.view(shape) + bias.view(shape)
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.key, ctx.rank = of_gradients, rank
        ctx.mark_non_differentiable(mean, variance, total)
        return result.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, scale, total = ctx.saved_tensors
        shape, dimensions = [1, -1, *[1] * (x.dim() - 2)], [0, *range(2, x.dim())]
        gradient = gradients[0].to(mean.dtype)
        normal = (x.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        own = torch.stack([gradient.sum(dimensions), (gradient * normal).sum(dimensions)])
        of_x = of_weight = of_bias = None
        if weight is not None:
            of_weight, of_bias = own[1].to(weight.dtype), own[0].to(weight.dtype)
        if ctx.needs_input_grad[0]:
            (sums,) = EXCHANGE([own], ctx.key)
            means = sums / total
            factor = scale if weight is None else scale * weight
            of_x = (gradient - means[0].view(shape) - normal * means[1].view(shape)) * factor.view(shape)
            of_x = of_x.to(x.dtype)
        return of_x, of_weight, of_bias, None, None, None, None
