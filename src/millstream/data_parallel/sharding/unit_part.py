"""Parameters of a module under ``fully_shard`` that are gathered at once, and whose gradients are reduced at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from millstream._torch.distributed.collectives import EXCHANGE
from millstream._torch.distributed.fully_sharded import Precision, ShardedParameter
from millstream._torch.tensors import FakeTensor
from millstream.data_parallel.agreement import Agreement, PeriodicComparison
from millstream.data_parallel.buckets import Bucket
from millstream.data_parallel.exchange import Exchange, Sent, gather_parts, scatter_parts, sum_over
from millstream.data_parallel.sharding.shard_layout import lay_out

OWN_PART_BYTES = 16 * 2**20
"""So large a parameter that stays whole until the backward pass is gathered, and its gradient reduced, by itself."""


@dataclass(frozen=True, slots=True)
class Division:
    """How a module's parameters are divided.

    Attributes:
        group: The processes that they are divided between.
        replicas: Those that have the same rows as this one; ``None`` where no others do.
        precision: In which dtypes the module computes.
        device: Where.
        agreement: Of all processes that train the model, as of ``Exchange``.
    """

    group: Any
    replicas: Any
    precision: Precision
    device: torch.device
    agreement: Agreement | PeriodicComparison | None

    @property
    def processes(self) -> Any:
        """All that train the model: those that parameters are divided between, and their replicas."""
        return self.group if self.replicas is None else dist.group.WORLD

    @property
    def rank(self) -> int:
        """Of this process."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many processes parameters are divided between."""
        return dist.get_world_size(self.group)


