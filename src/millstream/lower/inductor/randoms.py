"""Random numbers that Inductor does not generate by itself.

What fills memory in place, ``torch.empty(...).normal_()``, as distributions and drop-path do: Inductor calls PyTorch
for these. But that reads what nobody has written before, and for ``bernoulli_`` on the CPU comes as a line of text that
cannot be taken for a kernel. So they are written in terms of those that Inductor generates.

What functions of control flow draw by a seed (``_torch/seeded_randoms.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config, inductor_prims
from torch._inductor.lowering import lowerings, register_lowering

from millstream._torch.seeded_randoms import DRAW

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


@register_lowering(DRAW, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _draw(seed: Any, number: int, size: Any, kind: str, low: int = 0, high: int = 0) -> Any:
    """Draw as for operators outside of control flow, whose seeds Inductor makes itself."""
    own = lowerings[aten.add.Tensor](seed, number) if number else seed
    if kind == "randint":
        return lowerings[inductor_prims.randint](low, high, size, own)
    return lowerings[inductor_prims.random](size, own, kind)
