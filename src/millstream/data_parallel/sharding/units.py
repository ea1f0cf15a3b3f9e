"""Modules under ``fully_shard`` that all processes have agreed on: what each gathers and reduces together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from millstream._torch.distributed.collectives import EXCHANGE
from millstream._torch.distributed.fully_sharded import (
    Precision,
    ShardedParameter,
    device_of,
    fully_sharded_modules,
    gathers_again,
    is_ready,
    make_ready,
    parameters_of,
    precision_of,
    processes_of,
    replicas_of,
)
from millstream._torch.tensors import FakeTensor
from millstream.data_parallel.agreement import agreement_of, compare_over
from millstream.data_parallel.buckets import Bucket
from millstream.data_parallel.exchange import Exchange, Sent, gather_parts, scatter_parts, sum_over
from millstream.data_parallel.sharding.norms import Norms
from millstream.data_parallel.sharding.shard_layout import lay_out


class Unit:
    """A module under ``fully_shard``: what is gathered and reduced together.

    Args:
        module: The user's, after its first forward pass has begun.

    Attributes:
        module: As given.
        name: For people.
        parameters: Those that are gathered for it.
        group: The processes that parameters are divided between; ``None`` where it has none of its own.
        replicas: Those that have the same rows as this one; ``None`` where no others do.
        precision: In which dtypes it computes.
        device: Where.
        gathers_again: Whether parameters are gathered anew for the backward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.name = module, type(module).__name__.removeprefix("FSDP")
        self.parameters: list[ShardedParameter] = parameters_of(module)
        self.group, self.replicas = processes_of(module), replicas_of(module)
        self.precision: Precision = precision_of(module)
        self.device = device_of(module)
        self.gathers_again = gathers_again(module)
        if self.parameters:
            self.name = f"{self.name} ({self.parameters[0].name}{', ...' if len(self.parameters) > 1 else ''})"
        self._agreement, self.norms = None, None
        if self.processes is not None and dist.get_world_size(self.processes) > 1:
            self._agreement = agreement_of(self.processes, on_gpu=self.device.type == "cuda")
        if self.group is not None and self.size > 1:
            self.norms = Norms(self.name, self.group, self._agreement)
        self._gathers: dict[int, Exchange] = {}
        self._scatters: dict[tuple[int, tuple[int, ...]], Exchange] = {}
        self._sums: dict[tuple[int, tuple[int, ...]], Exchange] = {}

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

    def told(self) -> list[str]:
        """What is to be the same in all processes."""
        shapes = [f"{each.name}: {each.tensor.dtype} {list(each.shape)}" for each in self.parameters]
        return [f"{self.name}: {self.precision}, gathered again: {self.gathers_again}", *shapes]

    def gather(self, shards: Sequence[Tensor], time: int) -> list[Tensor]:
        """Whole parameters.

        Args:
            shards: This process's rows of each.
            time: How often the same step has gathered them before.
        """
        dtype = self.precision.parameters or shards[0].dtype
        if time not in self._gathers:
            self._gathers[time] = self._make_gather(dtype, time)
        values = [each.detach() for each in shards if each.numel()]
        return self._perform(self._gathers[time], values or [torch.zeros(1, dtype=dtype, device=self.device)])

    def _make_gather(self, dtype: torch.dtype, time: int) -> Exchange:
        layout = lay_out([each.shape for each in self.parameters], dtype.itemsize, self.size)
        own = [(rows.offset + self.rank * rows.num_padded, rows.rows_of(self.rank)) for rows in layout.rows]
        sent: list[Sent] = [(slice(first, first + prod(shape)), shape) for first, shape in own if prod(shape)]
        start = own[0][0]  # of what a process without a row sends
        again = f", time {time + 1}" if time else ""
        return self._exchange(
            [torch.empty(each.shape, dtype=dtype, device="meta") for each in self.parameters],
            [rows.offset for rows in layout.rows],
            layout.num_elements,
            gather_parts([(rows.offset, rows.num_padded) for rows in layout.rows if rows.num_padded]),
            f"parameters of {self.name}{again}",
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
        dtype = self.precision.gradients or self.precision.parameters or self.parameters[positions[0]].tensor.dtype
        key = time, positions
        if key not in self._scatters:
            self._scatters[key] = self._make_scatter(dtype, positions, time)
        exchange = self._scatters[key]
        found, num_processes = [gradients[each] for each in positions], dist.get_world_size(self.processes)
        values = [
            torch.zeros(part.shape, dtype=dtype, device=self.device) if each is None else each.to(dtype) / num_processes
            for each, part in zip(found, exchange.sent, strict=True)
        ]
        results = self._perform(exchange, values)
        if self.replicas is not None:
            results = self._sum(results, key)
        there = zip(positions, results, found, strict=True)
        return {position: result for position, result, gradient in there if gradient is not None}

    def _make_scatter(self, dtype: torch.dtype, positions: tuple[int, ...], time: int) -> Exchange:
        layout = lay_out([self.parameters[each].shape for each in positions], dtype.itemsize, self.size)
        again = f", time {time + 1}" if time else ""
        return self._exchange(
            [torch.empty(rows.rows_of(self.rank), dtype=dtype, device="meta") for rows in layout.rows],
            [rows.own for rows in layout.rows],
            layout.num_elements,
            scatter_parts([(rows.offset, rows.num_padded, rows.own) for rows in layout.rows if rows.num_padded]),
            f"gradients of {self.name}{again}",
            sent=[(slice(rows.offset, rows.offset + prod(rows.shape)), rows.shape) for rows in layout.rows],
            own=layout.num_own,
        )

    def _sum(self, rows: list[Tensor], key: tuple[int, tuple[int, ...]]) -> list[Tensor]:
        """Sums over replicas, of this process's rows."""
        if key not in self._sums:
            layout = lay_out([self.parameters[each].shape for each in key[1]], rows[0].dtype.itemsize, self.size)
            again = f", time {key[0] + 1}" if key[0] else ""
            self._sums[key] = self._exchange(
                [each.to("meta") for each in rows],
                [each.own for each in layout.rows],
                layout.num_own,
                sum_over,
                f"gradients of {self.name} between replicas{again}",
                group=self.replicas,
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
        assert self.group is not None
        return Exchange(
            Bucket(tuple(range(len(like))), tuple(offsets), num_elements),
            like,
            group or self.group,
            over,
            label,
            device=self.device,
            agreement=self._agreement,
            is_first=how.get("is_paced", False),  # so that processes agree before each gather
            **how,
        )


_units: WeakKeyDictionary[nn.Module, Unit] = WeakKeyDictionary()


def units() -> list[Unit]:
    """All that are known."""
    return [*_units.values()]


def unit_of(module: nn.Module) -> Unit:
    """That of a module that is known."""
    return _units[module]


def is_known(module: nn.Module) -> bool:
    """Whether all processes have agreed on it."""
    return module in _units


def agree(module: nn.Module) -> None:
    """Compare a model under ``fully_shard`` with the other processes', who do the same at once.

    Raises:
        DataParallelError: They differ.
    """
    if not is_ready(module):
        make_ready(module)
    made = [Unit(each) for each in fully_sharded_modules([module]) if not is_known(each)]
    groups = {id(unit.processes): unit.processes for unit in made if unit.processes is not None}
    for group in groups.values():
        told = [each for unit in made if unit.processes is group for each in unit.told()]
        compare_over(group, type(module).__name__, told, "All must shard the same model in the same way.")
    _units.update((unit.module, unit) for unit in made)