class UnitPart:
    """Some parameters of a module.

    Args:
        name: For people.
        parameters: At least one.
        division: How they are divided.

    Attributes:
        parameters: As given.
    """

    def __init__(self, name: str, parameters: Sequence[ShardedParameter], division: Division) -> None:
        self._name, self.parameters, self._division = name, [*parameters], division
        self._gathers: dict[int, Exchange] = {}
        self._scatters: dict[tuple[int, tuple[int, ...]], Exchange] = {}
        self._sums: dict[tuple[int, tuple[int, ...]], Exchange] = {}

    def gather(self, shards: Sequence[Tensor], time: int) -> list[Tensor]:
        """Whole parameters.

        Args:
            shards: This process's rows of each.
            time: How often the same step has gathered them before.
        """
        dtype = self._division.precision.parameters or shards[0].dtype
        if time not in self._gathers:
            self._gathers[time] = self._make_gather(dtype, time)
        values = [each.detach() for each in shards if each.numel()]
        return self._perform(self._gathers[time], values or [torch.zeros(1, dtype=dtype, device=self._division.device)])

    def _make_gather(self, dtype: torch.dtype, time: int) -> Exchange:
        layout = lay_out([each.shape for each in self.parameters], dtype.itemsize, self._division.size)
        rank = self._division.rank
        own = [(rows.offset + rank * rows.num_padded, rows.rows_of(rank)) for rows in layout.rows]
        sent: list[Sent] = [(slice(first, first + prod(shape)), shape) for first, shape in own if prod(shape)]
        start = own[0][0]  # of what a process without a row sends
        again = f", time {time + 1}" if time else ""
        return self._exchange(
            [torch.empty(each.shape, dtype=dtype, device="meta") for each in self.parameters],
            [rows.offset for rows in layout.rows],
            layout.num_elements,
            gather_parts([(rows.offset, rows.num_padded) for rows in layout.rows if rows.num_padded]),
            f"parameters of {self._name}{again}",
            sent=sent or [slice(start, start + 1)],
            is_paced=True,
        )

    def scatter(self, gradients: Sequence[Tensor | None], positions: tuple[int, ...], time: int) -> dict[int, Tensor]:
        """The mean of gradients, in the rows that this process has.

        Args:
            gradients: Of the whole parameters; ``None`` where there is none.
            positions: Of the parameters that take part.
            time: How often the same step has reduced them before.

        Returns:
            By position, those of which this process had a gradient.
        """
        division, precision = self._division, self._division.precision
        dtype = precision.gradients or precision.parameters or self.parameters[positions[0]].tensor.dtype
        key = time, positions
        if key not in self._scatters:
            self._scatters[key] = self._make_scatter(dtype, positions, time)
        exchange = self._scatters[key]
        found, num_processes = [gradients[each] for each in positions], dist.get_world_size(division.processes)
        values = [
            torch.zeros(part.shape, dtype=dtype, device=division.device)
            if each is None
            else each.to(dtype) / num_processes
            for each, part in zip(found, exchange.sent, strict=True)
        ]
        results = self._perform(exchange, values)
        if division.replicas is not None:
            results = self._sum(results, key)
        there = zip(positions, results, found, strict=True)
        return {position: result for position, result, gradient in there if gradient is not None}

    def _make_scatter(self, dtype: torch.dtype, positions: tuple[int, ...], time: int) -> Exchange:
        layout = lay_out([self.parameters[each].shape for each in positions], dtype.itemsize, self._division.size)
        again = f", time {time + 1}" if time else ""
        return self._exchange(
            [torch.empty(rows.rows_of(self._division.rank), dtype=dtype, device="meta") for rows in layout.rows],
            [rows.own for rows in layout.rows],
            layout.num_elements,
            scatter_parts([(rows.offset, rows.num_padded, rows.own) for rows in layout.rows if rows.num_padded]),
            f"gradients of {self._name}{again}",
            sent=[(slice(rows.offset, rows.offset + prod(rows.shape)), rows.shape) for rows in layout.rows],
            own=layout.num_own,
        )

    def _sum(self, rows: list[Tensor], key: tuple[int, tuple[int, ...]]) -> list[Tensor]:
        """Sums over replicas, of this process's rows."""
        if key not in self._sums:
            shapes = [self.parameters[each].shape for each in key[1]]
            layout = lay_out(shapes, rows[0].dtype.itemsize, self._division.size)
            again = f", time {key[0] + 1}" if key[0] else ""
            self._sums[key] = self._exchange(
                [each.to("meta") for each in rows],
                [each.own for each in layout.rows],
                layout.num_own,
                sum_over,
                f"gradients of {self._name} between replicas{again}",
                group=self._division.replicas,
            )
        return self._perform(self._sums[key], rows)

    def _perform(self, exchange: Exchange, values: list[Tensor]) -> list[Tensor]:
        results: list[Tensor] = EXCHANGE(values, exchange.key)
        if not isinstance(results[0], FakeTensor):
            exchange.held.give_back(self)  # unless segments use it: whole parameters are not to stay
        return results

    def _exchange(
        self,
        like: Sequence[Tensor],
        offsets: Sequence[int],
        num_elements: int,
        over: Callable[..., Any],
        label: str,
        group: dist.ProcessGroup | None = None,
        **how: Any,
    ) -> Exchange:
        return Exchange(
            Bucket(tuple(range(len(like))), tuple(offsets), num_elements),
            like,
            group or self._division.group,
            over,
            label,
            device=self._division.device,
            agreement=self._division.agreement,
            is_first=how.get("is_paced", False),  # so that processes agree before each gather
            **how,
        )


def divide_unit(
    name: str, parameters: Sequence[ShardedParameter], division: Division, *, gathers_again: bool
) -> list[UnitPart]:
    """Put parameters of a module in parts.

    What is needed first comes early, and a gradient that is there early travels early.

    Args:
        name: Of the module, for people.
        parameters: Of the module.
        division: How they are divided.
        gathers_again: Whether they are gathered anew for the backward pass, which is all at once.
    """
    if gathers_again:
        return [UnitPart(name, parameters, division)] if parameters else []

    def is_large(parameter: ShardedParameter) -> bool:
        dtype = division.precision.parameters or parameter.tensor.dtype
        return prod(parameter.shape) * dtype.itemsize >= OWN_PART_BYTES

    large = [[each] for each in parameters if is_large(each)]
    small = [each for each in parameters if not is_large(each)]
    parts = sorted([each for each in (*large, small) if each], key=lambda part: parameters.index(part[0]))
    return [
        UnitPart(name if len(parts) == 1 else f"{name}, part {number} of {len(parts)}", part, division)
        for number, part in enumerate(parts, 1)
    ]
