"""Data parallelism without a wrapper: all that a step trains is replicated when it is first called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from millstream._torch.data_parallel import copy_from_first, is_distributed_run
from millstream.data_parallel.reducer import Reducer, Settings
from millstream.errors import ArgumentError


def replicate(
    name: str,
    modules: Sequence[tuple[str, nn.Module]],
    optimizers: Sequence[tuple[str, Optimizer]],
    tensors: Sequence[tuple[str, Tensor]],
    group: Any = None,
) -> Reducer:
    """Give all processes the parameters and buffers of the first, and agree on how gradients are reduced.

    Called in all processes at once.

    Args:
        name: Of the step.
        modules: What it reaches, by name.
        optimizers: Likewise.
        tensors: Likewise, of no module.
        group: The processes; all if ``None``.

    Raises:
        ArgumentError: There is no process group, or a model has a wrapper that reduces.
        DataParallelError: The processes have other models.
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
    reducer = Reducer(name, trained, processes, Settings(is_static=True))
    if reducer.num_processes > 1:
        copy_from_first(processes, [tensor for _, tensor in held.values()])
    return reducer


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
