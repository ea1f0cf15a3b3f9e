"""Numbers of the user's that a graph is given anew in each call: counters, averages, numbers among the arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from millstream.capture.state.snapshot import look, store


@dataclass(frozen=True, slots=True, eq=False)
class ValuePlace:
    """Where a number is kept that the step changes.

    Attributes:
        name: For people, such as ``trainer.global_step``.
        holder: A dict, list or closure cell, or attributes in the form of a dict.
        key: Key or index in the holder.
        device: Where a graph wants the number.
    """

    name: str
    holder: Any
    key: Any
    device: torch.device

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash((id(self.holder), self.key))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ValuePlace) and self.holder is other.holder and self.key == other.key

    def get(self) -> Any:
        """The number as it is now, or whatever stands in its place."""
        return look(self.holder, self.key)

    def set(self, value: Any) -> None:
        """Put ``value`` there."""
        store(self.holder, self.key, value)


@dataclass(slots=True, eq=False)
class ArgumentPlace:
    """A number among the arguments that has been seen to change.

    Attributes:
        name: For people.
        device: Where a graph wants the number.
        value: It, in the call that is traced, or what stands in its place meanwhile.
    """

    name: str
    device: torch.device
    value: Any

    def __str__(self) -> str:
        return self.name

    def get(self) -> Any:
        """The number in the call that is traced, or what stands in its place."""
        return self.value

    def set(self, value: Any) -> None:
        """Let the traced function be given ``value``."""
        self.value = value
