"""Data parallelism without a wrapper: all that a step trains is replicated when it is first called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from millstream._torch.distributed.fully_sharded import is_shard
from millstream._torch.distributed.wrappers import copy_from_first, is_distributed_run
from millstream.data_parallel.reduced_run import watch_steps
from millstream.data_parallel.reducer import Reducer, ReducerSettings
from millstream.data_parallel.sharding.divide import divide_models, why_not_divided
from millstream.data_parallel.sharding.optimizer import Sharding, sharding_of, why_not_sharded
from millstream.data_parallel.sharding.sharded_reducer import ShardedReducer
from millstream.errors import ArgumentError, DataParallelError, MillstreamError


def replicate(
    name: str,
    modules: Sequence[tuple[str, nn.Module]],
    optimizers: Sequence[tuple[str, Optimizer]],
    tensors: Sequence[tuple[str, Tensor]],
    group: Any = None,
    scalers: Sequence[tuple[str, Any]] = (),
    *,
    shards: bool = False,
    shards_parameters: bool = False,
) -> Reducer:
    """Give all processes the parameters and buffers of the first, and agree on how gradients are reduced.

    Called in all processes at once.

    Args:
        name: Of the step.
        modules: What it reaches, by name.
        optimizers: Likewise.
        tensors: Likewise, of no module.
        group: The processes; all if ``None``.
        scalers: Gradient scalers that it reaches.
        shards: Whether optimizers are divided between processes.
        shards_parameters: Whether models are, and optimizers with them.

    Raises:
        ArgumentError: There is no process group, or a model has a wrapper that reduces, or an optimizer cannot be
            divided; that in all processes.
        DataParallelError: The processes have other models, or have loaded shards of others.
    """
    if not is_distributed_run():
        raise ArgumentError(
            f"{name} is a step with data_parallel, but there is no process group. Call "
            "torch.distributed.init_process_group() first, in processes that torchrun has started."
        )
    for path, module in modules:
        if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
            raise ArgumentError(f"{path} is in a DistributedDataParallel already; leave out data_parallel or that.")
    processes: Any = group or dist.group.WORLD
    held = {id(tensor): (path, tensor) for path, tensor in _tensors_of(modules, optimizers, tensors)}
    trained = [(path, tensor) for path, tensor in held.values() if tensor.requires_grad]
    settings = ReducerSettings(is_static=True)
    if shards_parameters and dist.get_world_size(processes) > 1:
        _raise_together(processes, why_not_divided(modules, optimizers, tensors, scalers), ArgumentError)
        Reducer(name, trained, processes, settings, [optimizer for _, optimizer in optimizers])  # compares models
        copy_from_first(processes, [tensor for _, tensor in held.values()])
        divide_models(modules, optimizers, processes)
        left = [(path, each) for path, each in _tensors_of(modules, optimizers, tensors) if not is_shard(each)]
        rest = {id(each): (path, each) for path, each in left if each.requires_grad}
        return Reducer(name, [*rest.values()], processes, settings)
    if not shards or dist.get_world_size(processes) == 1:
        reducer = Reducer(name, trained, processes, settings, [optimizer for _, optimizer in optimizers])
    else:
        reducer = _shard(name, trained, processes, settings, optimizers, scalers)
    if reducer.num_processes > 1:
        copy_from_first(processes, [tensor for _, tensor in held.values()])
    return reducer


def _shard(
    name: str,
    trained: list[tuple[str, Tensor]],
    group: dist.ProcessGroup,
    settings: ReducerSettings,
    optimizers: Sequence[tuple[str, Optimizer]],
    scalers: Sequence[tuple[str, Any]],
) -> Reducer:
    problems = [why_not_sharded(path, optimizer) for path, optimizer in optimizers]
    problems += [f"{path} is a GradScaler, which shard_optimizer does not know; use bfloat16." for path, _ in scalers]
    positions = {id(tensor): position for position, (_, tensor) in enumerate(trained)}
    owners: dict[int, int] = {}
    for number, (path, optimizer) in enumerate(optimizers):
        for parameter in (each for every in optimizer.param_groups for each in every["params"]):
            position = positions.get(id(parameter))
            if position is not None and owners.setdefault(position, number) != number:
                other = optimizers[owners[position]][0]
                problems.append(f"{trained[position][0]} is in {other} and in {path}; shard_optimizer takes one.")
    if not owners:
        problems.append(f"{name} reaches no optimizer of a parameter, so that shard_optimizer has nothing to divide.")
    _raise_together(group, problems, ArgumentError)
    reducer = ShardedReducer(name, trained, group, settings, owners, [optimizer for _, optimizer in optimizers])
    shardings = {
        optimizer: Sharding(path, optimizer, number, reducer)
        for number, (path, optimizer) in enumerate(optimizers)
        if number in owners.values()
    }
    others = [
        f"{sharding.name} is divided by another step, for other parameters."
        for optimizer, sharding in shardings.items()
        if (before := sharding_of(optimizer)) is not None and before.mark != sharding.mark
    ]
    _raise_together(group, [each.problem for each in shardings.values()] + others, DataParallelError)
    for optimizer, sharding in shardings.items():
        if sharding_of(optimizer) is None:
            watch_steps(optimizer)
        sharding.begin()
        reducer.shardings[optimizer] = sharding
    return reducer


def _raise_together(group: dist.ProcessGroup, problems: Sequence[str], kind: type[MillstreamError]) -> None:
    """Raise in all processes what one of them finds."""
    told: list[str] = [""] * dist.get_world_size(group)
    try:
        dist.all_gather_object(told, next(filter(None, problems), ""), group=group)
    except RuntimeError as error:
        raise DataParallelError(f"Rank {dist.get_rank(group)} could not reach the other processes: {error}") from error
    for rank, problem in enumerate(told):
        if problem:
            raise kind(problem if len({*told}) == 1 else f"Rank {rank}: {problem}")


def _tensors_of(
    modules: Iterable[tuple[str, nn.Module]],
    optimizers: Iterable[tuple[str, Optimizer]],
    tensors: Iterable[tuple[str, Tensor]],
) -> Iterable[tuple[str, Tensor]]:
    for prefix, module in modules:
        yield from module.named_parameters(prefix)
        yield from module.named_buffers(prefix)
    for prefix, optimizer in optimizers:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        yield from ((f"{prefix}.params[{number}]", each) for number, each in enumerate(parameters))
    yield from ((name, tensor) for name, tensor in tensors if tensor.is_leaf and tensor.requires_grad)
