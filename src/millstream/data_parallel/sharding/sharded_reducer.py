"""Reduction where each process gets its share of the mean, updates that of the parameters, and gives it to all.

**Contract**
- After a reduction ``.grad`` is the mean where this process has the parameter: whole, or with zeros around its part.
  Elsewhere it is ``None``. What lies in ``.grad`` when a backward pass begins is such a share, and is added to.
- Gradients and parameters travel in the same memory: the latter when the optimizer has read the former.
- Norms of shares are those of the whole, in all processes alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from millstream._torch.distributed.collectives import EXCHANGE
from millstream.data_parallel.buckets import Bucket, plan_buckets
from millstream.data_parallel.exchange import (
    Exchange,
    dense_strides,
    gather_over,
    scatter_over,
    sum_over,
)
from millstream.data_parallel.reducer import Reducer, ReducerSettings, member_of
from millstream.data_parallel.sharding.norms import Norms
from millstream.data_parallel.sharding.pieces import Piece, pad, pieces_of


class ShardedReducer(Reducer):
    """As ``Reducer``, for parameters whose optimizers are divided between processes.

    Args:
        name: As of ``Reducer``.
        parameters: Likewise.
        group: Likewise, of two processes or more.
        settings: Likewise.
        owners: By position, the number of the optimizer that updates a parameter; others get the whole mean.
        optimizers: As of ``Reducer``.

    Attributes:
        rank: Of this process.
        shardings: How each of those optimizers is divided; ``Sharding``.
        owner_of: Of each bucket, the number of the optimizer whose parameters it has.
        pieces: Of each bucket, what this process has of it, by number of the parameter there.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, Tensor]],
        group: dist.ProcessGroup,
        settings: ReducerSettings,
        owners: Mapping[int, int],
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self._owners = owners
        self.shardings: dict[Optimizer, Any] = {}
        self.rank = dist.get_rank(group)
        self._gathers: dict[tuple[int, int], list[Exchange]] = {}
        super().__init__(name, parameters, group, settings, optimizers)
        self._norms = Norms(name, group, self._agreement)

    def _plan(self) -> list[Bucket]:
        members = [member_of(each) for each in self.parameters]
        kinds = [(each.kind, self._owners.get(position)) for position, each in enumerate(members)]
        members = [replace(each, kind=kind) for each, kind in zip(members, kinds, strict=True)]
        buckets = plan_buckets(members, self.settings.cap_bytes)
        self.owner_of = [self._owners.get(bucket.members[0]) for bucket in buckets]
        size = self.num_processes
        for number, bucket in enumerate(buckets):
            if self.owner_of[number] is not None:
                buckets[number] = pad(bucket, members[bucket.members[0]].item_bytes, size)
        self.pieces: list[dict[int, Piece]] = [{}] * len(buckets)
        for number, bucket in enumerate(buckets):
            if self.owner_of[number] is not None:
                lengths = [members[position].num_elements for position in bucket.members]
                self.pieces[number] = {each.member: each for each in pieces_of(bucket, lengths, self.rank, size)}
        return buckets

    def buckets_of(self, owner: int) -> list[int]:
        """Numbers of the buckets of an optimizer."""
        return [number for number, each in enumerate(self.owner_of) if each == owner]

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _operation(self, bucket: int) -> Callable[..., Any]:
        return sum_over if self.owner_of[bucket] is None else scatter_over

    def _put(self, bucket: int, member: int, parameter: Tensor, result: Tensor) -> None:
        piece = self.pieces[bucket].get(member)
        if self.owner_of[bucket] is None or (piece is not None and piece.is_whole):
            super()._put(bucket, member, parameter, result)
        elif piece is None:
            parameter.grad = None
        else:
            part = flat(result, parameter)[piece.start : piece.stop]
            parameter.grad = shaped(F.pad(part, (piece.start, parameter.numel() - piece.stop)), parameter)

    def take_shares(self) -> list[Tensor | None]:
        """Take gradients away that are shares of a mean already, so that what a backward pass adds is reduced alone."""
        taken: list[Tensor | None] = []
        for position, parameter in enumerate(self.parameters):
            taken.append(parameter.grad if position in self._owners else None)
            if position in self._owners:
                parameter.grad = None
        return taken

    def add_shares(self, taken: Sequence[Tensor | None]) -> None:
        """Add gradients to what there is."""
        for parameter, share in zip(self.parameters, taken, strict=True):
            if share is not None and parameter.grad is not None:
                share.add_(parameter.grad)
            if share is not None:
                parameter.grad = share

    def total_norm(
        self,
        original: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
        time: int,
    ) -> Tensor:
        """``torch.nn.utils.get_total_norm`` of gradients, shares among them: see ``Norms``."""
        known = {id(self.parameters[position].grad) for position in self._owners}
        shares = [each for each in tensors if id(each) in known]
        others = [each for each in tensors if id(each) not in known]
        like = [self.parameters[position] for position in sorted(self._owners)]
        return self._norms.total(original, shares, others, like, norm_type, error_if_nonfinite, foreach, time)

    # --- parameters ---------------------------------------------------------------------------------------------------

    def gather(self, owner: int, updated: Mapping[int, Tensor], time: int) -> None:
        """Give all processes the parameters of an optimizer, each of which has updated its share.

        Args:
            owner: Number of the optimizer.
            updated: By position: a parameter that this process has whole, or its part of one, flat.
            time: How often the same step has done it before.
        """
        key = owner, time
        if key not in self._gathers:
            self._gathers[key] = [self._make_gather(number, time) for number in self.buckets_of(owner)]
        for number, exchange in zip(self.buckets_of(owner), self._gathers[key], strict=True):
            bucket, pieces = self.buckets[number], self.pieces[number]
            values = [updated[bucket.members[member]] for member in pieces]
            if not values:
                values = [torch.zeros(1, dtype=exchange.memory.dtype, device=exchange.memory.device)]
            results = EXCHANGE(values, exchange.key)
            for member, (position, result) in enumerate(zip(bucket.members, results, strict=True)):
                if member not in pieces or not pieces[member].is_whole:
                    self.parameters[position].copy_(result)

    def _make_gather(self, number: int, time: int) -> Exchange:
        bucket, pieces = self.buckets[number], self.pieces[number].values()
        start = self.rank * (bucket.num_elements // self.num_processes)
        sent: list[int | slice] = [
            each.member if each.is_whole else slice(each.offset, each.offset + each.stop - each.start)
            for each in pieces
        ]
        rounds = self._rounds[min(time, len(self._rounds) - 1)] if self._rounds else None
        return Exchange(
            bucket,
            [self.parameters[position] for position in bucket.members],
            self.group,
            gather_over,
            f"parameters of bucket {number} of {self.name}",
            agreement=self._agreement,
            is_first=number == self.buckets_of(self.owner_of[number] or 0)[0],
            shares=None if rounds is None else rounds[number],
            sent=sent or [slice(start, start + 1)],
        )


def flat(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements of a tensor in the order in which those of ``like``, of the same shape, lie in a bucket."""
    return tensor.permute(_order(like)).reshape(-1)


def shaped(elements: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``flat``."""
    order = _order(like)
    return elements.view([like.shape[dimension] for dimension in order]).permute(
        [order.index(dimension) for dimension in range(len(order))]
    )


def _order(like: Tensor) -> list[int]:
    strides = dense_strides(like)
    return sorted(range(like.dim()), key=lambda dimension: -strides[dimension])
