"""The storages that a session has met: which memory a tensor is, and when nobody needs to know of it any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from millstream._torch.tensors import drop_storage_reference, is_storage_gone
from millstream.device import DeviceContext
from millstream.errors import StreamError
from millstream.manual.operator_rules import OperatorRule
from millstream.manual.ordering import Ordering, TrackedStorage

CLEAN_EVERY = 1024
"""So many storages are met before those that are gone are forgotten."""

PLAIN: frozenset[type] = frozenset((Tensor, torch.nn.Parameter))
"""Types of tensors whose operators are PyTorch's own, on the one storage that they have."""

SCALARS: frozenset[type] = frozenset((int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout))


class Storages:
    """The known facts of each storage.

    Args:
        context: Of the device.
        ordering: Notified of storages that work on a stream has made.

    Attributes:
        memories: By the address of PyTorch's storage object. A weak reference to it, which the memory holds, keeps that
            address from being another's before it is forgotten.
    """

    def __init__(self, context: DeviceContext, ordering: Ordering) -> None:
        self._context = context
        self._ordering = ordering
        self.memories: dict[int, TrackedStorage] = {}
        self._clean_at = CLEAN_EVERY

    def find(self, tensor: Tensor) -> TrackedStorage | None:
        """The memory of a tensor, also one that has not been met yet; ``None`` where it has none that can be told.

        Raises:
            StreamError: The tensor is on another device.
        """
        storage = storage_of(tensor)
        return None if storage is None else self.memories.get(storage._cdata) or self._meet(tensor, storage)

    def find_plain(self, args: Iterable[Any], kwargs: dict[str, Any]) -> list[TrackedStorage] | None:
        """The memories of plain tensors among arguments; ``None`` where there are others."""
        uses: list[TrackedStorage] = []
        memories = self.memories
        if kwargs:
            if "out" in kwargs:
                return None
            args = (*args, *kwargs.values())
        for value in args:
            kind = type(value)
            if kind in PLAIN:
                try:
                    storage = value.untyped_storage()
                except (NotImplementedError, RuntimeError):  # as in storage_of: each call takes its time
                    return None
                uses.append(memories.get(storage._cdata) or self._meet(value, storage))
            elif kind in SCALARS:
                continue
            elif kind is list or kind is tuple:
                inner = self.find_plain(value, {})
                if inner is None:
                    return None
                uses += inner
            elif isinstance(value, Tensor):
                return None
        return uses

    def find_uses(
        self, recipe: OperatorRule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[TrackedStorage], list[TrackedStorage], bool]:
        """Return what an operator reads and what it writes, and whether it uses memory that cannot be determined."""
        if not recipe.positions and not recipe.names and (plain := self.find_plain(args, kwargs)) is not None:
            return plain, [], False
        reads: list[TrackedStorage] = []
        writes: list[TrackedStorage] = []
        is_opaque = False
        named = ((key in recipe.names, value) for key, value in kwargs.items())
        for is_written, value in (*((i in recipe.positions, value) for i, value in enumerate(args)), *named):
            if type(value) in SCALARS:
                continue
            for tensor in tensors_in((value,)):
                memory = self.find(tensor)
                if memory is not None:
                    (writes if is_written else reads).append(memory)
                else:
                    is_opaque = True
        return reads, writes, is_opaque

    def add_results(self, result: Any, index: int | None) -> list[TrackedStorage]:
        """Add the storages that work on a stream has just made; ``index`` is ``None`` for a stream of somebody else."""
        made = []
        for tensor in (result,) if type(result) in PLAIN else tensors_in((result,)):
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in self.memories and self._may_use(storage.device):
                made.append(self.add(storage, index))
        return made

    def add(self, storage: torch.UntypedStorage, index: int | None) -> TrackedStorage:
        """Add a storage that is not known yet; ``index`` is the stream that has made it."""
        if len(self.memories) > self._clean_at:
            self._clean()
        memory = self.memories[storage._cdata] = TrackedStorage(index, storage._weak_ref())
        if index is not None:
            self._ordering.make(memory, index)
        return memory

    def forget_all(self) -> None:
        """Forget all storages."""
        self._forget(self.memories)

    def _meet(self, tensor: Tensor, storage: torch.UntypedStorage) -> TrackedStorage:
        """Meet a storage that is older than the session."""
        device = tensor.device
        if storage.device.type == "meta":
            return TrackedStorage(0)
        if not self._may_use(device):
            raise StreamError(
                f"A tensor of {device} is used on a stream of {self._context.place}: move it there first, or open a "
                f"scope with ms.streams(..., device={str(device)!r})."
            )
        memory = self.add(storage, None)
        memory.lasting = tensor.is_leaf and tensor.requires_grad
        return memory

    def _may_use(self, device: torch.device) -> bool:
        """Return whether streams of this session use memory of a device; what lies elsewhere is met when it is used."""
        return device.type == "cpu" or device == self._context.torch_device

    def _clean(self) -> None:
        """Forget storages that are gone."""
        self._forget({key: each for key, each in self.memories.items() if is_storage_gone(each.reference)})
        self._clean_at = len(self.memories) + CLEAN_EVERY

    def _forget(self, memories: dict[int, TrackedStorage]) -> None:
        for key, memory in [*memories.items()]:
            del self.memories[key]
            drop_storage_reference(memory.reference)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor; ``None`` where it has none that can be told."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors, and such as oneDNN packs
        return None


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
