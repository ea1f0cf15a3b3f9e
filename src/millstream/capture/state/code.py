"""Facts read from code: the names in it, what it counts, and whose modules are."""

from __future__ import annotations

import argparse
import dis
import functools
import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from millstream.capture.effects.output_libraries import PACKAGES
from millstream.capture.lines import is_users


@dataclass
class CodeNames:
    """Names in some code and in the code of functions within it. Shared: not to be changed."""

    all: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)  # those that are not only called as methods
    told: set[str] = field(default_factory=set)  # strings that may be names of attributes
    globals: set[str] = field(default_factory=set)  # ``step`` of ``optimizer.step()`` is none
    codes: set[CodeType] = field(default_factory=set)


@functools.lru_cache(maxsize=65536)
def names_of(code: CodeType) -> CodeNames:
    """The names in some code."""
    found = CodeNames(all={*code.co_names}, codes={code})
    for item in dis.get_instructions(code):
        name = str(item.argval)
        if not is_method_load(item):
            found.read.add(name)
        if item.opname.endswith(("_NAME", "_GLOBAL")) and item.opname != "IMPORT_NAME":
            found.globals.add(name)
    if not _TELLING.isdisjoint(code.co_names):
        found.told = {constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier()}
    for part in (names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType)):
        for kind, names in vars(found).items():
            names |= vars(part)[kind]
    return found


def is_method_load(item: dis.Instruction) -> bool:
    """Return whether an attribute is read to be called at once, as a method."""
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
    """Yield what some code does, one thing at a time: Python 3.13 has instructions for two variables."""
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


def is_users_module(module: ModuleType) -> bool:
    """Return whether a module of Python is the user's or a library's of theirs.

    Also one that was made without a file.
    """
    held = vars(module)
    if file := held.get("__file__"):
        return is_users(file)
    is_made = type(module) is ModuleType and held.get("__spec__") is None
    return is_made and module.__name__.partition(".")[0] not in {*PACKAGES, *sys.stdlib_module_names, "torch"}


NAMESPACES = (argparse.Namespace, SimpleNamespace)
"""Classes of Python's own whose objects users fill."""
