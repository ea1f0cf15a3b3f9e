"""Objects in a file: ours by what they are, the user's by their numbers in a table."""

from __future__ import annotations

import functools
import io
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from millstream.capture.effects.expressions import Always
from millstream.capture.effects.host_effects import Output
from millstream.capture.kept.descriptions import TraceNotKept
from millstream.capture.kept.graph_data import Fakes
from millstream.capture.kept.ways import Reader, WayWriter
from millstream.capture.lines import is_users
from millstream.capture.record.location import Attributes, Location
from millstream.capture.record.reads import is_a
from millstream.capture.trace.numbers.questions import Input, Questions
from millstream.tree.containers import slots_of
from millstream.tree.spec import Reference

_MODULES = frozenset("operator _operator math builtins functools time torch collections logging".split())
"""Modules, beside ours, whose functions and classes a file may name."""
_BUILTINS = frozenset(
    """
    getattr int float bool str complex bytes abs min max round divmod pow len sum repr format tuple list dict set
    frozenset slice range type
    """.split()
)


class PlainPickler(pickle.Pickler):
    """Writes what has no objects of the user's in it."""

    def reducer_override(self, value: Any) -> Any:
        """Pickle has PyTorch's constants by the module where it happens to find one."""
        if type(value) in (torch.dtype, torch.layout, torch.memory_format):
            return _constant, (str(value).removeprefix("torch."),)
        return NotImplemented


def _constant(name: str) -> Any:
    return getattr(torch, name)


class Pickler(PlainPickler):
    """Writes objects of ours by what they are, and the user's by their numbers."""

    def __init__(self, file: io.BytesIO, writer: WayWriter) -> None:
        super().__init__(file, protocol=5)
        self._writer = writer
        self._lists: set[int] = set()  # by id, those of ours

    def persistent_id(self, value: Any) -> Any:
        """The number of an object of the user's."""
        if type(value) in _OWN:
            return None
        if id(value) in self._lists:
            return None
        if not self._writer.knows(value):
            if is_a(value, list | dict | set | deque):
                raise TraceNotKept(f"no way leads to a {type(value).__qualname__}")
            return None
        if is_a(value, type) and not is_users_class(value):
            return None
        if is_a(value, FunctionType) and not is_users(value.__code__.co_filename):
            return None
        return self._writer.number_of(value)

    def reducer_override(self, value: Any) -> Any:
        """Return how what has no number is made again."""
        kind = type(value)
        if is_a(value, Attributes):
            return kind.of, (value._owner,)
        if kind is Location:
            held = value.holder
            if not is_a(held, Attributes) and not self._writer.knows(held):
                raise TraceNotKept(f"no way leads to where {value} is")
            return Location, (held, value.key, value.name)
        if kind is functools.partial:
            return _partial, (value.func, value.args, tuple(value.keywords.items()))
        if kind is Questions:
            inputs = tuple((each.of, each.tensor.dtype, each.tensor.device) for each in value.inputs)
            return _questions, (tuple(value.steps), value.num_before, inputs, value.num_converted)
        if kind in (MethodType, BuiltinFunctionType) and not is_a(value.__self__, ModuleType | type(None)):
            return getattr, (value.__self__, value.__name__)
        if kind.__module__.startswith("millstream.") and not is_a(value, tuple | type | FunctionType):
            attributes = tuple(_attributes_of(value))
            if kind not in _HOLDING:
                self._lists.update(id(each) for _, each in attributes if type(each) in (list, dict, set))
            return _make, (kind, attributes)
        if is_a(value, Tensor | nn.Module):
            raise TraceNotKept(f"no way leads to a {kind.__qualname__}")
        if kind.__module__.partition(".")[0] not in _OF_OURS and not is_a(value, FunctionType | type):
            raise TraceNotKept(f"no way leads to a {kind.__module__}.{kind.__qualname__}")
        return super().reducer_override(value)


_HOLDING = (Always, Output, Reference, Location)
"""Classes of ours with objects of the user's in them; lists in others are theirs alone."""
_OWN = (bool, int, float, complex, str, bytes, type(None), tuple, BuiltinFunctionType)
_OF_OURS = ("millstream", "builtins", "torch", "functools", "operator")


def is_users_class(kind: type) -> bool:
    """Return whether a class is none of ours, nor of those that any process has."""
    return kind.__module__.partition(".")[0] not in _OF_OURS


_MADE_LATER = ("_run",)
"""Attributes of expressions that are made when they are first asked."""


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    names = (name for name in slots_of(type(value)) if hasattr(value, name))
    yield from ((name, None if name in _MADE_LATER else getattr(value, name)) for name in names)


def _make(kind: type, attributes: Iterable[tuple[str, Any]]) -> Any:
    """An object of ours that has these attributes."""
    made = object.__new__(kind)
    for name, value in attributes:
        object.__setattr__(made, name, value)
    return made


def _partial(function: Any, args: tuple[Any, ...], named: Iterable[tuple[str, Any]]) -> functools.partial[Any]:
    return functools.partial(function, *args, **dict(named))


def _questions(steps: Sequence[Any], num_before: int, inputs: Sequence[Any], num_converted: int) -> Questions:
    fakes = Fakes()
    made = Questions(_no_input, steps=[*steps], num_before=num_before, num_converted=num_converted, thread=None)
    made.inputs = [
        Input(of, fakes.make((number, dtype.itemsize), dtype, device))
        for number, (of, dtype, device) in enumerate(inputs)
    ]
    return made


def _no_input(*_: Any) -> Tensor:
    raise AssertionError("the trace has ended")


class Unpickler(pickle.Unpickler):
    """Reads such a file; of functions and classes by name it takes those that may be there."""

    def __init__(self, file: io.BytesIO, reader: Reader | None = None) -> None:
        super().__init__(file)
        self._reader = reader

    def persistent_load(self, number: Any) -> Any:
        """The object of this process that has a number."""
        assert self._reader is not None
        return self._reader.objects[number]

    def find_class(self, module: str, name: str) -> Any:
        """A function or class by its name.

        Raises:
            NotKept: None that is of any use here.
        """
        is_known = module in _MODULES or module.startswith("millstream.")
        if not is_known or (module == "builtins" and name not in _BUILTINS):
            raise TraceNotKept(f"it names {module}.{name}")
        return super().find_class(module, name)
