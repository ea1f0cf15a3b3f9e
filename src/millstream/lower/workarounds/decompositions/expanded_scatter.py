"""``slice_scatter`` and its like of an expanded tensor have as much memory as elements.

Their results were given the strides of what they were made of, 0 among them: each row was the last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from millstream._torch.compiler.symbols import may_overlap_itself
from millstream._torch.workarounds import Decompositions, Workaround

aten = torch.ops.aten
_OPERATORS = (aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default)


def _give_memory(table: Decompositions) -> Decompositions:
    return {**table, **{operator: partial(_scatter, operator, table.get(operator)) for operator in _OPERATORS}}


def _scatter(operator: Any, upstream: Callable[..., Any] | None, whole: Tensor, *args: Any, **kwargs: Any) -> Any:
    if may_overlap_itself(whole):
        return operator(whole.clone(memory_format=torch.contiguous_format), *args, **kwargs)
    return NotImplemented if upstream is None else upstream(whole, *args, **kwargs)


WORKAROUND = Workaround(
    "expanded-scatter",
    "wrong numbers of slice_scatter, select_scatter and diagonal_scatter of an expanded tensor",
    until=(2, 13),
    decompose=_give_memory,
)
