"""Modules under ``fully_shard`` that all processes have agreed on."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

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
from millstream.data_parallel.agreement import agreement_of, compare_over
from millstream.data_parallel.sharding.norms import Norms
from millstream.data_parallel.sharding.unit_part import Division, UnitPart, divide_unit


class Unit:
    """A module under ``fully_shard``.

    Args:
        module: The user's, after its first forward pass has begun.

    Attributes:
        module: As given.
        name: For people.
        division: How its parameters are divided; ``None`` where it has none of its own.
        parts: Its parameters, as they are gathered and reduced together.
        precision: In which dtypes it computes.
        device: Where.
        gathers_again: Whether parameters are gathered anew for the backward pass.
        norms: Of its gradients; ``None`` where one process has all of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.name = module, type(module).__name__.removeprefix("FSDP")
        parameters = parameters_of(module)
        self.precision: Precision = precision_of(module)
        self.device, self.gathers_again = device_of(module), gathers_again(module)
        self.parts: list[UnitPart] = []
        self.division, self.norms = None, None
        if not parameters:
            return
        self.name = f"{self.name} ({parameters[0].name}{', ...' if len(parameters) > 1 else ''})"
        group, replicas = processes_of(module), replicas_of(module)
        division = Division(group, replicas, self.precision, self.device, None)
        if dist.get_world_size(division.processes) > 1:
            agreement = agreement_of(division.processes, on_gpu=self.device.type == "cuda")
            division = replace(division, agreement=agreement)
        if division.size > 1:
            self.norms = Norms(self.name, division.group, division.agreement)
        self.division = division
        self.parts = divide_unit(self.name, parameters, division, gathers_again=self.gathers_again)

    @property
    def parameters(self) -> list[ShardedParameter]:
        """Those that are gathered for it."""
        return [parameter for part in self.parts for parameter in part.parameters]

    def told(self) -> list[str]:
        """What is to be the same in all processes."""
        shapes = [f"{each.name}: {each.tensor.dtype} {list(each.shape)}" for each in self.parameters]
        return [f"{self.name}: {self.precision}, gathered again: {self.gathers_again}", *shapes]


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
    processes_by_unit = {unit: unit.division.processes for unit in made if unit.division is not None}
    groups = {id(group): group for group in processes_by_unit.values()}
    for group in groups.values():
        told = [each for unit, its in processes_by_unit.items() if its is group for each in unit.told()]
        compare_over(group, type(module).__name__, told, "All must shard the same model in the same way.")
    _units.update((unit.module, unit) for unit in made)
