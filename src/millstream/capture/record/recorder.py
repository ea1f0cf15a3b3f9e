"""Exactly what a step reads and writes of Python's objects while it runs once.

**Contract**
- Of each entry of a dict or list, cell, slot, class, function and container the first read is recorded, with what was
  there, unless the step itself has written it before; and the first write, with what was there before.
- No code of the user's is run for it, but for methods of keys of dicts that hash and compare them.
- What was not seen is named: ``failure`` says why.
"""

from __future__ import annotations

import _weakrefset
import copy
import functools
import gc
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import IOBase
from types import CellType, CodeType, FrameType, FunctionType, MappingProxyType, MethodType, WrapperDescriptorType
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from millstream.capture.lines import is_pythons, is_users, runs_for_us
from millstream.capture.record import fleeting
from millstream.capture.record.instructions import NULL, InstructionSession
from millstream.capture.record.natives import (
    DEPTH,
    GETTERS,
    NATIVE,
    SPECIAL,
    asks_iterators,
    find_exposed,
    find_got,
    find_of_callable,
    find_reads,
    find_stored,
    find_writes,
    owner_of,
    special_of,
)
from millstream.capture.record.opcodes import InstructionSite
from millstream.capture.record.reads import (
    IS_HEAP_TYPE,
    MISSING,
    SHOWING,
    Found,
    Kind,
    Read,
    Write,
    behind,
    content_of_cell,
    find_attribute,
    find_contents,
    find_global,
    find_in_class,
    find_item,
    find_length,
    is_a,
    own_dict,
)
from millstream.capture.record.record_store import PLAIN, Records, ids_of_new

_CALLABLE_FIRST = sys.version_info >= (3, 13)


