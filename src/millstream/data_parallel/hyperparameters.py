"""Compare what processes must have in common, as they would train apart without an error otherwise.

Numbers of optimizers, and how a captured step updates parameters by what was reduced: all who know theirs tell a mark
of it now and then, and the names and values where marks differ.
"""

from __future__ import annotations

import gc
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from millstream.errors import DataParallelError
from millstream.heap import instances

OF_THE_PROCESS = frozenset(("params", "shard"))
"""Keys of parameter groups that are not compared: tensors, and which share a process has."""

MOST_ITEMS = 16
"""Of a tensor among the hyperparameters that is compared: a learning rate is one."""


_FIELD_BITS = 10
MARK_BITS = 2 * _FIELD_BITS
"""Of a mark: two fields, for numbers and for updates, each 0 where it is not known."""


class Hyperparameters:
    """The values that a step trains by, to be compared.

    Args:
        told: Numbers of optimizers, each as a name and a value.
        updates: Likewise how each parameter is updated.

    Attributes:
        told: Both.
        mark: A number that others have only by chance.
    """

    def __init__(self, told: Sequence[str] = (), updates: Sequence[str] = ()) -> None:
        self.told = [*told, *updates]
        self.mark = _field(told) | _field(updates) << _FIELD_BITS


def _field(told: Sequence[str]) -> int:
    return zlib.crc32(repr([*told]).encode()) % ((1 << _FIELD_BITS) - 1) + 1 if told else 0


NOT_KNOWN = Hyperparameters()


def marks_differ(marks: Iterable[int]) -> bool:
    """Return whether two of those who know something have something else."""
    least = (1 << _FIELD_BITS) - 1
    fields = [(mark & least, mark >> _FIELD_BITS) for mark in marks]
    return any(len({*field} - {0}) > 1 for field in zip(*fields, strict=True))


def optimizers_of(parameters: Iterable[Tensor], found: Sequence[Optimizer]) -> list[Optimizer]:
    """Return those of ``found`` that train some of these parameters; if none does, all of this process that do.

    A step that only accumulates gradients does not reach the optimizer, which another step has.
    """
    wanted = {id(each) for each in parameters}

    def trains(optimizer: Optimizer) -> bool:
        groups = getattr(optimizer, "param_groups", ())  # of one that is being made there are none
        return any(id(each) in wanted for group in groups for each in group["params"])

    if reached := [each for each in found if trains(each)]:
        return reached
    gc.collect()  # in one process an optimizer that is gone may wait for that, and not in another
    known = [each for each in instances([Optimizer]) if trains(each)]
    within = {id(part) for each in known for part in vars(each).values()}  # ZeRO has one for a part of the parameters
    return [each for each in known if id(each) not in within]


def told_of(optimizers: Iterable[Optimizer], named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """All that is compared of some optimizers, for people: class, hyperparameters, and which parameters they have.

    Args:
        optimizers: That train some of ``named``.
        named: Parameters that are reduced, by name.
    """
    names = {id(each): name for name, each in named}
    told: list[list[str]] = []
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        own = [f"an optimizer {type(optimizer).__module__}.{kind} of {len(optimizer.param_groups)} groups"]
        for number, group in enumerate(optimizer.param_groups):
            where = f"{kind}'s parameter group {number}"
            own += [
                f"{where}: {key} = {_told(value)}"
                for key, value in sorted(group.items(), key=lambda pair: str(pair[0]))
                if key not in OF_THE_PROCESS
            ]
            own += [f"{where} with {names[id(each)]}" for each in group["params"] if id(each) in names]
        told.append(own)
    return [entry for own in sorted(told) for entry in own]  # those found on the heap are in no order


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() <= MOST_ITEMS else f"a tensor {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_told, value))})"
    plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if plain else type(value).__name__


def differing(mine: Sequence[str], group: dist.ProcessGroup | None, since: str = "") -> DataParallelError | None:
    """The error that says where processes differ in what they train by. Called in all of them at once.

    Args:
        mine: Names and values, of this process.
        group: The processes.
        since: When that was found, if not before the first step in which it does, for people.

    Returns:
        ``None`` where no two processes have told other values of one name: graphs of one step may read other numbers.
    """
    told: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(told, [*mine], group=group)
    except RuntimeError as error:
        return DataParallelError(f"Processes differ in what they train by, and could not say how: {error}")
    values: dict[tuple[str, int], dict[str, list[int]]] = {}  # of each name: each value, and who tells it
    for rank, entries in enumerate(told):
        times: Counter[str] = Counter()  # two optimizers of one class have the same names
        for entry in entries:
            name = entry.partition(" = ")[0]
            times[name] += 1
            values.setdefault((name, times[name]), {}).setdefault(entry, []).append(rank)
    for who in values.values():
        if len(who) > 1:
            have = " where ".join(f"{_ranks(ranks)} {entry}" for entry, ranks in who.items())
            return DataParallelError(
                f"Processes differ in what they train by: {have}. Step schedulers, set learning rates, clip and update "
                f"in all processes alike. {since or 'This step has not run'}; earlier ones of that kind have trained "
                "the processes apart. (MILLSTREAM_WITHOUT=comparison leaves the comparison out.)"
            )
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
