"""Which names stand in some code, and which attributes it may read by others: computed ones, or all of an object."""

from __future__ import annotations

import argparse
import dis
import functools
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from types import CodeType, FrameType, FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from millstream.capture.effects.registry import PACKAGES
from millstream.capture.lines import is_users
from millstream.capture.state.location import SlotAttributes


@dataclass
class Names:
    """Names in some code and in the code of functions within it. Shared: not to be changed."""

    all: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)  # those that are not only called as methods
    told: set[str] = field(default_factory=set)  # strings that may be names of attributes
    globals: set[str] = field(default_factory=set)  # ``step`` of ``optimizer.step()`` is none
    stored: set[str] = field(default_factory=set)  # globals that it assigns
    # while it runs: how many packages up, the module's name from there, and the name in it or nothing
    imported: set[tuple[int, str, str]] = field(default_factory=set)
    codes: set[CodeType] = field(default_factory=set)


@functools.lru_cache(maxsize=65536)
def names_of(code: CodeType) -> Names:
    """The names in some code."""
    found, level, module = Names(all={*code.co_names}, codes={code}), 0, ""
    loaded: deque[Any] = deque([0, None], maxlen=2)  # what the last two instructions load; an import's level is first
    for item in dis.get_instructions(code):
        operation, name = item.opname, str(item.argval)
        if not is_method_load(item):
            found.read.add(name)
        if operation == "IMPORT_NAME":
            level, module = int(loaded[0]), name
            found.imported.add((level, module, ""))
        elif operation.endswith(("_NAME", "_GLOBAL", "_GLOBALS")):
            found.globals.add(name)
        elif operation == "IMPORT_FROM":
            found.imported.add((level, module, name))
        if operation == "STORE_GLOBAL":
            found.stored.add(name)
        if operation != "EXTENDED_ARG":
            loaded.append(item.argval)
    if not _TELLING.isdisjoint(code.co_names):
        found.told = {constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier()}
    for part in (names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType)):
        for kind, names in vars(found).items():
            names |= vars(part)[kind]
    return found


def is_method_load(item: dis.Instruction) -> bool:
    """Whether an attribute is read to be called at once, as a method."""
    is_marked = sys.version_info >= (3, 12) and item.opname == "LOAD_ATTR" and bool((item.arg or 0) & 1)
    return item.opname == "LOAD_METHOD" or is_marked


_TELLING = frozenset({"getattr", "hasattr", "attrgetter", "vars", "__dict__", "globals"})
"""Names of what takes the names of attributes as strings."""


@functools.lru_cache(maxsize=65536)
def counted_in(code: CodeType) -> frozenset[str]:
    """Names of attributes, variables and items that some code changes by ``+=`` and the like, functions in it apart."""
    found: set[str] = set()
    before: deque[Any] = deque([None, None, None], maxlen=3)  # the last instructions
    keys: list[str | None] = []  # of items that are being changed
    is_counted = False  # whether what is on the stack was changed so
    for item in instructions_of(code):
        operation, name = item.opname, item.argval
        last = before[-1]
        if operation == "BINARY_SUBSCR" and last is not None and last.opname == "COPY":  # twice
            keys.append(_key_of(before[0]))
        if operation.startswith("STORE_") and is_counted:
            name = (keys.pop() if keys else None) if operation == "STORE_SUBSCR" else name
            if isinstance(name, str):
                found.add(name)
        is_in_place = operation == "BINARY_OP" and item.argrepr.endswith("=")
        is_counted = is_in_place or (operation == "SWAP" and is_counted)
        before.append(item)
    return frozenset(found)


def instructions_of(code: CodeType) -> Iterator[dis.Instruction]:
    """What some code does, one thing at a time: Python 3.13 has instructions for two variables."""
    for item in dis.get_instructions(code):
        if isinstance(item.argval, tuple) and (parts := _OF_VARIABLES.findall(item.opname)):
            for opname, argval in zip(parts, item.argval, strict=True):
                yield item._replace(opname=opname, argval=argval, argrepr=str(argval))
        elif item.opname not in ("EXTENDED_ARG", "CACHE"):
            yield item


_OF_VARIABLES = re.compile("(?:LOAD|STORE)_FAST(?:_BORROW)?")


