"""Tensors among what functions and operators are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, repeat
from typing import Any

from torch import Tensor


class ForeignTensor(Exception):  # noqa: N818 - a message to the tracer, which lifts the tensor and starts again
    """A real tensor that was not lifted has been met."""

    def __init__(self, tensor: Tensor, where: str) -> None:
        super().__init__(where)
        self.tensor = tensor
        self.where = where


def leaves_in(values: Sequence[Any]) -> Sequence[Any]:
    """The values, and those in lists and tuples among them; here and below with few calls, each of which is watched."""
    if not any(map(isinstance, values, repeat((list, tuple)))):
        return values
    return [leaf for value in values for leaf in (leaves_in(value) if isinstance(value, list | tuple) else (value,))]


def tensors_in(leaves: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among these."""
    return compress(leaves, map(isinstance, leaves, repeat(Tensor)))


def fits(new: Any, old: Tensor) -> bool:
    """Return whether ``new`` is a tensor that can be copied to ``old`` as it is."""
    return isinstance(new, Tensor) and new.shape == old.shape and new.dtype == old.dtype and new.device == old.device
