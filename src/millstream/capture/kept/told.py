"""Reads and writes of a step as plain data, and the same of this process's objects."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from threading import get_ident
from types import CodeType, FunctionType
from typing import Any, TypeVar

from millstream.capture.kept.descriptions import TraceNotKept, is_plain
from millstream.capture.kept.ways import Reader, Ref, WayWriter
from millstream.capture.lines import is_millstreams, is_users
from millstream.capture.record.answers import asked_of, content_of_cache
from millstream.capture.record.paths import PLACES, place_of
from millstream.capture.record.reads import MISSING, Kind, Read, find_contents, is_a, len_of
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.others import stand_in_for
from millstream.capture.state.relevant import counts, is_library
from millstream.capture.state.signature import is_same
from millstream.capture.trace.request import Request


@dataclass(frozen=True)
class CodeName:
    """The description of code that another process has run."""

    co_filename: str
    co_qualname: str
    co_name: str
    co_firstlineno: int

    @classmethod
    def of(cls, code: CodeType) -> CodeName:
        """Of some code."""
        return cls(code.co_filename, code.co_qualname, code.co_name, code.co_firstlineno)

    def co_positions(self) -> tuple[()]:
        """Return where its instructions are in the text: nobody asks."""
        return ()


def told_reads(record: Recorder, request: Request) -> list[Read]:
    """Return what the step has read, but for its arguments, copies of their containers, and what is ours."""
    arguments = {*map(id, request.arguments)}
    owners = (read.owner for read in record.reads if is_users(read.code.co_filename))
    if any(_is_instance_of_ours(each) and not type(each).__module__.startswith(_STAND_INS) for each in owners):
        raise TraceNotKept("it reads of an object of Millstream's")
    if any(id(read.owner) in arguments and read.kind is not Kind.TENSOR for read in record.reads):
        raise TraceNotKept("it reads what a user has given a tensor among its arguments")
    given = record.given | arguments
    return [
        read
        for read in record.reads
        if id(read.holder) not in given
        and id(read.owner) not in given
        and not _is_ours(read.holder)
        and not _is_ours(read.owner)
        and not _is_of_library(read.code)
    ]


def _is_ours(value: Any) -> bool:
    """Return whether an object is of this package, as those are that stand for PyTorch's while a step is traced."""
    kind = value if is_a(value, type) else type(value)
    if is_a(value, FunctionType) and is_millstreams(value.__code__.co_filename):
        return True
    if is_a(value, FunctionType):
        return str(value.__module__).startswith("millstream.")
    return str(kind.__module__).partition(".")[0] == "millstream"


