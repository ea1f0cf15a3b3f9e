"""Whether code that runs comes to the instructions in which a name stands: a branch that is not taken reads nothing."""

from __future__ import annotations

import dis
import functools
import sys
from types import CodeType, FrameType
from typing import Any


class Loads:
    """Notes, for the length of a ``with`` block, which of some names this thread's code comes to.

    It is a tracer of Python's, instruction by instruction where such a name stands, and slow. Beside another one, such
    as a debugger's or a coverage tool's, it notes nothing, and every name counts as come to.

    Args:
        names: Of attributes, variables and items.

    Attributes:
        met: Those that code has come to, by an instruction for that name or that text; all where nobody can tell.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self.met = set[str]()
        self._followed: list[list[bool]] = []  # of each call of code with the names, whether its instructions were seen
        self._call = self._on_call  # one object, to be known again

    def __enter__(self) -> Loads:
        if sys.gettrace() is not None:
            self.met |= self._names
        elif self._names:
            sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        is_own = sys.gettrace() is self._call
        if is_own:
            sys.settrace(None)
        if self._names and not (is_own and all(any(followed) for followed in self._followed)):
            self.met |= self._names

    def _on_call(self, frame: FrameType, *_: Any) -> Any:
        if self._names.isdisjoint(texts_of(frame.f_code)):
            return None
        texts, followed = texts_at(frame.f_code), [False]
        self._followed.append(followed)

        def on_event(frame: FrameType, event: str, _: Any) -> Any:
            if event == "opcode":
                followed[0] = True
                self.met |= self._names.intersection(texts.get(frame.f_lasti, ()))
            return on_event

        frame.f_trace_opcodes = True
        return on_event


@functools.lru_cache(maxsize=4096)
def texts_of(code: CodeType) -> frozenset[str]:
    """All names and texts that instructions of some code have."""
    return frozenset(text for found in texts_at(code).values() for text in found)


@functools.lru_cache(maxsize=4096)
def texts_at(code: CodeType) -> dict[int, tuple[str, ...]]:
    """Names and texts by the offset of their instruction; of a constant tuple, those in it."""
    found: dict[int, tuple[str, ...]] = {}
    offsets: list[int] = []  # of an instruction and what extends it
    for item in dis.get_instructions(code):
        offsets.append(item.offset)
        if item.opname == "EXTENDED_ARG":
            continue
        parts = item.argval if isinstance(item.argval, tuple | frozenset) else (item.argval,)
        texts = tuple(part for part in parts if isinstance(part, str))
        if texts and "_FAST" not in item.opname:  # a local variable is no place of the user's
            found |= dict.fromkeys(offsets, texts)
        offsets.clear()
    return found
