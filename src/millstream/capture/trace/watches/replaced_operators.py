"""Operators that are written out while a step is traced, as compilers can fuse that, or checked as their kernels do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_TAKE_CLASSES = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
"""Losses whose kernels refuse targets of other types than int64 and uint8, and whose fake ones take them."""


def check_targets(func: Any, args: tuple[Any, ...]) -> None:
    """Raise for a loss's targets what its kernel would."""
    if func in _TAKE_CLASSES and (dtype := args[1].dtype) not in (torch.int64, torch.uint8):
        name = {torch.int32: "Int", torch.int16: "Short", torch.int8: "Char"}.get(dtype, str(dtype))
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {name}")


def _check_and_unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """``aten::_amp_foreach_non_finite_check_and_unscale_`` in operators that compilers can fuse."""
    for grad in grads:
        is_bad = (~torch.isfinite(grad)).any().to(found_inf.dtype)
        found_inf.copy_(torch.maximum(found_inf, is_bad))
        grad.mul_(inv_scale)


def _update_scale(
    scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    """``aten::_amp_update_scale_`` in operators that compilers can fuse."""
    failed = found_inf != 0
    successes = growth_tracker + 1
    grows = successes == interval
    grown = scale * growth
    grown = torch.where(grows & torch.isfinite(grown), grown, scale)
    scale.copy_(torch.where(failed, scale * backoff, grown))
    growth_tracker.copy_(torch.where(failed | grows, torch.zeros_like(successes), successes))
    return scale


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: _check_and_unscale,
    aten._amp_update_scale_.default: _update_scale,
}
