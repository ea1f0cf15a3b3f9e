"""Exactly what a step reads and writes of Python's objects while it runs once.

**Contract**
- Of each entry of a dict or list, cell, slot, class, function and container the first read is recorded, with what was
  there, unless the step itself has written it before; and the first write, with what was there before.
- No code of the user's is run for it, but for methods of keys of dicts that compare them.
- What was not seen is named: ``failure`` says why.
"""

from __future__ import annotations

import _weakrefset
import builtins
import copy
import functools
import gc
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import IOBase
from itertools import chain, repeat
from types import CellType, CodeType, FrameType, FunctionType, MappingProxyType, MethodType, WrapperDescriptorType
from typing import Any, Protocol

from torch import SymFloat, SymInt, Tensor, nn
from torch.autograd import Function

from millstream.capture.lines import is_part_of_project, is_pythons, is_users, is_users_own
from millstream.capture.record import fleeting
from millstream.capture.record.instructions import NULL, InstructionSession
from millstream.capture.record.location import (
    Attributes,
    ClassAttributes,
    ContextValue,
    Location,
    SharedEntries,
    SlotAttributes,
)
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
    CONTAINERS,
    IS_HEAP_TYPE,
    MISSING,
    SHOWING,
    WHOLE,
    Found,
    Kind,
    Read,
    Write,
    behind,
    content_of_cell,
    find_attribute,
    find_contents,
    find_in_class,
    find_item,
    find_length,
    is_a,
    own_dict,
)

_CALLABLE_FIRST = sys.version_info >= (3, 13)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), CodeType)


class Watch(Protocol):
    """What is told of a step while it runs; may raise an error, which the step gets there."""

    is_asked: bool  # whether ``happens`` is to be called

    def happens(self, operands: tuple[Any, ...]) -> None:
        """Something is about to be read, written or called, with these objects."""

    def begins(self, frame: FrameType) -> None:
        """Code is about to run: for the first time, or each time if the recorder is to tell it ``again``."""

    def calls(self, frame: FrameType, function: Any, arguments: tuple[Any, ...]) -> None:
        """A function is about to be called by code in ``frame``; of a method the object comes first."""

    def writes(self, write: Write) -> None:
        """Something that seems to have been there before is about to be written, for the first time."""

    def exposes(self, read: Read) -> None:
        """Something that seems to have been there before may be about to be written by what nobody sees, in C."""

    def meets(self, read: Read) -> None:
        """Something was found, or is about to be used, of a kind whose calls the watch wants to know before."""

    def asks(self, source: Any, read: Read | None) -> None:
        """The user's code is about to ask an iterator that was there before; and what has led to that."""

    def forwards(self, module: nn.Module) -> None:
        """A module is about to be called."""


