"""What a step returns: objects with tensors inside could not be put together again."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Container as Container_
from collections.abc import Iterator, Mapping, ValuesView
from types import FunctionType, ModuleType
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


def check_returned(structure: Structure, state: Container_[int]) -> None:
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
        if _holds_new_tensors(part.target, state, set()):
            kind = (
                "new Parameter"
                if isinstance(part.target, Tensor)
                else f"{type(part.target).__name__} with tensors inside"
            )
            raise CaptureError(
                f"{name} is a {kind}.",
                remedy="Return tensors in tuples, lists, dicts or dataclasses.",
            )


def _holds_new_tensors(value: Any, state: Container_[int], seen: set[int]) -> bool:
    """Whether tensors, numbers or text made while tracing can be reached from a value without a call."""
    if is_scalar(value) or is_size(value):
        return True
    if isinstance(value, FakeTensor):
        return id(value) not in state
    if isinstance(value, str):
        return holds_token(value)
    if id(value) in seen or len(seen) > MOST_SEARCHED or isinstance(value, (nn.Module, Optimizer, type, ModuleType)):
        return False
    seen.add(id(value))
    parts: list[Any] = [*getattr(value, "__dict__", {}).values()]
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        parts += (getattr(value, slot, None) for slot in ((slots,) if isinstance(slots, str) else slots))
    if isinstance(value, (Mapping, ValuesView)):
        parts += value.values() if isinstance(value, Mapping) else value
    elif isinstance(value, (tuple, list, deque, set, frozenset)):
        parts += value
    elif isinstance(value, functools.partial):
        parts += (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        with contextlib.suppress(ValueError):  # not assigned yet
            parts += (cell.cell_contents for cell in value.__closure__ or ())
    return any(_holds_new_tensors(part, state, seen) for part in parts)
