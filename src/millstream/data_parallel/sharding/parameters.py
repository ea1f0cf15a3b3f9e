"""Parameters divided between processes: gathered for a module's forward and backward pass, gradients scattered.

A model under ``fully_shard`` is run without its hooks: before a module's forward pass its parameters are gathered by
one exchange, and the function that does that has the reduction of their gradients for its backward pass. So autograd
knows when the last gradient is there, eagerly and while a step is traced, and each exchange is one node of the graph.

**Contract**
- Between steps, and after one that failed, modules hold what ``fully_shard`` has put there, and nothing else is kept.
- Gradients are the mean over processes, in the rows that a process has; each backward pass reduces its own.
- Where ``fully_shard`` reshards after the forward pass, autograd keeps no whole parameter: what it saves of one is
  gathered again when the backward pass needs it, once for each module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from millstream._torch.distributed.collectives import EXCHANGE
from millstream._torch.distributed.fully_sharded import (
    Precision,
    ShardedParameter,
    cast_floats,
    device_of,
    fully_sharded_modules,
    gathers_again,
    is_ready,
    is_shard,
    local_of,
    make_ready,
    model_of,
    on_device,
    parameters_of,
    precision_of,
    processes_of,
    put_hooks_off,
    replicated_like,
    set_parameter,
    why_not_sharded_by_us,
)
from millstream._torch.hooks import after_backward, current_backward_pass
from millstream._torch.saved_tensors import SavedTensors
from millstream._torch.tensors import FakeTensor, storage_id
from millstream.data_parallel.agreement import agreement_of
from millstream.data_parallel.buckets import Bucket
from millstream.data_parallel.exchange import Exchange, Sent, gather_over, scatter_over
from millstream.data_parallel.sharding.norms import Norms
from millstream.data_parallel.sharding.shard_layout import Layout, lay_out
from millstream.errors import DataParallelError


class Unit:
    """A module under ``fully_shard``: what is gathered and reduced together.

    Args:
        module: The user's, after its first forward pass has begun.

    Attributes:
        module: As given.
        name: For people.
        parameters: Those that are gathered for it.
        group: The processes; ``None`` where it has no parameters of its own.
        precision: In which dtypes it computes.
        device: Where.
        gathers_again: Whether parameters are gathered anew for the backward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.name = module, type(module).__name__.removeprefix("FSDP")
        self.parameters: list[ShardedParameter] = parameters_of(module)
        self.group = processes_of(module)
        self.precision: Precision = precision_of(module)
        self.device = device_of(module)
        self.gathers_again = gathers_again(module)
        if self.parameters:
            self.name = f"{self.name} ({self.parameters[0].name}{', ...' if len(self.parameters) > 1 else ''})"
        self._agreement, self.norms = None, None
        if self.group is not None and self.size > 1:
            self._agreement = agreement_of(self.group, on_gpu=self.device.type == "cuda")
            self.norms = Norms(self.name, self.group, self._agreement)
        self._gathers: dict[int, tuple[Layout, Exchange]] = {}
        self._scatters: dict[tuple[int, tuple[int, ...]], tuple[Layout, Exchange]] = {}

    @property
    def rank(self) -> int:
        """Of this process."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many processes there are."""
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
        layout, exchange = self._gathers[time]
        values = [each.detach().to(dtype) for each in shards if each.numel()]
        values = values or [torch.zeros(1, dtype=dtype, device=self.device)]
        (memory,) = self._perform(exchange, values)
        chunks = memory.view(self.size, layout.chunk)
        wholes = [chunks[:, rows.offset : rows.offset + rows.num_padded] for rows in layout.rows]
        return [
            each.reshape(-1)[: rows.shape[0] * rows.row].view(rows.shape)
            for each, rows in zip(wholes, layout.rows, strict=True)
        ]

    def _make_gather(self, dtype: torch.dtype, time: int) -> tuple[Layout, Exchange]:
        layout = lay_out([each.shape for each in self.parameters], dtype.itemsize, self.size)
        start = self.rank * layout.chunk
        own = [(start + rows.offset, rows.rows_of(self.rank)) for rows in layout.rows]
        sent: list[Sent] = [(slice(first, first + prod(shape)), shape) for first, shape in own if prod(shape)]
        again = f", time {time + 1}" if time else ""
        exchange = self._exchange(
            layout,
            [torch.empty(self.size * layout.chunk, dtype=dtype, device="meta")],
            [0],
            gather_over,
            f"parameters of {self.name}{again}",
            sent or [slice(start, start + 1)],
            is_paced=True,
        )
        return layout, exchange

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
        layout, exchange = self._scatters[key]
        parts: list[Tensor] = []
        for index, (position, rows) in enumerate(zip(positions, layout.rows, strict=True)):
            end = layout.rows[index + 1].offset if index + 1 < len(layout.rows) else layout.chunk
            gradient, total = gradients[position], self.size * rows.num_padded
            if gradient is None:
                parts.append(torch.zeros(self.size, end - rows.offset, dtype=dtype, device=self.device))
                continue
            whole = (gradient.to(dtype) / self.size).reshape(-1)
            whole = F.pad(whole, (0, total - whole.numel())).view(self.size, rows.num_padded)
            parts.append(F.pad(whole, (0, end - rows.offset - rows.num_padded)))
        results = self._perform(exchange, [torch.cat(parts, 1).reshape(-1)])
        there = zip(positions, results, strict=True)
        return {position: result for position, result in there if gradients[position] is not None}

    def _make_scatter(self, dtype: torch.dtype, positions: tuple[int, ...], time: int) -> tuple[Layout, Exchange]:
        layout = lay_out([self.parameters[each].shape for each in positions], dtype.itemsize, self.size)
        start, total = self.rank * layout.chunk, self.size * layout.chunk
        likes = [torch.empty(rows.rows_of(self.rank), dtype=dtype, device="meta") for rows in layout.rows]
        again = f", time {time + 1}" if time else ""
        offsets = [start + rows.offset for rows in layout.rows]
        label = f"gradients of {self.name}{again}"
        return layout, self._exchange(layout, likes, offsets, scatter_over, label, [slice(0, total)])

    def _perform(self, exchange: Exchange, values: list[Tensor]) -> list[Tensor]:
        results: list[Tensor] = EXCHANGE(values, exchange.key)
        if not isinstance(results[0], FakeTensor):
            exchange.held.give_back(self)  # unless segments use it: whole parameters are not to stay
        return results

    def _exchange(
        self,
        layout: Layout,
        like: Sequence[Tensor],
        offsets: Sequence[int],
        over: Callable[..., Any],
        label: str,
        sent: Sequence[Sent],
        *,
        is_paced: bool = False,
    ) -> Exchange:
        assert self.group is not None
        bucket = Bucket(tuple(range(len(like))), tuple(offsets), self.size * layout.chunk)
        return Exchange(
            bucket,
            like,
            self.group,
            over,
            label,
            device=self.device,
            agreement=self._agreement,
            is_first=is_paced,  # so that processes agree before each gather
            is_paced=is_paced,
            sent=sent,
        )