class Recorder:
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
        self._wanted = wanted
        self._is_followed, self._starts_threads = is_followed, False
        self._session = InstructionSession()
        self._new: set[int] = set()  # by id, objects that the step has made, and that the collector knows
        self._before: set[int] = set()  # by id, others that were there before
        self._roots = [*roots]
        self.given: frozenset[int] = frozenset()
        self.watch: Watch | None = None
        self._refusal: Exception | None = None
        self._error: Exception | None = None  # of this code
        self._reads: dict[tuple[Any, ...], Read] = {}
        self._writes: dict[tuple[Any, ...], Write] = {}
        self._in_classes: dict[tuple[int, str], tuple[type, Any]] = {}  # what was looked up, by id and name
        self._touched: set[tuple[Any, ...]] = set()  # what is no longer as it was, as an item of it was written
        self._filled: dict[int, Any] = {}  # by id, containers that the step has written
        self._looked_into: set[int] = set()  # by id, containers of which something was read
        self._written_into: set[int] = set()  # likewise, of which some item was written
        # by id, those of objects, some of which are made only now, and behind views; whose
        self._dicts: dict[int, list[tuple[Any, Any]]] = {}
        self._plain: set[tuple[Any, ...]] = set()  # where something else was put than stand-ins for numbers
        self._origins: dict[int, Read] = {}  # by id, what led to an object first
        self._fleeting: dict[str, tuple[CodeType, int]] = {}  # where
        self._exposed: dict[int, Any] = {}  # by id, what something in C may have changed
        self._is_recording = False
        self._frame: FrameType
        self._argument: Any = None
        self._at: tuple[CodeType, int] = (self.__init__.__code__, 0)  # type: ignore[misc]

    @property
    def reads(self) -> list[Read]:
        """What was read of objects that were there before, in order; after the recording."""
        return [*self._reads.values()]

    @property
    def writes(self) -> list[Write]:
        """What was written, likewise."""
        return [*self._writes.values()]

    @property
    def codes(self) -> Iterable[CodeType]:
        """Code that has run."""
        return self._session.codes

    @property
    def fleeting(self) -> str:
        """What another process may find otherwise though it reads the same, and where; empty if there is nothing."""
        for reason, (code, unit) in self._fleeting.items():
            line = Read(None, Kind.TYPE, None, None, None, code, unit).line
            return f"{reason} ({code.co_filename}:{line}, in {code.co_qualname})"
        return ""

    @property
    def again(self) -> set[CodeType]:
        """Code whose every beginning the watch is told."""
        return self._session.again

    @property
    def failure(self) -> str:
        """Why not all was recorded; empty if it was."""
        error = self._error
        return self._session.failure or ("" if error is None else f"it failed ({type(error).__name__}: {error})")

    def restore(self, reads: Iterable[Read], writes: Iterable[Write], codes: Iterable[CodeType]) -> None:
        """Take what another process has read and written, of objects of this one, for what was recorded."""
        self._reads = {_place(each.holder, each.kind, each.key): each for each in reads}
        self._writes = {_place(each.holder, each.kind, each.key): each for each in writes}
        self._session.codes = [*codes]
        for read in self._reads.values():
            for each in read.value if read.kind is Kind.CONTENTS else (read.holder, read.value):
                self._origins.setdefault(id(each), read)

    # --- what is asked: where not all was seen, anything may have been read and written -------------------------------

    @property
    def _is_blind(self) -> bool:
        """Whether nobody knows what was not read and not written, as other threads of the step's did it."""
        return bool(self.failure) or self._starts_threads

    def has_read(self, place: Location) -> bool:
        """Whether what is there was read before the step wrote it itself, alone or with all that its holder has."""
        return self._is_blind or any(each in self._reads for each in _places_of(place))

    def has_gone_through(self, container: Any) -> bool:
        """Return whether the step has asked for all that a container holds, before it has written there itself."""
        return self._is_blind or _place(container, Kind.CONTENTS, None) in self._reads

    def has_looked_into(self, container: Any) -> bool:
        """Return whether anything was read of a container, be it what the step had put there."""
        return self._is_blind or id(container) in self._looked_into

    def has_written(self, place: Location) -> bool:
        """Return whether the step has put something there, or filled the holder.

        Of a whole container, anything in it.
        """
        is_whole = place.key is None and id(place.holder) in self._written_into
        return self._is_blind or is_whole or any(each in self._writes for each in _places_of(place))

    def has_put_plain(self, place: Location) -> bool:
        """Return whether the step has put something else there than numbers that stand for others."""
        return self._is_blind or any(each in self._plain for each in _places_of(place))

    def where_written(self, place: Location) -> str:
        """``file:line`` of the user's own that wrote there first; empty where there is none."""
        for each in _places_of(place):
            if (write := self._writes.get(each)) is not None and is_users_own(write.code.co_filename):
                return f"{write.code.co_filename}:{write.line}"
        return ""

    def containers(self) -> list[Any]:
        """Containers that were read, or of which something was, each once."""
        found = (each for read in self._reads.values() for each in (read.holder, *read.held()))
        return [*{id(each): each for each in found if is_a(each, CONTAINERS)}.values()]

    def origin_of(self, value: Any) -> Read | None:
        """Return what led the step to an object first; ``None`` for what it was given, or has from C."""
        return self._origins.get(id(value))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What this thread runs within the context is recorded; nothing is kept if it fails."""
        if self.failure:
            yield
            return
        is_whole, self._is_recording = False, True
        try:
            with (
                _ids_of_new() as (self._new, self._has_made),
                self._session.telling(self._see, self._follows, self._begins),
            ):
                yield
            is_whole = True
        finally:
            self._is_recording = False
            self._settle() if is_whole else self._forget()

    def paused(self) -> AbstractContextManager[None]:
        """Nothing is recorded: below an operator."""
        return self._session.paused()

    def _forget(self) -> None:
        for each in (self._reads, self._writes, self._origins, self._roots, self._dicts, self._in_classes):
            each.clear()
        self._filled.clear()
        self._exposed.clear()

    def _settle(self) -> None:
        """Let go of what the step has made, and of what only leads there: nobody else may hold it any more."""
        for each in self._roots:
            self._add_before(each)
        for held, owner in chain.from_iterable(self._dicts.values()):
            if self._is_before(owner):
                self._before.add(id(held))
        reads: dict[tuple[Any, ...], Read] = {}
        for place, read in self._reads.items():
            if self._was_before(read):
                self._before.add(id(read.holder))
                self._add_before(read.value)
                reads[place] = read
        self._reads, self._writes = reads, {at: each for at, each in self._writes.items() if self._was_before(each)}
        kept = {*map(id, reads.values())}
        self._origins = {at: read for at, read in self._origins.items() if id(read) in kept}
        for each in (self._roots, self._dicts, self._in_classes, self._touched, self._filled, self._new, self._before):
            each.clear()
        self._exposed.clear()

    def _follows(self, code: CodeType) -> bool:
        self._starts_threads |= code is threading.Thread.start.__code__
        is_of_weak = code.co_name in ("remove", "_remove") and code.co_filename in _WEAK
        return self._is_followed(code.co_filename) and not is_of_weak

    # --- what is kept -------------------------------------------------------------------------------------------------

    def _see(
        self, site: InstructionSite, code: CodeType, unit: int, frame: FrameType, operands: tuple[Any, ...]
    ) -> Exception | None:
        """Note what an instruction is about to read and write; what is returned is raised in its place."""
        if is_pythons(code.co_filename) and _is_for_us(frame):
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

    def _tell(self, what: Callable[..., None], *given: Any) -> None:
        """Tell the watch of something; what it raises is for the program."""
        try:
            what(*given)
        except Exception as error:  # noqa: BLE001  whatever it is
            self._refusal = self._refusal or error

    def _belongs(self, held: Any, owner: Any) -> None:
        self._dicts.setdefault(id(held), []).append((held, owner))

    def was_before(self, record: Read) -> bool:
        """Return whether what was read or written seems to have been there before; after the recording, it has."""
        return not self._is_recording or self.seems_before(_owner_of(record))

    def _was_before(self, record: Read) -> bool:
        return self._is_before(_owner_of(record))

    def _is_before(self, owner: Any) -> bool:
        if id(owner) in self._before:  # which the collector may not know, or only since, as dicts with plain values
            return True
        return gc.is_tracked(owner) and id(owner) not in self._new

    def _add_before(self, value: Any) -> None:
        """What was found in what was there before was there, too."""
        self._before.add(id(value))
        if is_a(value, tuple):
            for each in tuple.__iter__(value):
                if id(each) not in self._before:
                    self._add_before(each)
        elif is_a(value, FunctionType):
            parts = (value.__globals__, value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
            self._before.update(map(id, (*parts, *(value.__closure__ or ()))))

    def _note(self, reason: str) -> None:
        if reason:
            self._fleeting.setdefault(reason, self._at)

    def _meet(self, value: Any) -> None:
        """What the step has from somewhere may be in C."""
        if type(value) in fleeting.IN_C or is_a(value, type):
            self._note(fleeting.of_native(value, self._at[0]))

    def _read(self, found: Iterable[Found]) -> None:
        for holder, kind, key, value, owner in found:
            self._meet(value)
            if kind in _OF_CONTAINERS:
                self._looked_into.add(id(holder))
            place = _place(holder, kind, key)
            if place in self._reads or is_a(holder, _PLAIN):
                continue
            if not (place in self._writes or place in self._touched or id(holder) in self._filled):
                self._reads[place] = read = Read(holder, kind, key, value, owner, *self._at)
                held = value if kind is Kind.CONTENTS else (holder, value)
                for each in held:
                    self._add_origin(each, read)
                if kind is Kind.CONTENTS and is_a(holder, _CHANGED_IN_C):
                    self._expose(read)
                if self.watch is not None and any(map(issubclass, map(type, held), repeat(self._wanted))):
                    self._tell(self.watch.meets, read)

    def _add_origin(self, value: Any, read: Read) -> None:
        self._origins.setdefault(id(value), read)
        if is_a(value, tuple):
            for each in tuple.__iter__(value):
                if id(each) not in self._origins:
                    self._add_origin(each, read)

    def _expose(self, read: Read) -> None:
        if self.watch is not None and self.was_before(read):
            self._tell(self.watch.exposes, read)

    def _look_up(self, kind: type, name: str) -> tuple[list[Found], Any]:
        """``find_in_class``, of what was not looked up there before."""
        at = id(kind), name
        if at in self._in_classes:
            self._meet(self._in_classes[at][1])
            return [], self._in_classes[at][1]
        found, value = find_in_class(kind, name)
        self._in_classes[at] = kind, value
        return found, value

    def _write(self, found: Iterable[Found], new: Any = None) -> None:
        is_plain = not is_a(new, SymFloat | SymInt)
        for holder, kind, key, value, owner in found:
            if kind is Kind.CLASS:
                self._in_classes.clear()
            if kind in _OF_CONTAINERS:
                self._written_into.add(id(holder))
            if is_plain:
                self._plain.add(_place(holder, kind, key))
            place = _place(holder, kind, key)
            if place not in self._writes:
                self._writes[place] = write = Write(holder, kind, key, value, owner, *self._at)
                if self.watch is not None and self.was_before(write):
                    self._tell(self.watch.writes, write)
            if kind is Kind.CONTENTS:
                self._filled[id(holder)] = holder
            elif is_a(holder, dict | list) and own_dict(owner) is not holder:  # it has others, in another order
                self._touched.add(_place(holder, Kind.CONTENTS, None))

    # --- variables ----------------------------------------------------------------------------------------------------

    def _global_variable(self) -> None:
        self._read(_find_global(self._frame, self._argument))

    def _name(self) -> None:
        if self._argument not in self._frame.f_locals or self._frame.f_locals is self._frame.f_globals:
            self._read(_find_global(self._frame, self._argument))

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
        if not is_a(key, _PLAIN):
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

    def seems_before(self, value: Any) -> bool:
        """Return whether something was there before, as far as can be told already."""
        if not self._is_recording:
            return id(value) in self._origins
        if any(self.seems_before(owner) for _, owner in self._dicts.get(id(value), ()) if owner is not value):
            return True
        if gc.is_tracked(value) and not self.is_new(value):
            return True
        origin = self.origin_of(value)  # a dict with plain values is not known to the collector, or only since a write
        return origin is not None and origin.holder is not value and self.seems_before(_owner_of(origin))

    def is_new(self, value: Any) -> bool:
        """Return whether the step has made something, so far, that Python's collector knows."""
        return self._has_made(id(value))

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


