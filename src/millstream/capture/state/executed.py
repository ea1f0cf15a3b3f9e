"""Which of the user's code runs, and what it calls, as a recorder tells it."""

from __future__ import annotations

import functools
import gc
import logging
import sys
import threading
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass, field
from types import CellType, CodeType, FrameType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

from millstream._torch.tracing import code_asking
from millstream.capture.effects.values import holds_token
from millstream.capture.lines import is_asked_by_user, is_ours, is_users, is_users_own
from millstream.capture.record.location import Location
from millstream.capture.record.natives import owner_of
from millstream.capture.record.session import unseen
from millstream.capture.state.extensions import takes_tensors
from millstream.capture.state.impure import ImpureCalls, beyond_library
from millstream.heap import instances


def name_of(place: Location) -> Any:
    """By what code tells a place: the name of a variable, attribute, or the key of an item."""
    return place.name if isinstance(place.holder, CellType) else place.key


@dataclass(slots=True)
class CodeWatch:
    """Tells of code that runs, and of what it calls. Whatever is called may raise an error there.

    Attributes:
        is_new: Whether the step has made a function.
        on_code: Called with its frame before code of the user's runs for the first time, or code that is watched each
            time, and with the functions that it may be, as far as they were there before; with the frame that calls,
            where the code is known and another function has it.
        impure: Told of calls that a graph would not make again.
        opaque: Gives the ids of objects in C whose state nobody can compare.
        on_opaque: Called with a frame that is about to call a method of one, with that and its object.
        on_text: Called with a frame of the user's that is about to call a method of text with tokens.
        on_extension: Called with a frame that is about to call a function of a C++ extension of PyTorch's, with that.
    """

    is_new: Callable[[Any], bool]
    on_code: Callable[[FrameType, list[FunctionType]], None]
    impure: ImpureCalls
    opaque: Callable[[], Container[int]]
    on_opaque: Callable[[FrameType, Any, Any], None]
    on_text: Callable[[FrameType], None]
    on_extension: Callable[[FrameType, Any], None]
    _met: dict[int, FunctionType] = field(default_factory=dict)  # by id
    _begun: set[CodeType] = field(default_factory=set)
    _called: FunctionType | None = None  # the last one

    def begins(self, frame: FrameType) -> None:
        """Code is about to run."""
        code = frame.f_code
        self.impure.see(code, frame.f_back)
        self._begun.add(code)
        if not is_users(code.co_filename):
            return
        functions: list[Any]
        if self._called is not None and self._called.__code__ is code:
            functions = [self._called]
        else:  # something in C calls it
            functions = _functions_of(frame) if code.co_freevars else []
        self.on_code(frame, [each for each in functions if not self.is_new(each)])

    def calls(self, frame: FrameType, function: Any, arguments: tuple[Any, ...]) -> None:
        """A function is about to be called by code in ``frame``; of a method the object comes first."""
        if isinstance(function, FunctionType):
            self.impure.see(function.__code__, frame)
            self._called, is_met = function, id(function) in self._met
            self._met[id(function)] = function
            code = function.__code__
            is_another = not is_met and code.co_freevars and code in self._begun and is_users(code.co_filename)
            if is_another and not self.is_new(function):  # with another closure
                self.on_code(frame, [function])
            return
        owner, name = owner_of(function), getattr(function, "__name__", "")
        if owner is None and isinstance(function, MethodDescriptorType | WrapperDescriptorType):
            owner = next(iter(arguments), None)
        self.impure.see_call(frame, function, owner)
        if takes_tensors(function):
            self.on_extension(frame, function)
        if type(owner) is str and name not in _PUTTING_TOGETHER and is_users(frame.f_code.co_filename):
            if holds_token(owner):
                self.on_text(frame)
        elif id(owner) in self.opaque() and name not in _BALANCED:
            asking = beyond_library(frame)
            if asking is not None and is_asked_by_user(asking):
                self.on_opaque(asking, function, owner)


_PUTTING_TOGETHER = frozenset({"format", "format_map", "join"})
"""Methods of text that keep what is in it as it is."""

_BALANCED = frozenset({"__enter__", "__exit__"})
"""Methods of locks that a block undoes at its end."""


def _is_made_for_library(frame: FrameType) -> bool:
    """Whether its code was made from text, as methods of data classes are, for a module that is none of the user's."""
    if not frame.f_code.co_filename.startswith("<"):
        return False
    file = getattr(sys.modules.get(frame.f_globals.get("__name__", "")), "__file__", None)
    return file is not None and not is_users(file)


def _is_pytorchs_affair(frame: FrameType) -> bool:
    """Whether code of some library is no part of a step: PyTorch calculates sizes or logs by it."""
    outer, is_logging = frame.f_back, False
    while outer is not None and not is_ours(outer.f_code.co_filename):
        if is_users_own(outer.f_code.co_filename) and not _is_made_for_library(outer):
            return False
        is_logging |= outer.f_code.co_filename == logging.__file__
        outer = outer.f_back
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return outer is not None and (is_logging or package in _FOR_SIZES)


_FOR_SIZES = ("sympy", "mpmath")
"""Packages by which PyTorch calculates with sizes that have no value yet."""


def is_of_library_in_step(frame: FrameType) -> bool:
    """Whether a frame runs code of a library that the step has called, if by code of PyTorch's such as a module's."""
    return not is_users_own(frame.f_code.co_filename) and not _is_pytorchs_affair(frame)


def others_may_write() -> bool:
    """Whether there are other threads that may run the user's code, as some of PyTorch's and of ours never do."""
    here = threading.get_ident()
    return any(ident != here and _may_run_users(frame) for ident, frame in sys._current_frames().items())


def _may_run_users(frame: FrameType | None) -> bool:
    """Whether a thread with this innermost frame was begun by somebody else than PyTorch and us, or for the user."""
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    began = next((file for file in reversed(files) if file != threading.__file__), "")
    return not is_ours(began) or began.endswith(_FOR_USERS)


_FOR_USERS = ("data/worker.py", "results/fetcher.py")
"""Files of ours with threads that call what a user has given: sources, transforms and callbacks."""


def function_asking(func: Any, frame: FrameType) -> Any:
    """What a mode, or a tensor, is to call that ``frame`` asks to call ``func``: what has been replaced by that."""
    code = code_asking(func, frame)
    return func if code is None else unseen(_function_of, code) or func


@functools.lru_cache(maxsize=64)
def _function_of(code: CodeType) -> FunctionType | None:
    return next((each for each in instances([FunctionType]) if each.__code__ is code), None)


def _functions_of(frame: FrameType) -> list[FunctionType]:
    """Functions that a frame may have just begun to run."""
    known = (each for each in gc.get_referrers(frame.f_code) if type(each) is FunctionType)
    return [function for function in known if function.__globals__ is frame.f_globals and _fits(frame, function)]


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
