"""Exactly what a step reads and writes of Python's objects while it runs once.

**Contract**
- Of each entry of a dict or list, cell, slot, class, function and container the first read is recorded, with what was
  there, unless the step itself has written it before; and the first write, with what was there before.
- No code of the user's is run for it, but for methods of keys of dicts that hash and compare them.
- What was not seen is named: ``failure`` says why.
"""

from __future__ import annotations

import _weakrefset
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from millstream.capture.lines import is_pythons, runs_for_us
from millstream.capture.record.interpreter.instructions import InstructionSession
from millstream.capture.record.interpreter.opcodes import InstructionSite
from millstream.capture.record.reads import (
    SHOWING,
    Read,
    Write,
    behind,
)
from millstream.capture.record.record_store import ids_of_new
from millstream.capture.record.recorded_calls import RecordedCalls

_WEAK = (weakref.__file__, _weakrefset.__file__)
"""Files with functions by which an object's end is noticed."""


class Recorder(RecordedCalls):
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
        self._argument = None

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