@contextmanager
def _ids_of_new() -> Iterator[tuple[set[int], Callable[[int], bool]]]:
    """The ids of what the collector comes to know within the context, whole at its end, and what knows one meanwhile.

    New objects are in its youngest generation until it is at work: so that is all that is looked at, before each time
    and at the end, and not everything that there is. What has died meanwhile may be among them.
    """
    young = gc.get_objects(generation=0)  # held for as long as it takes, or new ones could have their ids
    known = {*map(id, young)}
    new: set[int] = set()

    def look() -> Iterator[int]:
        return map(id, gc.get_objects(generation=0))

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            new.update(look())

    gc.callbacks.append(note)
    try:
        # The collector may be at work at any moment, also in another thread: what it moves meanwhile it has noted.
        yield new, lambda each: each not in known and (each in new or each in look() or each in new)
    finally:
        new.update(look())
        gc.callbacks.remove(note)
        new -= known
        del young


def _place(holder: Any, kind: Kind, key: Any) -> tuple[Any, ...]:
    of_key = type(key)
    return (id(holder), kind, of_key, key) if issubclass(of_key, _PLAIN_KEYS) else (id(holder), kind, None, id(key))


def _places_of(place: Location) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return how a place is known here, by itself and with all that its holder has."""
    holder, key, kind = place.entry.holder, place.entry.key, Kind.ITEM
    if is_a(holder, CellType):
        kind = Kind.CELL
    elif is_a(holder, SharedEntries):
        holder = holder.owners[0]
    elif is_a(holder, Attributes):
        kind = next((each for form, each in _KINDS.items() if is_a(holder, form)), kind)
        holder = holder._owner
    return _place(holder, kind, key), _place(holder, Kind.CONTENTS, None)


_TAKING = ("get", "get_nowait")
_QUEUES = (queue.Queue, queue.SimpleQueue)
"""Methods and classes of what gives each item once, too."""
_WEAK = (weakref.__file__, _weakrefset.__file__)
"""Files with functions by which an object's end is noticed."""