def _is_of_library(code: CodeType) -> bool:
    """Return whether code was made from text for a data class, or the like, of ours, of PyTorch's or Python's."""
    return code.co_filename.startswith("<") and code in _made_for_libraries(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _made_for_libraries(_: int) -> set[CodeType]:
    """Such code in the modules that there are."""
    modules = [module for name, module in [*sys.modules.items()] if is_library(name)]
    classes = {each for module in modules for each in [*vars(module).values()] if type(each) is type}
    held = (each for kind in classes for each in vars(kind).values())
    methods = (each.__func__ if type(each) is staticmethod else each for each in held)
    codes = (each.__code__ for each in methods if type(each) is FunctionType)
    return {code for code in codes if code.co_filename.startswith("<")}


_Record = TypeVar("_Record", bound=Read)
Told = tuple[Ref, str, Ref | None, Any, bool, Any, Any]
"""A read: holder, kind, key, value, whether the trace had another there, owner or name of a variable, and code."""


def tell(writer: WayWriter, read: Read, record: Recorder, numbers: Container[Any]) -> Told | None:
    """A read as data; ``None`` for one by PyTorch's own code of what is its own, where that cannot be said."""
    is_number = read.kind in PLACES and place_of(read.holder, None if read.kind is Kind.CELL else read.key) in numbers
    is_for_trace = read.key is stand_in_for(get_ident())
    try:
        key = _TRACED if is_for_trace else None if read.key is None else writer.ref(read.key)
        owner = read.owner if is_a(read.owner, str) else writer.ref(read.owner)
        holder = writer.ref(read.holder)
        if read.kind is Kind.TYPE and holder[0] in ("=", "tuple"):
            return None  # as that says of which class it is
        if holder[0] != "object":
            raise TraceNotKept(f"it reads of {holder}")
        if is_for_trace:
            _check_for_trace(read)
        elif _is_of_answers(read):
            _check_answers(read)
        value = _ANY if is_number else _value(writer, read)  # the graph is given numbers anew
        is_replaced = read.kind in PLACES and not is_same(read.now(), read.value)
        return holder, read.kind.name, key, value, is_replaced, owner, CodeName.of(read.code)
    except TraceNotKept as reason:
        is_answer = _is_of_answers(read) and bool(read.value)
        if not (is_answer or is_users(read.code.co_filename) or counts(read, record)):
            return None
        raise TraceNotKept(f"{reason} ({read})") from None


def _is_of_answers(read: Read) -> bool:
    return read.kind is Kind.CONTENTS and is_a(read.holder, functools._lru_cache_wrapper)


_TRACED = ("class of a traced tensor",)
"""A key that is another class in each process, and stands there for the class of a tensor."""


def _check_for_trace(read: Read) -> None:
    """Refuse what was found by the class that tensors have while they are traced, as only another trace can leave it.

    Raises:
        NotKept: There was something.
    """
    if read.value is not MISSING or read.now() is not MISSING:
        raise TraceNotKept("it reads what is kept for the class of a traced tensor")


def _check_answers(read: Read) -> None:
    """Refuse a cache whose answers the step may have made itself, as what it has read of these is not known.

    Raises:
        NotKept: It may, or its answers are found by what nobody can compare.
    """
    if not read.value:
        raise TraceNotKept("it reads what a cache has answered")
    misses, *entries = read.value
    now = content_of_cache(read.holder)
    before, after = ({(id(key), id(answer)) for key, answer in each} for each in (entries, now[1:]))
    if now[:1] != (misses,) or before != after:
        raise TraceNotKept("a cache has got answers while it was traced")
    if len([*asked_of(read.holder)]) != len(entries):
        raise TraceNotKept("it reads what a cache has answered")
    if not all(_is_found_alike(key) for key, _ in entries):
        raise TraceNotKept("a cache was asked for objects that compare themselves")


def _is_found_alike(key: Any) -> bool:
    """Return whether a dict finds what is the same object, or what is as equal as what is told of it."""
    if type(key) in (tuple, frozenset):
        return all(map(_is_found_alike, key))
    return key == key if is_plain(key) else type(key).__eq__ is object.__eq__  # no NaN does


def _answers(table: Reader | WayWriter, cache: Any) -> tuple[tuple[Ref, Ref], ...]:
    """What was asked of a cache, and the answers."""
    found = []
    for asked, answer in asked_of(cache):
        try:
            found.append((table.ref(asked), table.ref(answer)))
        except TraceNotKept:
            if isinstance(table, WayWriter):
                raise  # in another process there may be others
    return tuple(sorted(found, key=repr))


def _value(table: Any, read: Read) -> Any:
    """Return what is there now, as data."""
    kind, holder = read.kind, read.holder
    if kind is Kind.LENGTH:
        return len_of(holder)
    if kind is Kind.CODE:
        defaults = holder.__kwdefaults__ or {}
        return table.ref(holder.__defaults__), tuple((name, table.ref(value)) for name, value in defaults.items())
    if _is_of_answers(read):
        return _answers(table, holder)
    if kind is Kind.CONTENTS:
        now = next((found[3] for found in find_contents(holder)), ())
        order = (*OrderedDict.keys(holder),) if is_a(holder, OrderedDict) else ()  # which is not that of the dict in it
        return table.all_of(holder, (*now, *order))
    if kind is Kind.TYPE:
        return table.ref(type(holder))
    if kind is Kind.TENSOR:  # which its description has
        return None
    now = read.now()
    is_ours = _is_instance_of_ours(now) and not is_users(read.code.co_filename)
    return _ANY if is_ours else table.ref(now)


_STAND_INS = tuple(f"millstream.{part}." for part in ("_torch", "capture.trace", "capture.effects", "capture.state"))
"""Packages with classes whose objects stand for the user's while a step is traced."""


def _is_instance_of_ours(value: Any) -> bool:
    return _is_ours(value) and not is_a(value, FunctionType | type)


_ANY = ("anything",)
"""A value that is of no matter."""
_REPLACED: Any = object()
"""Stands for what was read where something of ours was, while the step was traced."""


def find_read(reader: Reader, make: type[_Record], told: Told) -> _Record:
    """The same read of this process's objects.

    Raises:
        NotKept: It gives something else here.
    """
    holder, kind, key, value, is_replaced, owner, code = told
    held = reader.value_of(holder)
    read = make(
        held,
        Kind[kind],
        stand_in_for(get_ident()) if key == _TRACED else None if key is None else reader.value_of(key),
        None,
        owner if is_a(owner, str) else reader.value_of(owner),
        code,
        0,
    )
    now = _value(reader, read)
    if _is_of_answers(read):
        now = tuple(each for each in now if each in value)
    if now != value and _ANY not in (now, value):
        are_plain = type(now) is type(value) is tuple and now[:1] == value[:1] == ("=",)
        raise TraceNotKept(f"{read} is {now[-1]}, was {value[-1]}" if are_plain else f"{read} is another than it was")
    if _is_of_answers(read):
        read.value = content_of_cache(held)
    elif read.kind is Kind.CONTENTS:
        read.value = next((found[3] for found in find_contents(held)), ())
    elif read.kind in PLACES:
        read.value = _REPLACED if is_replaced else read.now()
    elif read.kind is Kind.LENGTH:
        read.value = now
    return read


def functions_that_ran(writer: WayWriter, record: Recorder) -> list[int]:
    """Numbers of the functions whose code has run.

    Raises:
        NotKept: Code of the user's has run of which nobody knows where it is.
    """
    functions = [read.holder for read in record.reads if read.kind is Kind.CODE]
    functions += [value for value in writer.known() if is_a(value, FunctionType)]
    own = {function.__code__: function for function in functions if writer.knows(function)}
    within = {each for code in own for each in _codes_in(code)}
    for code in record.codes:
        is_named = code in within or not is_users(code.co_filename)
        if not is_named and not _is_of_library(code):
            raise TraceNotKept(f"nobody knows what has called {code.co_qualname} ({code.co_filename})")
    return [writer.number_of(function) for code, function in own.items() if code in {*record.codes}]


def _codes_in(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _codes_in(constant)
