"""Follow which of the user's code runs, and what it calls, as a recorder tells it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, CodeType, FrameType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

from torch import Generator

from millstream._torch.tracing import code_asking
from millstream.capture.effects.late_values import holds_token
from millstream.capture.lines import is_asked_by_user, is_ours, is_users
from millstream.capture.record.interpreter.instructions import unseen
from millstream.capture.record.interpreter.natives import owner_of
from millstream.capture.record.location import Location
from millstream.capture.state.extensions import takes_tensors
from millstream.capture.state.impure import ImpureCalls, beyond_library
from millstream.heap import frames_of_threads, instances


def name_of(place: Location) -> Any:
    """By what code tells a place: the name of a variable, attribute, or the key of an item."""
    return place.name if isinstance(place.holder, CellType) else place.key


@dataclass(slots=True)
class CodeWatch:
    """Tells of code that runs, and of what it calls. Whatever is called may raise an error there.

    Attributes:
        on_code: Called with its frame before code of the user's runs for the first time, or code that is watched each
            time.
        impure: Told of calls that a graph would not make again.
        has_found: Whether the step has found an object in C where the user has it; given it and its function, that is
            about to be called.
        on_opaque: Called with a frame that is about to call a method of an object in C whose state nobody can compare,
            with that and the object.
        on_text: Called with a frame of the user's that is about to call a method of text with tokens.
        on_extension: Called with a frame that is about to call a function of a C++ extension of PyTorch's, with that.
    """

    on_code: Callable[[FrameType], None]
    impure: ImpureCalls
    has_found: Callable[[Any, Any], bool]
    on_opaque: Callable[[FrameType, Any, Any], None]
    on_text: Callable[[FrameType], None]
    on_extension: Callable[[FrameType, Any], None]

    def begins(self, frame: FrameType) -> None:
        """Code is about to run."""
        self.impure.see(frame.f_code, frame.f_back)
        if is_users(frame.f_code.co_filename):
            self.on_code(frame)

    def calls(self, frame: FrameType, function: Any, arguments: tuple[Any, ...]) -> None:
        """A function is about to be called by code in ``frame``; of a method the object comes first."""
        if isinstance(function, FunctionType):
            self.impure.see(function.__code__, frame)
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
        elif is_opaque(owner) and name not in _BALANCED and self.has_found(owner, function):
            asking = beyond_library(frame)
            if asking is not None and is_asked_by_user(asking):
                self.on_opaque(asking, function, owner)


def is_opaque(value: Any) -> bool:
    """Return whether it is in C, and has state that can be neither compared nor put back."""
    return isinstance(value, (Generator, *_LOCKS)) or type(value).__module__ in _OPAQUE


_LOCKS = (type(threading.Lock()), type(threading.RLock()))

_OPAQUE = frozenset(
    """
    _hashlib _blake2 _sha1 _sha2 _sha3 _md5 _hmac zlib _bz2 _lzma _multiprocessing _asyncio _socket sqlite3 mmap select
    """.split()
)
"""Modules in C of objects like that."""

_PUTTING_TOGETHER = frozenset({"format", "format_map", "join"})
"""Methods of text that keep what is in it as it is."""

_BALANCED = frozenset({"__enter__", "__exit__"})
"""Methods of locks that a block undoes at its end."""


def others_may_write() -> bool:
    """Whether there are other threads that may run the user's code, as some of PyTorch's and of ours never do."""
    here = threading.get_ident()
    with frames_of_threads() as frames:
        return any(ident != here and _may_run_users(frame) for ident, frame in frames.items())


def _may_run_users(frame: FrameType | None) -> bool:
    """Whether a thread with this innermost frame was begun by somebody else than PyTorch and us, or for the user."""
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    began = next((file for file in reversed(files) if file != threading.__file__), "")
    return not is_ours(began) or began.endswith(_FOR_USERS)


_FOR_USERS = ("data/passes/worker.py", "results/fetcher.py")
"""Files of ours with threads that call what a user has given: sources, transforms and callbacks."""


def function_asking(func: Any, frame: FrameType) -> Any:
    """Return what a mode, or a tensor, is to call that ``frame`` asks to call ``func``.

    What has been replaced by that.
    """
    code = code_asking(func, frame)
    return func if code is None else unseen(_function_of, code) or func


@functools.lru_cache(maxsize=64)
def _function_of(code: CodeType) -> FunctionType | None:
    return next((each for each in instances([FunctionType]) if each.__code__ is code), None)
