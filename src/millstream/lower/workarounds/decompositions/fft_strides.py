"""Transforms of real numbers along other dimensions than the last are computed along the last ones, on CPUs.

The result of ``_fft_r2c`` lies with the transformed dimensions innermost, and fake tensors said that it is contiguous:
kernels read other elements than they were to, as in the gradient of ``torch.fft.irfft(x, dim=1)``. TorchInductor's own
wrapper compares strides and raises an error there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from millstream._torch.workarounds import Decompositions, Workaround

_OPERATOR = torch.ops.aten._fft_r2c.default


def _transform_last(table: Decompositions) -> Decompositions:
    return {**table, _OPERATOR: _transform}


def _transform(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    dims = [each % x.dim() for each in dim]
    order = [each for each in range(x.dim()) if each not in dims] + dims
    if x.device.type != "cpu" or order == [*range(x.dim())]:
        return NotImplemented
    last = [*range(x.dim() - len(dims), x.dim())]
    result = _OPERATOR(x.permute(order).contiguous(), last, normalization, onesided)
    return result.permute([order.index(each) for each in range(x.dim())])


WORKAROUND = Workaround(
    "fft-strides",
    "wrong numbers of Fourier transforms of real numbers along other dimensions than the last, on CPUs",
    until=(2, 13),
    decompose=_transform_last,
)