class Recorder(Records):
    """Keeps what is read and written in the tracing thread, above PyTorch's operators.

    Args:
        is_followed: Whether code in a file counts.
        roots: The function that will run, and its arguments: there before.
        wanted: Classes of objects that the watch is told it ``meets``.

    Attributes:
        watch: Told of code that runs and of what it does; may be set later.
        given: By id, the containers and objects that the arguments consist of.
    """

    def __init__(
        self, is_followed: Callable[[str], bool], roots: Iterable[Any] = (), wanted: tuple[type, ...] = ()
    ) -> None:
        super().__init__(roots, wanted)
        self._is_followed = is_followed
        self._session = InstructionSession()
        self._of_collector: set[CodeType | None] = set()  # code that the garbage collector calls
        self._frame: FrameType
        self._argument: Any = None

    @property
    def codes(self) -> Iterable[CodeType]:
        """Code that has run."""
        return self._session.codes

    @property
    def again(self) -> set[CodeType]:
        """Code whose every beginning the watch is told."""
        return self._session.again

    @property
    def failure(self) -> str:
        """Why not all was recorded; empty if it was."""
        return self._session.failure or super().failure

    def restore(self, reads: Iterable[Read], writes: Iterable[Write], codes: Iterable[CodeType]) -> None:
        """Take what another process has read and written, of objects of this one, for what was recorded."""
        self.take(reads, writes)
        self._session.codes = [*codes]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What this thread runs within the context is recorded; nothing is kept if it fails."""
        if self.failure:
            yield
            return
        is_whole, self._is_recording = False, True
        self._of_collector = {getattr(each, "__code__", None) for each in gc.callbacks}
        try:
            with (
                ids_of_new() as (self._new, self._has_made),
                self._session.telling(self._see, self._follows, self._begins),
            ):
                yield
            is_whole = True
        finally:
            self._is_recording = False
            self._settle() if is_whole else self._forget()

    def _follows(self, code: CodeType) -> bool:
        self._starts_threads |= code is threading.Thread.start.__code__
        is_of_weak = code.co_name in ("remove", "_remove") and code.co_filename in _WEAK
        return self._is_followed(code.co_filename) and not is_of_weak and code not in self._of_collector

    # --- what is kept -------------------------------------------------------------------------------------------------

    def _see(
        self, site: InstructionSite, code: CodeType, unit: int, frame: FrameType, operands: tuple[Any, ...]
    ) -> Exception | None:
        """Note what an instruction is about to read and write; what is returned is raised in its place."""
        if is_pythons(code.co_filename) and runs_for_us(frame):
            return None
        self._at, self._frame, self._argument, self._refusal = (code, unit), frame, site.argument, None
        for each in operands:
            if type(each) in SHOWING:
                self._belongs(behind(each), each)
        try:
            if self.watch is not None and self.watch.is_asked:
                self._tell(self.watch.happens, operands)
            getattr(self, f"_{site.action}")(*operands)
        except Exception as error:  # noqa: BLE001  of ours: what goes on unseen could not be undone
            self._error = self._refusal = error
        finally:
            self._frame = None  # type: ignore[assignment]  which would keep what is in it
        return self._refusal

    def _begins(self, frame: FrameType) -> Exception | None:
        self._refusal = None
        if self.watch is not None:
            self._tell(self.watch.begins, frame)
        return self._refusal

    # --- variables ----------------------------------------------------------------------------------------------------

    def _global_variable(self) -> None:
        self._read(find_global(self._frame, self._argument))

    def _name(self) -> None:
        if self._argument not in self._frame.f_locals or self._frame.f_locals is self._frame.f_globals:
            self._read(find_global(self._frame, self._argument))

    def _cell(self, cell: CellType) -> None:
        self._read([(cell, Kind.CELL, None, content_of_cell(cell), self._argument)])

    def _store_global(self, new: Any = None) -> None:
        space = self._frame.f_globals
        self._write([(space, Kind.ITEM, self._argument, space.get(self._argument, MISSING), space)], new)

    def _store_name(self, new: Any = None) -> None:
        if self._frame.f_locals is self._frame.f_globals:
            self._store_global(new)

    def _store_cell(self, *operands: Any) -> None:
        new, cell = operands[0], operands[-1]
        self._write([(cell, Kind.CELL, None, content_of_cell(cell), self._argument)], new)

    def _import_(self, *_: Any) -> None:
        self._read([(sys.modules, Kind.ITEM, self._argument, sys.modules.get(self._argument, MISSING), sys)])

    # --- attributes and items -----------------------------------------------------------------------------------------

    def _attribute(self, holder: Any) -> None:
        if self._argument == "forward" and self.watch is not None and is_a(holder, nn.Module):
            self._tell(self.watch.forwards, holder)
        self._read(self._find(holder, self._argument))

    def _find(self, holder: Any, name: str) -> Iterable[Found]:
        if name == "__dict__" and (held := own_dict(holder)) is not None:
            self._belongs(held, holder)
        if is_a(holder, Tensor):
            held = own_dict(holder) or {}
            found, of_class = self._look_up(Tensor, name)
            is_own = [] if of_class is not MISSING else [(held, Kind.ITEM, name, held.get(name, MISSING), holder)]
            return [(holder, Kind.TENSOR, name, None, holder), *found, *is_own]
        return find_attribute(holder, name, self._look_up)

    def _super_attribute(self, _function: Any, _kind: Any, holder: Any) -> None:
        self._read(self._look_up(holder if is_a(holder, type) else type(holder), self._argument)[0])

    def _item(self, holder: Any, key: Any) -> None:
        self._key(key)
        found = [*(find_contents(holder) if is_a(key, slice) else find_item(holder, key))]
        self._read(found)
        if is_a(holder, dict) and hasattr(type(holder), "__missing__"):  # which may put something there
            self._write(each for each in found if each[3] is MISSING)

    def _key(self, key: Any) -> None:
        """What a key holds is read, too, such as a list by which a tensor is indexed."""
        if not is_a(key, PLAIN):
            self._read(find_contents(key, DEPTH))

    def _slice(self, holder: Any, *_: Any) -> None:
        self._read(find_contents(holder))

    def _contains(self, key: Any, holder: Any) -> None:
        self._note(fleeting.of_nan(key))
        self._key(key)
        self._read(find_item(holder, key) if is_a(holder, dict) else find_contents(holder))
        self._special(holder, "__contains__", "__iter__")
        self._ask(holder)

    def _match_keys(self, holder: Any, keys: Any) -> None:
        for key in keys:
            self._read(find_item(holder, key))

    def _match_class(self, holder: Any, kind: Any, names: Any) -> None:
        self._read([(holder, Kind.TYPE, None, type(holder), holder)])
        if is_a(kind, type):
            found, positions = self._look_up(kind, "__match_args__")
            self._read(found)
            for name in (*(positions if is_a(positions, tuple) else ()), *names):
                self._read(self._find(holder, name))

    def _store_attribute(self, *operands: Any) -> None:
        new, owner = operands[0], operands[-1]
        self._special(owner, "__setattr__")
        setter = self._look_up(type(owner), "__setattr__")[1]
        if is_a(setter, WrapperDescriptorType) and not is_a(owner, Tensor):  # and no method of the user's
            self._write(find_stored(owner, self._argument), new)
        elif is_a(owner, Tensor) and find_in_class(type(owner), self._argument)[1] is MISSING:
            held = own_dict(owner) or {}
            self._write([(held, Kind.ITEM, self._argument, held.get(self._argument, MISSING), owner)], new)

    def _delete_attribute(self, owner: Any) -> None:
        self._store_attribute(owner)

    def _store_item(self, new: Any, holder: Any, key: Any) -> None:
        self._key(key)
        self._special(holder, "__setitem__", "__delitem__")
        if is_a(holder, Tensor) or _is_users_method(holder, "__setitem__"):
            return
        self._write(find_contents(holder) if is_a(key, slice) else find_item(holder, key), new)

    def _delete_item(self, holder: Any, key: Any) -> None:
        self._store_item(None, holder, key)

    def _store_slice(self, _value: Any, holder: Any, *_: Any) -> None:
        self._write(find_contents(holder))

    # --- whole contents -----------------------------------------------------------------------------------------------

    def _length(self, holder: Any) -> None:
        self._read(find_length(holder))

    def _truth(self, value: Any) -> None:
        if not is_a(value, Tensor):
            self._special(value, "__bool__", "__len__")
            self._read(find_length(value))

    def _contents(self, value: Any) -> None:
        self._note(fleeting.of_order(value))
        self._set_contents(value)

    def _set_contents(self, value: Any) -> None:
        """The same where the order is of no matter."""
        self._special(value, "__iter__", "keys")
        self._read(find_contents(value))
        self._ask(value)

    def _advance(self, iterator: Any, *_: Any) -> None:
        self._special(iterator, "__next__")
        self._ask(iterator)

    def _ask(self, source: Any, kinds: Any = Iterator) -> None:
        """Something may be an iterator, which gives each item once."""
        if self.watch is None or not issubclass(type(source), kinds) or not is_users(self._at[0].co_filename):
            return
        origin = self.origin_of(source)
        if self.seems_before(source):
            self._tell(self.watch.asks, source, origin)

    def _kind(self, value: Any) -> None:
        self._read([(value, Kind.TYPE, None, type(value), value)])

    def _enter(self, manager: Any) -> None:
        self._special(manager, "__enter__", "__exit__")

    def _text(self, value: Any, *_: Any) -> None:
        self._note(fleeting.of_text(value))
        self._special(value, "__format__", "__str__", "__repr__")
        self._read(find_contents(value, DEPTH))

    def _identity(self, one: Any, other: Any) -> None:
        if self._at[0].co_filename != copy.__file__:  # which asks whether a copy is another object
            self._note(fleeting.of_identity(one, other))

    def _operator(self, *operands: Any) -> None:
        name = self._argument if is_a(self._argument, str) else ""
        if name == "mod" and is_a(operands[0], str | bytes):
            self._note(fleeting.of_text(operands[1]))
        if name in ("eq", "ne") and is_a(operands[0], list | tuple | dict):
            self._note(fleeting.of_nan(operands[0]))
        for operand in operands:
            self._special(operand, *(f"__{prefix}{name}__" for prefix in ("", "r", "i") if name))
            if not is_a(operand, Tensor):
                self._read(find_contents(operand, DEPTH))

    def _operator_in_place(self, target: Any, operand: Any) -> None:
        self._operator(target, operand)
        if is_a(target, list | deque):
            self._note(fleeting.of_order(operand))
        if not is_a(target, Tensor | tuple):
            self._write(find_contents(target))

    def _intrinsic(self, value: Any) -> None:
        if self._argument in (1, 2, 5):  # prints, imports all, a plus sign
            self._text(value)

    def _special(self, holder: Any, *names: str) -> None:
        """Methods that syntax calls are looked up in the class."""
        kind = type(holder)
        if issubclass(kind, Tensor):  # what a traced one has is a tensor's
            for name in names:
                self._read(self._look_up(Tensor, name)[0])
        elif kind.__flags__ & IS_HEAP_TYPE:
            self._read([(holder, Kind.TYPE, None, kind, holder)])
            for name in names:
                self._read(self._look_up(kind, name)[0])

    # --- calls --------------------------------------------------------------------------------------------------------

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


_TAKING = ("get", "get_nowait")
_QUEUES = (queue.Queue, queue.SimpleQueue)
"""Methods and classes of what gives each item once, too."""
_WEAK = (weakref.__file__, _weakrefset.__file__)
"""Files with functions by which an object's end is noticed."""


def _items(mapping: dict[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    return tuple((mapping or {}).items())


def _is_users_method(holder: Any, name: str) -> bool:
    return is_a(find_in_class(type(holder), name)[1], FunctionType)
