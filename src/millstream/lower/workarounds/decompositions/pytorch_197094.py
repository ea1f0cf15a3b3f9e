"""Lists of complex tensors are computed with one by one, as in a step of SGD on complex parameters.

Inductor makes ``_foreach_add`` and its like in-place operators where it can. It has no kernels for complex numbers, and
of an in-place operator that PyTorch is to run it cannot take the results: an error (also pytorch#197376).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from millstream._torch.workarounds import Decompositions, Workaround

aten = torch.ops.aten
_NAMES = "add sub mul div addcmul addcdiv lerp neg".split()


def _take_lists_apart(table: Decompositions) -> Decompositions:
    apart = {}
    for name in _NAMES:
        packet = getattr(aten, f"_foreach_{name}")
        for overload in packet.overloads():
            if not overload.endswith("out"):
                operator = getattr(packet, overload)
                apart[operator] = partial(_one_by_one, getattr(torch, name), table.get(operator))
    return {**table, **apart}


def _one_by_one(function: Callable[..., Any], upstream: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    if not any(isinstance(each, torch.Tensor) and each.is_complex() for one in lists for each in one):
        return NotImplemented if upstream is None else upstream(*args, **kwargs)
    rows = [arg if isinstance(arg, (list, tuple)) else [arg] * len(lists[0]) for arg in args]
    return [function(*row, **kwargs) for row in zip(*rows, strict=True)]


WORKAROUND = Workaround(
    "pytorch#197094",
    "an error on in-place operators of lists of complex tensors, as of SGD with foreach",
    decompose=_take_lists_apart,
    error="<built-in function getitem> is not an OpOverload",
)