_units: WeakKeyDictionary[nn.Module, Unit] = WeakKeyDictionary()
_runs: WeakKeyDictionary[nn.Module, ShardedRun] = WeakKeyDictionary()
"""Runs that modules are in: a backward pass may call one again in another thread."""


def units() -> list[Unit]:
    """All that are known."""
    return [*_units.values()]


def is_known(module: nn.Module) -> bool:
    """Whether all processes have agreed on it."""
    return module in _units


def adopt(modules: Iterable[nn.Module], running: Callable[[], ShardedRun | None]) -> None:
    """Have modules under ``fully_shard``, if they can all be, run without its hooks while a step runs."""
    found = fully_sharded_modules(modules)
    if any(map(why_not_sharded_by_us, found)):
        return
    for module in found:
        put_hooks_off(module, lambda module=module: running() or _runs.get(module))  # type: ignore[misc]


class ShardedRun:
    """One run of a step's function, eager or traced.

    Args:
        rows: Gives this process's rows of a parameter, whose gradient becomes the parameter's.
        prepare: Called with a module that no process knows yet, in all of them at once.
    """

    def __init__(self, rows: Callable[[Tensor], Tensor], prepare: Callable[[nn.Module], None]) -> None:
        self._rows, self._prepare = rows, prepare
        self._times: Counter[tuple[str, Unit]] = Counter()
        self._open: list[tuple[nn.Module, list[tuple[ShardedParameter, Tensor]], SavedTensors | None]] = []
        self._again: dict[Unit, list[Tensor]] = {}  # whole parameters within a backward pass
        self._wanted: list[tuple[Unit, object]] = []  # what one will ask for, with its forward pass

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather a module's parameters, and have it compute with them."""
        if not is_known(module):
            self._prepare(module)
        unit = _units[module]
        _runs[module] = self
        if not self._open and unit.device.type != "cpu":
            args, kwargs = (on_device(unit.device, each) for each in (args, kwargs))
        if unit.precision.casts_inputs and unit.precision.parameters is not None:
            args, kwargs = (cast_floats(unit.precision.parameters, each) for each in (args, kwargs))
        self._enter(unit, saves=not (unit.gathers_again and torch.is_grad_enabled()))
        return args, kwargs

    def _enter(self, unit: Unit, *, saves: bool) -> None:
        """Have a module compute with whole parameters, which autograd may save or not."""
        held: list[tuple[ShardedParameter, Tensor]] = []
        saved = None
        if unit.parameters and not self._is_open(unit):
            shards = [each.tensor for each in unit.parameters]
            positions = tuple(index for index, each in enumerate(shards) if each.requires_grad)
            wholes = _Gather.apply(self, unit, positions, *map(self._rows, shards))  # type: ignore[no-untyped-call]
            held = [*zip(unit.parameters, shards, strict=True)]
            for parameter, whole in zip(unit.parameters, wholes, strict=True):
                for place in parameter.places:
                    set_parameter(place, whole)
            if not saves:
                saved = self._save_none_of(unit, wholes)
        self._open.append((unit.module, held, saved))

    def _is_open(self, unit: Unit) -> bool:
        return any(module is unit.module and held for module, held, _ in self._open)

    def after_forward(self, module: nn.Module, output: Any) -> Any:
        """Put back what it had."""
        while self._open and self._close_last() is not module:
            pass
        dtype = _units[module].precision.outputs
        return output if dtype is None else cast_floats(dtype, output)

    def region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a checkpointed region that is entered now: computed again, it finds whole parameters."""
        entered = [_units[module] for module, held, _ in self._open if held]

        def compute(*args: Any, **kwargs: Any) -> Any:
            num_open = len(self._open)
            for unit in entered:
                if not self._is_open(unit):
                    self._enter(unit, saves=True)
            try:
                return function(*args, **kwargs)
            finally:  # also out of the midst of a module, where nothing that comes is needed
                while len(self._open) > num_open:
                    self._close_last()

        return compute

    def close(self) -> None:
        """Put everything back, where a forward pass has ended early."""
        while self._open:
            self._close_last()
        self._again.clear()
        self._wanted.clear()
        for module in [module for module, run in _runs.items() if run is self]:
            del _runs[module]

    def _close_last(self) -> nn.Module:
        module, held, saved = self._open.pop()
        if saved is not None:
            saved.end()
        for parameter, shard in held:
            for place in parameter.places:
                set_parameter(place, shard)
        return module

    def total_norm(
        self,
        original: Callable[..., Tensor],
        gradients: Sequence[Tensor],
        shards: Mapping[int, Unit],
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
    ) -> Tensor:
        """``torch.nn.utils.get_total_norm`` of gradients, rows of parameters among them.

        Args:
            original: That function.
            gradients: Of which.
            shards: By id, those that are rows, and whose.
            norm_type: As of ``Norms.total``.
            error_if_nonfinite: Likewise.
            foreach: Likewise.

        Raises:
            DataParallelError: Not all are divided between the same processes.
        """
        models = {id(model_of(unit.module)) for unit in shards.values()}
        known = [unit for unit in units() if unit.parameters and id(model_of(unit.module)) in models]
        if len({tuple(dist.get_process_group_ranks(unit.group)) for unit in known}) > 1:  # type: ignore[arg-type]
            raise DataParallelError("Gradients that different processes divide are clipped together; clip each alone.")
        own = [local_of(each) for each in gradients if id(each) in shards and local_of(each).numel()]
        others = [each for each in gradients if id(each) not in shards]
        like = [parameter.tensor for unit in known for parameter in unit.parameters]
        unit = known[0]  # in all processes, also where one has no gradient of it
        if unit.norms is None:  # of one process, whose rows are all there are
            total = original([*own, *others], norm_type, error_if_nonfinite, foreach)
        else:
            self._times["norm", unit] += 1
            time = self._times["norm", unit] - 1
            total = unit.norms.total(original, own, others, like, norm_type, error_if_nonfinite, foreach, time)
        given = next(each for each in gradients if id(each) in shards)
        return replicated_like(total, given) if is_shard(given) and not isinstance(total, FakeTensor) else total

    # --- what travels -------------------------------------------------------------------------------------------------

    def gather(self, unit: Unit, shards: Sequence[Tensor]) -> list[Tensor]:
        """Whole parameters; within a backward pass those that it has gathered before."""
        is_within = current_backward_pass() != -1
        if is_within and unit in self._again:
            return self._again[unit]
        self._times["gather", unit] += 1
        wholes = unit.gather(shards, self._times["gather", unit] - 1)
        if is_within:
            self._again[unit] = wholes
            after_backward(self._again.clear)
        return wholes

    def scatter(self, unit: Unit, gradients: Sequence[Tensor | None], positions: tuple[int, ...]) -> dict[int, Tensor]:
        """The mean of gradients, in this process's rows; whole parameters are needed no more."""
        self._again.pop(unit, None)
        self._times["scatter", unit] += 1
        return unit.scatter(gradients, positions, self._times["scatter", unit] - 1)

    def _save_none_of(self, unit: Unit, wholes: Sequence[Tensor]) -> SavedTensors:
        """Have autograd save no whole parameter from here on, but how to get it again."""
        index_of = {storage_id(whole): index for index, whole in enumerate(wholes)}
        this = unit, object()

        def pack(tensor: Tensor) -> Any:
            index = index_of.get(storage_id(tensor))
            if index is None:
                return None
            if this not in self._wanted:
                self._wanted.append(this)
            return index, tuple(tensor.shape), tensor.stride(), tensor.storage_offset() - wholes[index].storage_offset()

        def unpack(packed: Any) -> Tensor:
            index, shape, strides, offset = packed
            whole = self._gather_again(this)[index]
            if shape == whole.shape and strides == whole.stride():
                return whole
            if whole.dim() == 2 and shape == whole.t().shape and strides == whole.t().stride():
                return whole.t()
            return whole.as_strided(shape, strides, whole.storage_offset() + offset)

        return SavedTensors(pack, unpack)

    def _gather_again(self, wanted: tuple[Unit, object]) -> list[Tensor]:
        """Whole parameters in a backward pass; those that it will ask for next travel meanwhile."""
        unit, _ = wanted
        ahead: list[Unit] = []
        if wanted in self._wanted:
            position = self._wanted.index(wanted)
            ahead = [each for each, _ in self._wanted[:position][-1:]]
            del self._wanted[position:]
        with torch.no_grad():
            wholes, *_ = [
                self.gather(each, [self._rows(parameter.tensor) for parameter in each.parameters])
                for each in [unit, *ahead]
            ]
        return wholes


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, run: ShardedRun, unit: Unit, positions: tuple[int, ...], *shards: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.unit, ctx.positions = run, unit, positions
        ctx.set_materialize_grads(False)
        wholes = run.gather(unit, shards)
        ctx.mark_non_differentiable(*(whole for index, whole in enumerate(wholes) if index not in positions))
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if all(each is None for each in gradients):
            return (None,) * (3 + len(gradients))
        reduced = ctx.run.scatter(ctx.unit, gradients, ctx.positions)
        dtypes = [parameter.tensor.dtype for parameter in ctx.unit.parameters]
        results = (reduced[index].to(dtypes[index]) if index in reduced else None for index in range(len(gradients)))
        return None, None, None, *results