_CHANGED_IN_C = (*WHOLE, functools._lru_cache_wrapper)
"""Classes whose objects functions change that are not known to."""

_KINDS = {ClassAttributes: Kind.CLASS, SlotAttributes: Kind.SLOT, ContextValue: Kind.CONTEXT}
"""What is read of the holders that locations know in another form."""

_OF_CONTAINERS = (Kind.ITEM, Kind.LENGTH, Kind.CONTENTS)
_PLAIN_KEYS = (str, int, float, bytes)


def _owner_of(record: Read) -> Any:
    return record.holder if is_a(record.owner, str) else record.owner


def _is_for_us(frame: FrameType | None) -> bool:
    """Return whether code of Python's library runs since code of ours has called it."""
    while frame is not None and is_pythons(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_part_of_project(frame.f_code.co_filename)


def _find_global(frame: FrameType, name: str) -> Iterator[Found]:
    space = frame.f_globals
    value = space.get(name, MISSING)
    yield space, Kind.ITEM, name, value, space
    if value is MISSING and (held := vars(builtins)) is frame.f_builtins:
        yield held, Kind.ITEM, name, held.get(name, MISSING), builtins


def _items(mapping: dict[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    return tuple((mapping or {}).items())


def _is_users_method(holder: Any, name: str) -> bool:
    return is_a(find_in_class(type(holder), name)[1], FunctionType)
