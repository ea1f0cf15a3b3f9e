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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from millstream._torch.autograd.hooks import after_backward, current_backward_pass
from millstream._torch.autograd.saved_tensors import SavedTensors
from millstream._torch.distributed.fully_sharded import (
    ShardedParameter,
    cast_floats,
    fully_sharded_modules,
    is_shard,
    local_of,
    model_of,
    on_device,
    put_hooks_off,
    replicated_like,
    set_parameter,
    why_not_sharded_by_us,
)
from millstream._torch.tensors import FakeTensor, storage_id
from millstream.data_parallel.sharding.unit_part import UnitPart
from millstream.data_parallel.sharding.units import Unit, is_known, unit_of, units
from millstream.errors import DataParallelError

_runs: WeakKeyDictionary[nn.Module, ShardedRun] = WeakKeyDictionary()
"""Runs that modules are in: a backward pass may call one again in another thread."""


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
        self._times: Counter[tuple[str, Unit | UnitPart]] = Counter()
        self._open: list[tuple[nn.Module, list[tuple[ShardedParameter, Tensor]], SavedTensors | None]] = []
        self._again: dict[UnitPart, list[Tensor]] = {}  # whole parameters within a backward pass
        self._wanted: list[tuple[UnitPart, object]] = []  # what one will ask for, with its forward pass

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather a module's parameters, and have it compute with them."""
        if not is_known(module):
            self._prepare(module)
        unit = unit_of(module)
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
        for part in () if self._is_open(unit) else unit.parts:
            shards = [each.tensor for each in part.parameters]
            positions = tuple(index for index, each in enumerate(shards) if each.requires_grad)
            wholes = _Gather.apply(self, part, positions, *map(self._rows, shards))  # type: ignore[no-untyped-call]
            held += zip(part.parameters, shards, strict=True)
            for parameter, whole in zip(part.parameters, wholes, strict=True):
                for place in parameter.places:
                    set_parameter(place, whole)
            if not saves:  # of one part, where parameters are gathered again
                saved = self._save_none_of(part, wholes)
        self._open.append((unit.module, held, saved))

    def _is_open(self, unit: Unit) -> bool:
        return any(module is unit.module and held for module, held, _ in self._open)

    def after_forward(self, module: nn.Module, output: Any) -> Any:
        """Put back what it had."""
        while self._open and self._close_last() is not module:
            pass
        dtype = unit_of(module).precision.outputs
        return output if dtype is None else cast_floats(dtype, output)

    def region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a checkpointed region that is entered now: computed again, it finds whole parameters."""
        entered = [unit_of(module) for module, held, _ in self._open if held]

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
        known = [unit for unit in units() if unit.parts and id(model_of(unit.module)) in models]
        divisions = [unit.division for unit in known if unit.division is not None]
        if len({tuple(dist.get_process_group_ranks(each.group)) for each in divisions}) > 1:
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

    def gather(self, part: UnitPart, shards: Sequence[Tensor]) -> list[Tensor]:
        """Whole parameters; within a backward pass those that it has gathered before."""
        is_within = current_backward_pass() != -1
        if is_within and part in self._again:
            return self._again[part]
        self._times["gather", part] += 1
        wholes = part.gather(shards, self._times["gather", part] - 1)
        if is_within:
            self._again[part] = wholes
            after_backward(self._again.clear)
        return wholes

    def scatter(
        self, part: UnitPart, gradients: Sequence[Tensor | None], positions: tuple[int, ...]
    ) -> dict[int, Tensor]:
        """The mean of gradients, in this process's rows; whole parameters are needed no more."""
        self._again.pop(part, None)
        self._times["scatter", part] += 1
        return part.scatter(gradients, positions, self._times["scatter", part] - 1)

    def _save_none_of(self, part: UnitPart, wholes: Sequence[Tensor]) -> SavedTensors:
        """Have autograd save no whole parameter from here on, but how to get it again."""
        index_of = {storage_id(whole): index for index, whole in enumerate(wholes)}
        this = part, object()

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

    def _gather_again(self, wanted: tuple[UnitPart, object]) -> list[Tensor]:
        """Whole parameters in a backward pass; those that it will ask for next travel meanwhile."""
        part, _ = wanted
        ahead: list[UnitPart] = []
        if wanted in self._wanted:
            position = self._wanted.index(wanted)
            ahead = [each for each, _ in self._wanted[:position][-1:]]
            del self._wanted[position:]
        with torch.no_grad():
            wholes, *_ = [
                self.gather(each, [self._rows(parameter.tensor) for parameter in each.parameters])
                for each in [part, *ahead]
            ]
        return wholes


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, run: ShardedRun, part: UnitPart, positions: tuple[int, ...], *shards: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.part, ctx.positions = run, part, positions
        ctx.set_materialize_grads(False)
        wholes = run.gather(part, shards)
        ctx.mark_non_differentiable(*(whole for index, whole in enumerate(wholes) if index not in positions))
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if all(each is None for each in gradients):
            return (None,) * (3 + len(gradients))
        reduced = ctx.run.scatter(ctx.part, gradients, ctx.positions)
        dtypes = [parameter.tensor.dtype for parameter in ctx.part.parameters]
        results = (reduced[index].to(dtypes[index]) if index in reduced else None for index in range(len(gradients)))
        return None, None, None, *results
