"""What calls read and write: of the function, of the arguments, and within functions in C."""

from __future__ import annotations

import functools
import queue
import sys
from collections.abc import Iterable, Iterator
from io import IOBase
from types import FunctionType, MappingProxyType, MethodType, WrapperDescriptorType
from typing import Any

from torch import Tensor
from torch.autograd import Function

from millstream.capture.record import fleeting
from millstream.capture.record.interpreter.instructions import NULL
from millstream.capture.record.interpreter.natives import (
    GETTERS,
    NATIVE,
    SPECIAL,
    asks_iterators,
    find_exposed,
    find_got,
    find_of_callable,
    find_reads,
    find_writes,
    owner_of,
    special_of,
)
from millstream.capture.record.reads import (
    IS_HEAP_TYPE,
    Found,
    Kind,
    Read,
    find_contents,
    is_a,
)
from millstream.capture.record.recorded_accesses import RecordedAccesses

_CALLABLE_FIRST = sys.version_info >= (3, 13)

_TAKING = ("get", "get_nowait")
_QUEUES = (queue.Queue, queue.SimpleQueue)
"""Methods and classes of what gives each item once, too."""


class RecordedCalls(RecordedAccesses):
    """Records what each kind of call accesses, likewise."""

    def _call(self, first: Any, second: Any, *arguments: Any) -> None:
        if _CALLABLE_FIRST:
            self._called(first, arguments if second is NULL else (second, *arguments))
        elif first is NULL:
            self._called(second, arguments)
        else:
            self._called(first, (second, *arguments))

    def _call_with_names(self, *operands: Any) -> None:
        self._call(*operands[:-1])

    def _call_spread(self, first: Any, second: Any, given: Any, named: Any = None) -> None:
        function = first if _CALLABLE_FIRST else second
        self._ask(given)
        self._note(fleeting.of_order(given))
        self._read(find_contents(given))
        self._read(find_contents(named))
        plain = tuple(given) if type(given) in (tuple, list) else ()
        self._called(function, (*plain, *(named.values() if type(named) is dict else ())))

    def _called(self, function: Any, arguments: tuple[Any, ...]) -> None:
        while is_a(function, MethodType):
            function, arguments = function.__func__, (function.__self__, *arguments)
        if is_a(function, type):
            self._made(function, arguments)
            return
        if self.watch is not None:
            self._tell(self.watch.calls, self._frame, function, arguments)
        if getattr(function, "__name__", "") in _TAKING:
            for owner in (owner_of(function), *arguments[:1]):
                self._ask(owner, _QUEUES)
        if is_a(function, FunctionType):
            value = function.__code__, function.__defaults__, _items(function.__kwdefaults__)
            self._read([(function, Kind.CODE, None, value, function)])
            if is_a(registry := vars(function).get("registry"), MappingProxyType):  # of ``functools.singledispatch``
                self._read((*found[:4], function) for found in find_contents(registry))
        elif is_a(function, NATIVE):
            self._called_native(function, arguments)
        elif is_a(function, GETTERS):
            self._read(find_got(function, arguments))
        else:
            self._read(find_of_callable(function))
            self._special(function, "__call__")
            if is_a(self._look_up(type(function), "__call__")[1], WrapperDescriptorType):  # an object in C
                self._read(self._without_tensors(find_reads(function, arguments)))
                self._note_exposed(function, arguments)
            if is_a(function, functools.partial):
                self._called(function.func, (*function.args, *arguments, *function.keywords.values()))

    def _called_native(self, function: Any, arguments: tuple[Any, ...]) -> None:
        for argument in arguments[:1]:
            self._special(argument, *special_of(function))
        for argument in arguments if asks_iterators(function) else ():
            if not is_a(argument, IOBase):  # which is no more than a name for most
                self._ask(argument)
        for each in (function, *arguments):
            self._meet(each)
        if (owner := owner_of(function)) is not None:
            arguments = (owner, *arguments)
            self._belongs(owner, function)
        self._note(fleeting.of_call(function, arguments))
        if is_a(owner, type) and issubclass(owner, Function):  # whose methods C calls
            for name in ("forward", "setup_context", "backward", "_backward_cls"):
                self._read(self._look_up(owner, name)[0])
        self._read(self._without_tensors(find_reads(function, arguments)))
        self._note_exposed(function, arguments)
        if arguments and id(arguments[0]) not in self._filled:
            self._write(find_writes(function, arguments), arguments[-1])

    def _note_exposed(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """What is given to a function in C that is not known may be changed there."""
        for holder, kind, key, value, owner in find_exposed(function, arguments):
            if id(holder) not in self._exposed:
                self._exposed[id(holder)] = holder
                self._expose(Read(holder, kind, key, value, owner, *self._at))

    def _made(self, kind: type, arguments: tuple[Any, ...]) -> None:
        """A class is called."""
        if not fleeting.is_written_in_python(kind):
            for each in (kind, *arguments):
                self._meet(each)
            self._note(fleeting.of_call(kind, arguments))
        for argument in arguments if not kind.__flags__ & IS_HEAP_TYPE else ():
            self._ask(argument)
        for argument in arguments[:1]:
            self._special(argument, *SPECIAL.get(kind, ()))
        if kind.__flags__ & IS_HEAP_TYPE:
            for name in ("__new__", "__init__"):
                self._read(self._look_up(kind, name)[0])
            self._special(kind, "__call__")
        if not kind.__flags__ & IS_HEAP_TYPE or kind.__module__ in ("functools", "operator", "collections"):
            self._read(self._without_tensors(find_reads(kind, arguments)))

    def _without_tensors(self, found: Iterable[Found]) -> Iterator[Found]:
        for each in found:
            if not is_a(each[0], Tensor):
                yield each


def _items(mapping: dict[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    return tuple((mapping or {}).items())
