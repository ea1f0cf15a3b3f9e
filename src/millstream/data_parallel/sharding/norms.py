"""Norms of gradients of which each process has a share: those of the whole, in all processes alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from millstream._torch.distributed.collectives import EXCHANGE
from millstream.data_parallel.agreement import Agreement, PeriodicComparison
from millstream.data_parallel.buckets import Bucket
from millstream.data_parallel.exchange import Exchange, greatest_over, sum_over
from millstream.errors import ArgumentError


class Norms:
    """Norms of one model's gradients: each is one exchange of a number.

    Args:
        name: Of the model, for people.
        group: The processes.
        agreement: As of ``Exchange``.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, agreement: Agreement | PeriodicComparison | None) -> None:
        self._name, self._group, self._agreement = name, group, agreement
        self._exchanges: dict[tuple[bool, int], Exchange] = {}

    def total(
        self,
        original: Callable[..., Tensor],
        shares: Sequence[Tensor],
        others: Sequence[Tensor],
        like: Sequence[Tensor],
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
        time: int,
    ) -> Tensor:
        """``torch.nn.utils.get_total_norm`` of gradients. All processes ask for the same norm.

        Args:
            original: That function.
            shares: Of which this process has its part.
            others: Which all processes have alike.
            like: Parameters of which there may be shares, in all processes alike.
            norm_type: Of the norm: a positive number or ``inf``.
            error_if_nonfinite: Whether to raise ``RuntimeError`` where it is not finite.
            foreach: As PyTorch has it.
            time: How many norms the same step has asked for before.

        Raises:
            ArgumentError: The norm of a whole does not follow from those of its parts.
        """
        if not norm_type > 0:
            raise ArgumentError(f"norm_type={norm_type} has no meaning for gradients in shares; give a positive one.")
        dtype = like[0].dtype
        for each in like[1:]:
            dtype = torch.promote_types(dtype, each.dtype)
        exact = torch.promote_types(dtype, torch.float32)

        def part(of: Sequence[Tensor]) -> Tensor:
            if not of:
                return torch.zeros((), dtype=exact, device=like[0].device)
            norm = original(of, norm_type, foreach=foreach).to(exact)
            return norm if norm_type == inf else norm**norm_type

        exchange = self._exchange(norm_type == inf, time, exact, like[0].device)
        (total,) = EXCHANGE([part(shares)], exchange.key)
        total = torch.maximum(total, part(others)) if norm_type == inf else (total + part(others)) ** (1 / norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(f"The total norm of order {norm_type} is not finite, so it cannot be clipped.")
        return total.to(dtype)

    def _exchange(self, is_greatest: bool, time: int, dtype: torch.dtype, device: torch.device) -> Exchange:
        key = is_greatest, time
        if key not in self._exchanges:
            like = torch.empty((), dtype=dtype, device=device)
            over = greatest_over if is_greatest else sum_over
            label = f"norm {time} of {self._name}"
            one = Bucket((0,), (0,), 1)
            self._exchanges[key] = Exchange(
                one, [like], self._group, over, label, agreement=self._agreement, is_first=True
            )
        return self._exchanges[key]
