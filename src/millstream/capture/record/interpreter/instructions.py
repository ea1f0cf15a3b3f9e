"""Report, in one thread, each read or write of a Python instruction before it: see ``_native/recorder.cpp``.

Python 3.11 has it from a tracer, beside which one that is there already (a debugger's, a coverage tool's) goes on; from
3.12 on it is ``sys.monitoring``. No code, function or frame is changed; what other threads run is no concern of ours.
Dynamo does not matter to it, nor what is marked to be skipped by it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any, TypeVar

from torch import Tensor

from millstream import _native
from millstream.capture.record.interpreter.collector import around_collections
from millstream.capture.record.interpreter.opcodes import InstructionSite, packed, sites_of

_TOOLS = (3, 4)
"""Numbers of ``sys.monitoring`` that Python leaves to anybody."""

NULL: Any = object()
"""Stands for an entry of the stack that holds nothing."""

T = TypeVar("T")

Handler = Callable[[InstructionSite, CodeType, int, FrameType, tuple[Any, ...]], Exception | None]


class InstructionSession:
    """Tells a handler of the sites that this thread comes to.

    Attributes:
        codes: Code that has run and that counts, each once.
        again: Code whose every beginning is told.
        failure: Why not all was seen; empty if it was.
    """

    def __init__(self) -> None:
        self.again: set[CodeType] = set()
        self._known: set[CodeType] = set()
        self._tool: int | None = None
        self.codes: list[CodeType] = []
        self.failure = why_not()

    @contextmanager
    def telling(
        self,
        handler: Handler,
        is_followed: Callable[[CodeType], bool],
        begins: Callable[[FrameType], Exception | None],
    ) -> Iterator[None]:
        """Tell them within the context.

        Args:
            handler: Called with a site, its code, its place in it, the frame, and the topmost entries of the stack; for
                one site and the same entries once, but if a tensor is among them. What it returns is raised there.
            is_followed: Whether code counts.
            begins: Called with a frame of code that counts, before it runs for the first time, or each time if it is
                among ``again``; likewise.
        """
        self._handler, self._is_followed, self._begins = handler, is_followed, begins
        library = _native.load("core")
        try:
            if self.failure or library is None:
                yield
                return
            # What Python's collector calls and finalizes is none of the step's.
            with around_collections(library.pause_recording, library.resume_recording):
                self._start(library)
                try:
                    yield
                finally:
                    self._stop(library)
        finally:  # they lead to whoever has this, and keep what was recorded, a batch perhaps, until a collection
            del self._handler, self._is_followed, self._begins

    def _start(self, library: Any) -> None:
        if sys.version_info >= (3, 12) and not self._take_tool(library):
            self.failure = "other tools have all numbers of sys.monitoring"
            return
        library.begin_recording(self._plan, self._handler, Tensor, NULL, _disable(), self._is_followed)
        if self._tool is not None:
            _monitoring().restart_events()  # of code that was of no interest by then
            events = _monitoring().events
            _monitoring().set_events(self._tool, events.PY_START | events.PY_RESUME)

    def _stop(self, library: Any) -> None:
        error, is_replaced = library.end_recording()
        if self._tool is not None:
            _monitoring().set_events(self._tool, 0)
            for code in self.codes:
                _monitoring().set_local_events(self._tool, code, 0)
            _monitoring().free_tool_id(self._tool)
        if error is not None:
            self.failure = f"it failed ({type(error).__name__}: {error})"
        elif is_replaced:
            self.failure = "the step has set a tracer"

    def _take_tool(self, library: Any) -> bool:
        monitoring = _monitoring()
        self._tool = next((each for each in _TOOLS if monitoring.get_tool(each) is None), None)
        if self._tool is None:
            return False
        monitoring.use_tool_id(self._tool, "millstream")
        for event in ("PY_START", "PY_RESUME"):
            monitoring.register_callback(self._tool, getattr(monitoring.events, event), library.code_begins)
        monitoring.register_callback(self._tool, monitoring.events.INSTRUCTION, library.instruction_begins)
        return True

    def _plan(self, code: CodeType) -> tuple[bytes, dict[int, InstructionSite], bool] | Exception | None:
        """Return what is to be seen of code that begins; an error to be raised there."""
        if not self._is_followed(code):
            return None
        if (error := self._begins(sys._getframe(1))) is not None:
            return error
        if code not in self._known:
            self._known.add(code)
            self.codes.append(code)
            if self._tool is not None:
                _monitoring().set_local_events(self._tool, code, _monitoring().events.INSTRUCTION)
        return *_plan_of(code), code in self.again


@functools.lru_cache(maxsize=4096)
def _plan_of(code: CodeType) -> tuple[bytes, dict[int, InstructionSite]]:
    """Return where to look in some code, for ``recorder.cpp``, and what is there.

    Kept from one recording to the next.
    """
    sites = sites_of(code)
    return packed(sites, code), sites


def _monitoring() -> Any:
    return sys.monitoring  # type: ignore[attr-defined]  from Python 3.12 on


def _disable() -> Any:
    return _monitoring().DISABLE if sys.version_info >= (3, 12) else None


def unseen(function: Callable[..., T], *args: Any) -> T:
    """Call a function, of whose run nothing is recorded."""
    library = _native.load("core")
    if library is None:
        return function(*args)
    library.pause_recording()
    try:
        return function(*args)
    finally:
        library.resume_recording()


@contextmanager
def seen() -> Iterator[None]:
    """For the length of the context, record what runs, in the midst of what is not: it is the user's code."""
    library = _native.load("core")
    if library is None:
        yield
        return
    num_pauses = library.leave_pause()
    try:
        yield
    finally:
        library.return_to_pause(num_pauses)


def run_unseen(function: Callable[..., Any], is_seen: Callable[[Any], bool] | None = None) -> Any:
    """The same method, of whose run nothing is seen, in no frame of its own.

    Args:
        function: To be an attribute of a class.
        is_seen: Called with its second argument, the first after ``self``: whether it is to be seen nevertheless.
            ``None`` where it never is.
    """
    library = _native.load("core")
    assert library is not None
    return library.make_unseen(function, is_seen)


def begin_early() -> None:
    """Let what records be compiled meanwhile, in a thread, where it is not yet: a first trace would wait seconds."""
    with suppress(RuntimeError):  # the system refuses the thread
        _native.is_ready("core")


def why_not() -> str:
    """Return why nothing can be recorded, in a few words; empty where it can."""
    if sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]} is not known"
    return "" if _native.load("core") is not None else _native.why_not("core")
