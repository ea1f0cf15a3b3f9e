"""Random numbers that fill memory in place: ``torch.empty(...).normal_()``, as distributions and drop-path do.

Inductor calls PyTorch for these. But that reads what nobody has written before, and for ``bernoulli_`` on the CPU comes
as a line of text that cannot be taken for a kernel. So they are written in terms of those that Inductor generates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config

aten = torch.ops.aten


def random_decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions into operators of Inductor's; none where PyTorch is to draw. Tried on torch 2.11 and 2.13."""
    if config.fallback_random:
        return {}
    return {aten.normal_functional.default: _normal, aten.uniform.default: _uniform, aten.bernoulli.p: _bernoulli}


def _normal(self: Tensor, mean: float = 0, std: float = 1, *, generator: Any = None) -> Any:
    return NotImplemented if generator is not None or self.is_complex() else torch.randn_like(self) * std + mean


def _uniform(self: Tensor, low: float = 0, high: float = 1, *, generator: Any = None) -> Any:
    return NotImplemented if generator is not None else torch.rand_like(self) * (high - low) + low


def _bernoulli(self: Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    if generator is not None:
        return NotImplemented
    return (torch.rand_like(self, dtype=torch.float32) < p).to(self.dtype)
