"""Models divided between processes without a word of the user's: ``fully_shard`` on what a step trains.

Blocks of a model, the items of its lists, are gathered one after another; everything else with the model itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from millstream._torch.distributed.fully_sharded import (
    can_be_divided,
    divide,
    divided_like,
    fully_sharded_modules,
    is_shard,
)
from millstream._torch.workarounds import torch_version
from millstream.data_parallel.sharding.optimizer import why_not_sharded

MIXED_LISTS = (2, 13)
"""From here on PyTorch's operators of lists are known to take shards and whole tensors together; 2.11's do not."""
SMALLEST_BYTES = 2**20
"""Of a block that is gathered by itself: for less, a collective takes longer to begin than to end."""


def why_not_divided(
    modules: Sequence[tuple[str, nn.Module]],
    optimizers: Sequence[tuple[str, Optimizer]],
    tensors: Sequence[tuple[str, Tensor]],
    scalers: Sequence[tuple[str, object]],
) -> list[str]:
    """Why the models that a step trains cannot be divided between processes; empty where they can.

    Args:
        modules: That it reaches, by name.
        optimizers: Likewise.
        tensors: Likewise, by themselves.
        scalers: Likewise.
    """
    problems = [why_not_sharded(path, optimizer, "shard_parameters") for path, optimizer in optimizers]
    problems += [f"{path} is a GradScaler, which shard_parameters does not know; use bfloat16." for path, _ in scalers]
    problems += [
        f"{path} is under fully_shard already; leave out data_parallel and shard_parameters, or that."
        for path, module in modules
        if fully_sharded_modules([module])
    ]
    names = {id(each): f"{path}.{name}" for path, module in modules for name, each in module.named_parameters()}
    problems += [
        f"The step reaches {names[id(each)]} by another name, {path}, which would be left with the whole parameter. "
        "Let it ask the model, as in model.parameters()."
        for path, each in tensors
        if id(each) in names
    ]
    owned = Counter(id(each) for _, optimizer in optimizers for each in _parameters_in(optimizer))
    problems += [f"{names[key]} is in two optimizers." for key, count in owned.items() if count > 1 and key in names]
    if not names:
        problems.append("The step reaches no model, so that shard_parameters has nothing to divide.")
    return [problem for problem in problems if problem]


def divide_models(
    modules: Sequence[tuple[str, nn.Module]], optimizers: Sequence[tuple[str, Optimizer]], group: dist.ProcessGroup
) -> None:
    """Divide models, which are the same in all processes, with what optimizers hold of them.

    Args:
        modules: Roots, by name.
        optimizers: Those that train them; their parameter groups and states become those of the shards.
        group: The processes.
    """
    roots = [module for _, module in modules if any(True for _ in module.parameters())]
    places = [
        (module, name, parameter)
        for root in roots
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    ignored = {parameter for module, name, parameter in places if not can_be_divided(module, name)}
    if all(parameter in ignored for _, _, parameter in places):
        return
    for root in roots:
        units = [*_blocks_of(root), root]
        divide(units, group, next(root.parameters()).device, ignored)
    becomes = {id(parameter): module._parameters[name] for module, name, parameter in places}
    for _, optimizer in optimizers:
        for parameter in [*_parameters_in(optimizer)]:
            shard = becomes.get(id(parameter))
            if shard is None or shard is parameter:
                continue
            shard.grad = None if parameter.grad is None else divided_like(parameter.grad, shard)
            if parameter in optimizer.state:
                entry = optimizer.state.pop(parameter)
                optimizer.state[shard] = {
                    key: divided_like(value, shard) if _is_like(value, parameter) else value
                    for key, value in entry.items()
                }
        for part in optimizer.param_groups:
            part["params"] = [becomes.get(id(each), each) for each in part["params"]]
            mixes = len({is_shard(each) for each in part["params"]}) > 1
            if mixes and torch_version() < MIXED_LISTS and part.get("foreach") is None and not part.get("fused"):
                part["foreach"] = False


def _blocks_of(root: nn.Module) -> Iterator[nn.Module]:
    """Blocks that are gathered by themselves: large items of lists, that share no parameter with what is around."""
    owners = Counter(id(each) for module in root.modules() for each in module._parameters.values() if each is not None)

    def blocks(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            is_item = isinstance(module, nn.ModuleList | nn.Sequential) and _can_be_block(child, owners)
            if is_item:
                yield child
            else:
                yield from blocks(child)

    seen: set[int] = set()
    for block in blocks(root):
        parts = {*map(id, block.modules())}
        if seen.isdisjoint(parts):  # a module at two places belongs to the first
            seen |= parts
            yield block


def _can_be_block(module: nn.Module, owners: Counter[int]) -> bool:
    own = Counter(id(each) for part in module.modules() for each in part._parameters.values() if each is not None)
    num_bytes = sum(each.numel() * each.element_size() for each in module.parameters())
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)  # which is not called
    return not is_list and num_bytes >= SMALLEST_BYTES and all(owners[key] == count for key, count in own.items())


def _parameters_in(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