def agree(module: nn.Module) -> None:
    """Compare a model under ``fully_shard`` with the other processes', who do the same at once.

    Raises:
        DataParallelError: They differ.
    """
    if not is_ready(module):
        make_ready(module)
    made = [Unit(each) for each in fully_sharded_modules([module]) if not is_known(each)]
    groups = {id(unit.group): unit.group for unit in made if unit.group is not None}
    for group in groups.values():
        _compare([each for unit in made if unit.group is group for each in unit.told()], group, type(module).__name__)
    _units.update((unit.module, unit) for unit in made)


def _compare(mine: list[str], group: dist.ProcessGroup, name: str) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    everyone: list[list[str]] = [[]] * size
    try:
        dist.all_gather_object(everyone, mine, group=group)
    except RuntimeError as error:
        raise DataParallelError(
            f"Rank {rank} could not compare {name} with the other processes: {error} One of them is gone or does not "
            "answer; nothing has changed yet."
        ) from error
    for other, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs: Iterator[tuple[str, str]] = zip(everyone[0], theirs, strict=False)
            one, two = next(((a, b) for a, b in pairs if a != b), (f"{len(everyone[0])} entries", f"{len(theirs)}"))
            raise DataParallelError(
                f"{name} differs between processes: rank 0 has {one!r} where rank {other} has {two!r}. All must shard "
                "the same model in the same way."
            )
