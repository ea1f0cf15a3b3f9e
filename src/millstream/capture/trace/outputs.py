"""What a step returns: which of it a graph gives anew in each call, and what could not be put together again."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Container as Container_
from collections.abc import Iterator, Mapping, ValuesView
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.optim import Optimizer

from millstream._torch.tensors import FakeTensor
from millstream.capture.state.signature import LEAF, Container, Reference, Structure, walk
from millstream.capture.step.request import Output
from millstream.capture.trace.scalars import GraphScalar
from millstream.errors import CaptureError

MOST_SEARCHED = 10_000
"""Objects of a result that are looked into: of many more it can only be said that they are the user's own."""


def find_outputs(structure: Structure, tensors: Iterator[Output]) -> Iterator[Output]:
    """What is to be had of a result, in order: tensors, and numbers that depend on the optimizer's."""
    for _, part in walk(structure, ""):
        if part is LEAF:
            yield next(tensors)
        elif _is_graph_scalar(part):
            yield Output("number", value=part.target.of)


def _is_graph_scalar(part: Structure) -> TypeGuard[Reference]:
    return isinstance(part, Reference) and isinstance(part.target, GraphScalar)


def make_numbers_leaves(structure: Structure) -> Structure:
    """Let the places of graph scalars be filled in each call."""
    if _is_graph_scalar(structure):
        return LEAF
    if isinstance(structure, Container):
        return replace(structure, children=tuple(map(make_numbers_leaves, structure.children)))
    return structure


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
    """Whether tensors made while tracing can be reached from a value without a call."""
    if isinstance(value, FakeTensor):
        return id(value) not in state
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
