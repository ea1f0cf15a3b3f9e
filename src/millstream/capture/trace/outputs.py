"""What a step returns: objects with tensors inside could not be put together again."""

from __future__ import annotations

import gc
from collections.abc import Container, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from millstream._torch.tensors import FakeTensor
from millstream.capture.effects.values import holds_token
from millstream.capture.state.signature import Reference, Structure, walk
from millstream.capture.trace.scalars import is_scalar, is_size
from millstream.errors import CaptureError

MOST_SEARCHED = 10_000
"""Objects of a result that are looked into: of many more it can only be said that they are the user's own."""


def check_returned(structure: Structure, state: Container[int]) -> None:
    """Refuse objects with tensors inside that nobody could put together again.

    Args:
        structure: Of the result.
        state: By identity, tensors that are the user's own.
    """
    for name, part in walk(structure, "the result"):
        if not isinstance(part, Reference):
            continue
        if isinstance(part.target, Iterator):
            raise CaptureError(f"{name} is an iterator, which gives its items once.", remedy="Return a list.")
        if _holds_new_tensors(part.target, state):
            kind = (
                "new Parameter"
                if isinstance(part.target, Tensor)
                else f"{type(part.target).__name__} with tensors inside"
            )
            raise CaptureError(f"{name} is a {kind}.", remedy="Return tensors in tuples, lists, dicts or dataclasses.")


def _holds_new_tensors(value: Any, state: Container[int]) -> bool:
    """Whether tensors, numbers or text made while tracing can be reached from a value without a call."""
    waiting, seen = [value], dict[int, Any]()
    while waiting and len(seen) <= MOST_SEARCHED:
        value = waiting.pop()
        if is_scalar(value) or is_size(value) or (isinstance(value, str) and holds_token(value)):
            return True
        if isinstance(value, FakeTensor) and id(value) not in state:
            return True
        if id(value) not in seen and not isinstance(value, _CLOSED):
            seen[id(value)] = value
            # A function leads to all of its globals, too.
            waiting += (value.__closure__ or ()) if isinstance(value, FunctionType) else gc.get_referents(value)
    return False


_CLOSED = (Tensor, nn.Module, Optimizer, type, ModuleType, CodeType)
