"""``max_unpool2d`` keeps the memory format of its input on CPUs, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from millstream._torch.workarounds import Decompositions, Workaround

_OPERATOR = torch.ops.aten.max_unpool2d.default


def _keep_format(table: Decompositions) -> Decompositions:
    return {**table, _OPERATOR: partial(_unpool, table[_OPERATOR])} if _OPERATOR in table else table


def _unpool(upstream: Callable[..., Any], image: Tensor, *args: Any) -> Any:
    result = upstream(image, *args)
    if image.device.type != "cpu" or image.dim() != 4 or not isinstance(result, Tensor):
        return result
    return result.contiguous(memory_format=suggest_memory_format(image))


WORKAROUND = Workaround(
    "pytorch#187173",
    "results of max_unpool2d in another memory format, on CPUs",
    until=(2, 14),
    decompose=_keep_format,
)
