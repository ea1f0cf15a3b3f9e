"""Stacks of Python frames, taken quickly, and turned into lines later."""

from __future__ import annotations

import dis
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from millstream.insight import Site

MAX_DEPTH = 64  # frames from the innermost; below that there are launchers only

RawStack = tuple[tuple[CodeType, int], ...]
"""Code and position of each frame, the innermost first."""

MAX_STACKS = 20_000  # remembered; a program with more of them has them taken again
_INTERRUPTIBLE = ("JUMP_BACKWARD", "RESUME", "JUMP_ABSOLUTE")
_CALLS = ("CALL", "CALL_FUNCTION_EX", "PRECALL", "CALL_KW")


def take_stack(frame: FrameType | None) -> RawStack:
    """The frames from this one outwards."""
    found = []
    while frame is not None and len(found) < MAX_DEPTH:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def key_of(frame: FrameType | None) -> tuple[int, ...]:
    """Return what tells a stack from others.

    As the code of one that is kept lives on, addresses do, and hash quickly.
    """
    found: list[int] = []
    while frame is not None and len(found) < 2 * MAX_DEPTH:
        found += (id(frame.f_code), frame.f_lasti)
        frame = frame.f_back
    return tuple(found)


class Stacks:
    """Stacks that were taken, each kept once: many events come from one place, and each frame is a tuple."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], RawStack] = {}

    def take(self, frame: FrameType | None) -> RawStack:
        """The frames from this one outwards."""
        key = key_of(frame)
        stack = self._known.get(key)
        if stack is None:
            if len(self._known) >= MAX_STACKS:
                self._known.clear()
            stack = self._known[key] = take_stack(frame)
        return stack


@cache
def _lines_of(code: CodeType) -> tuple[int | None, ...]:
    return tuple(position[0] for position in code.co_positions())


@cache
def site_of(code: CodeType, position: int) -> Site:
    """The line of a position in code."""
    lines = _lines_of(code)
    line = lines[position // 2] if 0 <= position // 2 < len(lines) else None
    return Site(code.co_filename, line or code.co_firstlineno, code.co_name)


def sites_of(stack: RawStack) -> tuple[Site, ...]:
    """The lines of a stack."""
    return tuple(site_of(code, position) for code, position in stack)


@cache
def is_between_instructions(code: CodeType, position: int) -> bool | None:
    """Return whether a frame stands where Python gives the interpreter away between instructions.

    ``None`` at a call.
    """
    if not 0 <= position < len(code.co_code):
        return None
    name = dis.opname[code.co_code[position]]
    if name.startswith(_INTERRUPTIBLE):
        return True
    return None if name.startswith(_CALLS) else False


def forget() -> None:
    """Let go of all code that was looked at."""
    for each in (_lines_of, site_of, is_between_instructions):
        each.cache_clear()


def library_roots() -> tuple[str, ...]:
    """Folders that hold Python, installed packages and this one."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    modules = (sys.modules.get(name) for name in ("millstream", "torch"))
    paths |= {str(Path(module.__file__).parent) for module in modules if module is not None and module.__file__}
    return tuple(sorted(path.rstrip("/") + "/" for path in paths if path))
