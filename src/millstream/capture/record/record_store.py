"""What was read and written while a step ran, by where it was: which of it was there before, and what led to what."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, Protocol

from torch import SymFloat, SymInt, nn

from millstream.capture.lines import is_users_own
from millstream.capture.record import fleeting
from millstream.capture.record.answers import content_of_cache
from millstream.capture.record.interpreter.collector import young_noted
from millstream.capture.record.location import (
    Attributes,
    ClassAttributes,
    ContextValue,
    Location,
    SharedEntries,
    SlotAttributes,
)
from millstream.capture.record.reads import (
    CONTAINERS,
    WHOLE,
    Found,
    Kind,
    Read,
    Write,
    find_in_class,
    is_a,
    own_dict,
)

MOST_ANSWERS = 256
"""Of one cache: another process compares each with each."""
PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), CodeType)


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

    def compares(self, kind: type, others: Iterable[Any]) -> None:
        """The user's code is about to ask whether a class is another, or one of others."""

    def reaches_leaf(self) -> None:
        """A node of autograd's graph is about to be asked for the tensor at its end."""

    def forwards(self, module: nn.Module) -> None:
        """A module is about to be called."""


class Records:
    """What a recorder keeps, and what is asked of it.

    Args:
        roots: There before.
        wanted: Classes of objects that the watch is told it ``meets``.

    Attributes:
        watch: Told of code that runs and of what it does; may be set later.
        given: By id, the containers and objects that the arguments consist of.
    """

    def __init__(self, roots: Iterable[Any], wanted: tuple[type, ...]) -> None:
        self._wanted = wanted
        self._starts_threads = False
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
        self._has_made: Callable[[int], bool]  # while there is a recording
        self._at: tuple[CodeType, int] = (Records.__init__.__code__, 0)

    @property
    def reads(self) -> list[Read]:
        """What was read of objects that were there before, in order; after the recording."""
        return [*self._reads.values()]

    @property
    def writes(self) -> list[Write]:
        """What was written, likewise."""
        return [*self._writes.values()]

    @property
    def fleeting(self) -> str:
        """What another process may find otherwise though it reads the same, and where; empty if there is nothing."""
        for reason, (code, unit) in self._fleeting.items():
            line = Read(None, Kind.TYPE, None, None, None, code, unit).line
            return f"{reason} ({code.co_filename}:{line}, in {code.co_qualname})"
        return ""

    @property
    def failure(self) -> str:
        """Why not all was recorded; empty if it was."""
        error = self._error
        return "" if error is None else f"it failed ({type(error).__name__}: {error})"

    def take(self, reads: Iterable[Read], writes: Iterable[Write]) -> None:
        """Take these for what was recorded."""
        self._reads = {_place(each.holder, each.kind, each.key): each for each in reads}
        self._writes = {_place(each.holder, each.kind, each.key): each for each in writes}
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

    def look_into(self, containers: Iterable[int]) -> None:
        """Take these, by id, to have been looked into, as where a step returns them."""
        self._looked_into.update(containers)

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

    # --- what is kept -------------------------------------------------------------------------------------------------

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
            if place in self._reads or is_a(holder, PLAIN):
                continue
            if not (place in self._writes or place in self._touched or id(holder) in self._filled):
                if is_a(holder, functools._lru_cache_wrapper) and kind is Kind.CONTENTS:
                    value = self._content_of_cache(holder)
                self._reads[place] = read = Read(holder, kind, key, value, owner, *self._at)
                held = value if kind is Kind.CONTENTS else (holder, value)
                for each in held:
                    self._add_origin(each, read)
                if kind is Kind.CONTENTS and is_a(holder, _CHANGED_IN_C):
                    self._expose(read)
                if self.watch is not None and any(map(issubclass, map(type, held), repeat(self._wanted))):
                    self._tell(self.watch.meets, read)

    def _content_of_cache(self, cache: Any) -> tuple[Any, ...]:
        """The same, unless that is much, or the step has made an answer, of which no read is kept."""
        content = content_of_cache(cache)
        answers = [answer for _, answer in content[1:] if gc.is_tracked(answer)]
        return () if len(content) > MOST_ANSWERS or any(map(self.is_new, answers)) else content

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

    # --- what was there before ----------------------------------------------------------------------------------------

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


@contextmanager
def ids_of_new() -> Iterator[tuple[set[int], Callable[[int], bool]]]:
    """The ids of what the collector comes to know within the context, whole at its end, and what knows one meanwhile.

    New objects are in its youngest generation until it is at work: so that is all that is looked at, before each time
    and at the end, and not everything that there is. What has died meanwhile may be among them.
    """
    young = gc.get_objects(generation=0)  # held for as long as it takes, or new ones could have their ids
    known = {*map(id, young)}
    new: set[int] = set()

    def look() -> Iterator[int]:
        return map(id, gc.get_objects(generation=0))

    with young_noted(new) as note:
        try:
            # The collector may be at work at any moment, also in another thread: what it moves meanwhile it has noted.
            yield new, lambda each: each not in known and (each in new or each in look() or each in new)
        finally:
            note()
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


_CHANGED_IN_C = (*WHOLE, functools._lru_cache_wrapper)
"""Classes whose objects functions change that are not known to."""

_KINDS = {ClassAttributes: Kind.CLASS, SlotAttributes: Kind.SLOT, ContextValue: Kind.CONTEXT}
"""What is read of the holders that locations know in another form."""

_OF_CONTAINERS = (Kind.ITEM, Kind.LENGTH, Kind.CONTENTS)
_PLAIN_KEYS = (str, int, float, bytes)


def _owner_of(record: Read) -> Any:
    return record.holder if is_a(record.owner, str) else record.owner
