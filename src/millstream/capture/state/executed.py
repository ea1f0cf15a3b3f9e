"""Which of the user's code runs, and which attributes of modules are read: what did not run was not read.

A method of the user's own trainer may be found by its name alone, as ``train`` is by ``self.model.train()``. What such
code would read need not be the same in each call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from types import CellType, CodeType, FrameType, FunctionType, TracebackType
from typing import Any

from torch import nn

from millstream.capture.lines import is_ours, is_users
from millstream.heap import objects_of_types

WHOLE = ("__dict__", "__getstate__")
"""Attributes with all others in them; the second is what copies are made from."""


@dataclass
class Ran:
    """What ran; ``None`` where nobody has watched.

    Attributes:
        codes: Code of functions.
        attributes: Attributes that were read, each with the id of its module; ``__dict__`` stands for all of them.
    """

    codes: set[CodeType] | None = None
    attributes: set[tuple[int, str]] | None = None

    def may_have_run(self, code: CodeType) -> bool:
        """Whether that code may have run."""
        return self.codes is None or code in self.codes

    def has_read(self, module: nn.Module, name: str) -> bool:
        """Whether that attribute was read."""
        read = self.attributes
        return read is None or not read.isdisjoint((id(module), key) for key in (name, *WHOLE))

    def note_read(self, module: nn.Module, name: str, reader: FrameType) -> None:
        """An attribute is read; not ``__dict__`` by PyTorch, which looks for parameters there."""
        if self.attributes is not None and (name != "__dict__" or not is_ours(reader.f_code.co_filename)):
            self.attributes.add((id(module), name))


class CodeWatch:
    """Notes which of the user's code runs in this thread, for the length of a context, if that can be told.

    From Python 3.12 on that costs nothing to speak of. Before, tracing takes twice as long with it, and a debugger or a
    coverage tool that is there is left alone: then nothing is noted.

    Args:
        ran: Where it is noted.
        on_code: Called with its frame before code of the user's runs for the first time; may raise an error there.
        always: Code before which that is called each time.
    """

    def __init__(
        self,
        ran: Ran,
        on_code: Callable[[FrameType, list[FunctionType]], None],
        always: Container[CodeType] = frozenset(),
    ) -> None:
        self._ran, self._on_code, self._always = ran, on_code, always
        self._codes: set[CodeType] = set()
        self._functions: dict[int, list[FunctionType]] = {}  # by id of the code; those that have not run yet
        self._met: dict[int, CodeType] = {}  # by id: code that says the same in another place is equal
        self._thread = threading.get_ident()
        self._tool: int | None = None

    def __enter__(self) -> None:
        for function in objects_of_types([FunctionType]):
            if is_users(function.__code__.co_filename):
                self._functions.setdefault(id(function.__code__), []).append(function)
        if sys.version_info >= (3, 12):
            self._monitor()
        elif sys.gettrace() is None:
            self._ran.codes = self._codes
            sys.settrace(self._trace)

    def _monitor(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        for tool in (4, 3):  # those that no kind of tool is meant to take
            try:
                monitoring.use_tool_id(tool, "millstream")
            except ValueError:
                continue
            self._tool, self._ran.codes = tool, self._codes
            monitoring.register_callback(tool, monitoring.events.PY_START, self._start)
            monitoring.set_events(tool, monitoring.events.PY_START)
            monitoring.restart_events()
            return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if sys.version_info >= (3, 12):
            if self._tool is not None:
                monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
                monitoring.set_events(self._tool, 0)
                monitoring.register_callback(self._tool, monitoring.events.PY_START, None)
                monitoring.free_tool_id(self._tool)
        elif self._ran.codes is not None:
            is_watched = sys.gettrace() == self._trace  # the code has not set another, or none
            if is_watched:
                sys.settrace(None)
            if not is_watched or threading.Thread.start.__code__ in self._codes:  # nobody watched what that did
                self._ran.codes = None
        self._functions.clear()

    def _start(self, *_: Any) -> Any:
        if self._note(sys._getframe(1)):
            return None
        return sys.monitoring.DISABLE  # type: ignore[attr-defined, unused-ignore]

    def _trace(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._note(frame)

    def _note(self, frame: FrameType) -> bool:
        """Returns whether to be told of this code again: another function may have it, too, with another closure."""
        code = frame.f_code
        if threading.get_ident() != self._thread:
            self._codes.add(code)
            return id(code) not in self._met
        waiting, is_new = self._functions.get(id(code), []), id(code) not in self._met or code in self._always
        if not is_new and not (waiting and code.co_freevars):
            return False
        self._met[id(code)] = code
        self._codes.add(code)
        functions = functions_of(frame, waiting)
        for function in functions:
            waiting.remove(function)
        if is_users(code.co_filename) and (is_new or functions):
            self._on_code(frame, functions)
        return bool(waiting and code.co_freevars) or code in self._always


def functions_of(frame: FrameType, functions: list[FunctionType]) -> list[FunctionType]:
    """Those of ``functions``, all with the code of a frame, which the frame may have just begun to run."""
    return [function for function in functions if function.__globals__ is frame.f_globals and _fits(frame, function)]


def _fits(frame: FrameType, function: FunctionType) -> bool:
    """Whether a frame, at its beginning, has in its closure what ``function`` has."""
    names = frame.f_code.co_freevars
    local = frame.f_locals if names else {}
    with suppress(ValueError):  # a variable that was not assigned yet
        cells = zip(names, function.__closure__ or (), strict=True)
        return all(cell.cell_contents is local.get(name) for name, cell in cells)
    return False


def stand_in(frame: FrameType) -> FunctionType:
    """A function with the code and the globals of a frame, for one made meanwhile, or for code without a function."""
    cells = tuple(CellType() for _ in frame.f_code.co_freevars)
    return FunctionType(frame.f_code, frame.f_globals, frame.f_code.co_name, None, cells)