def _key_of(item: dis.Instruction | None) -> str | None:
    """The key that an instruction puts on the stack, if it is a text in the code."""
    if item is None or item.opname != "LOAD_CONST" or type(item.argval) is not str:
        return None
    return item.argval


def finds_modules(names: Names) -> bool:
    """Whether some code finds modules by ``importlib.import_module`` or ``sys.modules``."""
    is_listed = "modules" in names.read and ("sys" in names.all or "modules" in names.globals)
    return is_listed or not names.all.isdisjoint(("import_module", "__import__"))


def computes_a_global(frame: FrameType) -> bool:
    """Whether a frame that is calling ``globals()`` looks there for anything but a name that stands in the code."""
    items = [item for item in dis.get_instructions(frame.f_code) if item.opname != "EXTENDED_ARG"]
    before = [item for item in items if item.offset < frame.f_lasti and item.opname not in _CALLING]
    after, told = [item for item in items if item.offset > frame.f_lasti], "LOAD_CONST"
    first, second, third = (after * 3)[:3]  # a return may be all there is
    if first.opname == "CONTAINS_OP":  # "name" in globals()
        return before[-2].opname != told
    if first.opname in ("LOAD_METHOD", "LOAD_ATTR"):  # globals().get("name")
        return first.argval != "get" or second.opname != told or third.opname not in _CALLING
    return first.opname != told or not second.opname.startswith("BINARY_")  # globals()["name"]


_CALLING = frozenset({"PRECALL", "CALL", "PUSH_NULL"})


class Reach(IntEnum):
    """Of which objects some code may read attributes whose names do not stand in it."""

    NONE = 0
    NAMESPACES = 1  # Python's own, which are compared and shown in C
    NAMED = 2  # those that it can name
    DEEP = 3  # and all that these hold


_DEEP = frozenset("asdict astuple deepcopy dumps __getstate__ __reduce_ex__ attrgetter methodcaller".split())
_ALL = frozenset("vars __dict__ dir fields getmembers getattr_static __getattribute__".split())
_NAMING = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD")
_SHOWING = frozenset({"repr", "str", "format", "print"})


@functools.lru_cache(maxsize=65536)
def reach_of(code: CodeType) -> Reach:
    """Which attributes some code may read by names that it computes, or all at once."""
    names = {*code.co_names}
    if not _DEEP.isdisjoint(names) or names >= {"reduce", "getattr"}:
        return Reach.DEEP
    if (computed := _computes_names(code)) is Reach.DEEP:
        return computed
    if not _ALL.isdisjoint(names):
        num_named = sum(item.argval in _ALL for item in dis.get_instructions(code) if item.opname in _NAMING)
        return Reach.DEEP if num_named > 1 or computed else Reach.NAMED
    found = Reach.NONE
    for item in dis.get_instructions(code):
        is_loaded = item.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        if item.opname == "MATCH_CLASS" or (is_loaded and item.argval in ("copy", "replace")):
            return Reach.NAMED
        is_shown = item.opname in ("COMPARE_OP", "CONTAINS_OP") or item.opname.startswith("FORMAT_")
        if is_shown or (is_loaded and item.argval in _SHOWING):
            found = Reach.NAMESPACES
    return max(found, computed)


@functools.lru_cache(maxsize=65536)
def compares_types(code: CodeType) -> bool:
    """Whether some code asks for a number by its type, as in ``type(n) is float`` or ``type(n) in (int, float)``."""
    if "type" not in code.co_names:
        return False
    loaded: set[str] = set()  # names that were put on the stack last
    for item in dis.get_instructions(code):
        is_name = item.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        is_asked = item.opname in ("IS_OP", "COMPARE_OP", "CONTAINS_OP") or (is_name and item.argval == "type")
        if is_asked and not loaded.isdisjoint(("int", "float")):
            return True
        if is_name:
            loaded.add(item.argval)
        elif not item.opname.startswith("BUILD_"):
            loaded.clear()
    return False


