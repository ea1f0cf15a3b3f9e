"""A condition that no longer holds, and functions that wrappers hide, those of ours among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor

from millstream.capture.lines import is_millstreams
from millstream.capture.record.location import MISSING, Location
from millstream.capture.state.signature import is_same


@dataclass(frozen=True, slots=True)
class Break:
    """A condition that no longer holds."""

    reason: str  # in a sentence
    location: Location | None = None  # what changed, if that is an entry
    is_final: bool = False  # whether it will not hold again: state was replaced
    before: Any = MISSING  # what the entry held
    now: Any = MISSING  # and holds

    @property
    def is_tensor(self) -> bool:
        """Whether the entry held a tensor."""
        return isinstance(self.before, Tensor)


def original_of(value: Any) -> Any:
    """Return what stands in a place where Millstream may have put a wrapper for a while.

    ``MISSING`` if that was nothing.
    """
    while isinstance(function := getattr(value, "__func__", value), FunctionType):
        if not is_millstreams(function.__code__.co_filename):
            break
        value = vars(function).get("__wrapped__", MISSING)
    return value


def is_same_original(now: Any, value: Any) -> bool:
    """Return whether a place holds the same, or a wrapper of ours around that."""
    return is_same(original_of(now), value) or (value is MISSING and original_of(now) is not now)


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The Python functions that are called where this is, wrapped ones too."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    while isinstance(value, FunctionType):
        yield value
        value = vars(value).get("__wrapped__")
