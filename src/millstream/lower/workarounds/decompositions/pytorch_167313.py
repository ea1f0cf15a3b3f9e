"""Scaled sums with matrix products are scaled.

A pattern of Inductor's looks for sums with matrix products, and not at ``alpha``: ``weight.add_(grad, alpha=-0.1)``
adds the whole gradient where that is a product's result. (The issue is of the like for ``addmm``.)
"""

from __future__ import annotations

from typing import Any

import torch

from millstream._torch.workarounds import Decompositions, Workaround

aten = torch.ops.aten


def _multiply_before_adding(table: Decompositions) -> Decompositions:
    upstream = table.get(aten.add.Tensor)

    def add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
        if isinstance(y, torch.Tensor) and alpha != 1 and not isinstance(alpha, bool):
            return x + y * alpha
        return NotImplemented if upstream is None else upstream(x, y, alpha=alpha)

    return {**table, aten.add.Tensor: add}


WORKAROUND = Workaround(
    "pytorch#167313",
    "sums of scaled matrix products are not scaled",
    decompose=_multiply_before_adding,
)