def _computes_names(code: CodeType) -> Reach:
    """How far some code gets by ``getattr`` or ``hasattr`` with names that are no constants; one within the other."""
    found = Reach.NONE
    depth, is_told = -1, False  # of the stack above the function, and whether the name is a constant so far
    for item in dis.get_instructions(code):
        if item.opname in ("LOAD_GLOBAL", "LOAD_NAME") and item.argval in ("getattr", "hasattr"):
            if depth >= 0:
                return Reach.NAMED if depth > 0 else Reach.DEEP
            depth, is_told = 0, False
        elif depth >= 0 and item.opname != "PUSH_NULL":
            if item.opname in ("PRECALL", "CALL") and item.arg == depth:  # the arguments are all there is on the stack
                if not is_told:
                    found = Reach.NAMED
                depth = -1
                continue
            before, depth = depth, depth + dis.stack_effect(item.opcode, item.arg, jump=False)
            if before == 1 and depth == 2:
                is_told = item.opname == "LOAD_CONST"
            elif depth == 2 and item.opname not in ("KW_NAMES", "EXTENDED_ARG"):  # something was made of the constant
                is_told = False
    return Reach.NAMED if depth >= 0 else found


@functools.lru_cache(maxsize=65536)
def handed_on(code: CodeType) -> frozenset[str]:
    """Names of variables and attributes whose values some code uses otherwise than for an attribute that it names."""
    found: set[str] = set()
    waiting: str | None = None
    for item in instructions_of(code):
        if item.opname == "PUSH_NULL":
            continue
        is_named = item.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if waiting is not None and (not is_named or item.argval == "__dict__"):
            found.add(waiting)
        is_loaded = is_named or (item.opname.startswith("LOAD_") and isinstance(item.argval, str))
        waiting = item.argval if is_loaded and item.opname != "LOAD_CONST" else None
    return frozenset(found)


def is_users_module(module: ModuleType, is_theirs: Callable[[str], bool] = is_users) -> bool:
    """Whether a module of Python is the user's or a library's of theirs; also one that was made without a file."""
    held = vars(module)
    if file := held.get("__file__"):
        return is_theirs(file)
    is_made = type(module) is ModuleType and held.get("__spec__") is None
    return is_made and module.__name__.partition(".")[0] not in {*PACKAGES, *sys.stdlib_module_names, "torch"}


def modules_handed_on(frame: FrameType) -> Iterator[ModuleType]:
    """Modules of Python that the code of a frame, which computes names, gives to ``getattr`` or ``vars``."""
    names = handed_on(frame.f_code)
    places: list[Mapping[str, Any]] = [frame.f_locals, frame.f_globals]
    places += (held for value in [*frame.f_locals.values()] for held in attributes_of(value))
    for held in places:
        for name in names.intersection(held):
            if isinstance(held[name], ModuleType):
                yield held[name]


NAMESPACES = (argparse.Namespace, SimpleNamespace)
"""Classes of Python's own whose objects users fill."""

MAX_NAMEABLE = 1000
"""Objects of a frame that are looked at."""


WITHOUT_ATTRIBUTES = (str, int, float, ModuleType, FunctionType, Tensor, type(None))
"""Of these no attributes are looked at, or they are known otherwise."""


def nameable(frame: FrameType) -> Iterator[Any]:
    """Objects with attributes that some code can reach from its variables, by the names in it and by items."""
    code, globals_ = frame.f_code, frame.f_globals
    yield from nameable_from(frame, [*frame.f_locals.values(), *(globals_[n] for n in code.co_names if n in globals_)])


def nameable_from(frame: FrameType, waiting: list[Any]) -> Iterator[Any]:
    """Objects with attributes that some code can reach from these; the list is used up."""
    code, is_deep = frame.f_code, reach_of(frame.f_code) is Reach.DEEP
    seen: dict[int, Any] = {}
    while waiting and len(seen) < MAX_NAMEABLE:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, WITHOUT_ATTRIBUTES):
            continue
        seen[id(value)] = value
        if isinstance(value, list | tuple | set | frozenset | deque):
            waiting += [*value][:MAX_NAMEABLE]
        elif isinstance(value, dict):
            waiting += [*value.values()][:MAX_NAMEABLE]
        else:
            for held in attributes_of(value):
                waiting += (held[name] for name in (held if is_deep else code.co_names) if name in held)
            yield value


def attributes_of(value: Any) -> Iterator[Mapping[str, Any]]:
    """What an object, or a class, holds itself."""
    with suppress(AttributeError):  # and no ``__getattr__`` of the user's
        held = vars(value) if isinstance(value, type) else object.__getattribute__(value, "__dict__")
        if isinstance(held, dict | MappingProxyType):
            yield held
    if not isinstance(value, type) and (slots := SlotAttributes.of(value)).members:
        yield slots
