"""Calls of what gives something else each time, or writes to the world: a graph would not make them again."""

from __future__ import annotations

import _locale
import _thread
import bdb
import datetime
import decimal
import gc
import io
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from _lsprof import Profiler
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any

import torch

from millstream._torch.modes.switches import SETTERS
from millstream.capture.lines import is_pythons, is_users_own


class ImpureCalls:
    """Tells of such calls.

    Args:
        is_new: Whether the step has made an object: to what it has made it may write.
        on_impure: Called with a frame of the user's that is about to make such a call, with what is read or written and
            whether it is written; may raise an error there.
        on_stop: Called with a frame of the user's that starts a debugger; likewise.
        on_switch: Called with a frame that is about to set a switch of PyTorch's.
    """

    def __init__(
        self,
        is_new: Callable[[Any], bool],
        on_impure: Callable[[FrameType, str, bool], None],
        on_stop: Callable[[FrameType], None],
        on_switch: Callable[[FrameType], None],
    ) -> None:
        self._is_new, self._on_impure, self._on_stop, self._on_switch = is_new, on_impure, on_stop, on_switch
        self._in_python: dict[CodeType, Callable[[FrameType], None]] = {
            **{code: partial(self._tell, what=what, is_written=False) for code, what in _READING.items()},
            **{code: partial(self._tell, what=what, is_written=True) for code, what in _starting().items()},
            bdb.Bdb.__init__.__code__: self._note_stop,
            torch.save.__code__: self._note_save,
        }

    def see(self, code: CodeType, frame: FrameType | None) -> None:
        """Code is about to be run by a frame."""
        note = self._in_python.get(code)
        if note is not None and frame is not None:
            note(frame)

    def see_call(self, frame: FrameType, function: Any, owner: Any) -> None:
        """A function in C is about to be called, of a method with its object."""
        if getattr(function, "__name__", "") not in _NAMES:
            return
        try:
            hash(function)
        except TypeError:  # an object that is called, of a class of the user's or of PyTorch's bindings
            return
        if function in _STOPPING:
            self._note_stop(frame)
        if function in _SETTERS:
            self._on_switch(frame)
        what, is_written = self._told_of(function, owner)
        if not what:
            return
        if (asking := asking_of(frame, is_written=is_written)) is not None:
            self._on_impure(asking, what, is_written)

    def _told_of(self, function: Any, owner: Any) -> tuple[str, bool]:
        """Return what a function in C reads or writes, if anything that the step has not made itself.

        Whether it writes.
        """
        name, kind = function.__name__, type(owner)
        if function in _FUNCTIONS:
            return _FUNCTIONS[function]
        if isinstance(owner, type) and name in _OF_CLASSES:
            return _OF_CLASSES[name], False
        if name in _SWITCHES and isinstance(owner, Profiler):
            return PROFILER, True
        if name in _READERS and isinstance(owner, io.IOBase) and not self._made(owner):
            return "a file", False
        if name in _WRITING.get(kind.__module__, ()) and not self._made(owner):
            return f"{kind.__module__.strip('_')}.{kind.__qualname__}", True
        return "", False

    def _made(self, owner: Any) -> bool:
        """Return whether it is in memory, and made by the step."""
        return type(owner) in _writer_kinds() and self._is_new(owner)

    def _tell(self, frame: FrameType, what: str, is_written: bool) -> None:
        asking = beyond_library(frame)
        if asking is not None and is_users_own(asking.f_code.co_filename):
            self._on_impure(asking, what, is_written)

    def _note_save(self, frame: FrameType) -> None:
        self._on_impure(frame, "a file", True)

    def _note_stop(self, frame: FrameType) -> None:
        """A debugger is about to stop in the user's code, in which it says so itself."""
        asking: FrameType | None = frame
        while asking is not None and not is_users_own(asking.f_code.co_filename):
            asking = asking.f_back
        if asking is not None:
            self._on_stop(asking)


def asking_of(frame: FrameType, *, is_written: bool) -> FrameType | None:
    """The frame of the user's for which a frame reads or writes what a graph would not; ``None`` where it may."""
    asking = beyond_library(frame)
    if asking is None or not is_users_own(asking.f_code.co_filename):
        return None
    harmless = _HARMLESS_WRITERS if is_written else _HARMLESS
    names = (each.f_globals.get("__name__", "") for each in _between(frame, asking))
    return None if any(name.startswith(harmless) for name in names) else asking


def beyond_library(frame: FrameType | None) -> FrameType | None:
    """The frame, or if it runs code of Python's library the nearest one that has called it and doesn't."""
    while frame is not None and is_pythons(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _between(frame: FrameType | None, last: FrameType) -> Iterator[FrameType]:
    while frame is not None and frame is not last:
        yield frame
        frame = frame.f_back


def _writer_kinds() -> set[type]:
    """Classes of objects in memory to which a step may write that has made them."""
    kinds: set[type] = {io.StringIO, io.BytesIO, pickle.Pickler}
    if (module := sys.modules.get("_csv")) is not None:
        kinds.add(module.Writer if hasattr(module, "Writer") else type(module.writer(io.StringIO())))
    return kinds


STARTED = frozenset({"a thread", "a process", "work elsewhere"})
"""What a step may start that does something besides."""

PROFILER = "a profiler"
"""What a step may start or stop, which sees what a graph does not do again."""

_CLOCKS = """
    time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns thread_time
    thread_time_ns clock_gettime clock_gettime_ns localtime gmtime ctime asctime strftime
    """.split()

_FUNCTIONS: dict[Any, tuple[str, bool]] = {
    **{getattr(time, name): ("a clock", False) for name in _CLOCKS if hasattr(time, name)},
    **dict.fromkeys((datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today), ("a clock", False)),
    **dict.fromkeys((datetime.date.today, os.times), ("a clock", False)),
    **dict.fromkeys((open, os.open, os.listdir, os.scandir, os.stat, input), ("a file", False)),
    os.urandom: ("the system's randomness", False),
    **{
        getattr(module, name): (f"{module.__name__.strip('_')}.{name}()", False)
        for module, names in {
            os: "getcwd getcwdb getpriority getloadavg umask times",
            gc: "isenabled get_threshold get_count get_stats get_objects get_referrers",
            sys: "getrecursionlimit getswitchinterval getrefcount gettrace _current_frames",
            signal: "getitimer",
            weakref: "getweakrefcount getweakrefs",
            decimal: "getcontext",
            _locale: "setlocale localeconv",
        }.items()
        for name in names.split()
        if isinstance(getattr(module, name, None), BuiltinFunctionType)
    },
    **{
        getattr(os, name): (f"os.{name}()", True)
        for name in "write writev pwrite sendfile remove unlink rename replace mkdir rmdir system kill putenv".split()
        if hasattr(os, name)
    },
    **{getattr(os, name): ("a process", True) for name in ("fork", "forkpty") if hasattr(os, name)},
    _thread.start_new_thread: ("a thread", True),
    sys.setprofile: (PROFILER, True),
    pickle.dump: ("a file", True),
}
"""Functions in C that give something else each time or write, what they read or write, and whether they write."""

_OF_CLASSES = {"__subclasses__": "which subclasses a class has"}
"""Methods of classes that read what belongs to no place of theirs."""

_READERS = frozenset({"read", "readline", "readlines", "readinto", "getvalue"})
"""Methods of files."""

_SWITCHES = frozenset({"enable", "disable"})
"""Methods of cProfile's profiler."""

_HARMLESS = (
    *("logging", "tqdm", "warnings", "traceback", "linecache", "tokenize", "importlib", "_frozen_importlib"),
    *("threading", "queue", "concurrent", "multiprocessing", "asyncio", "selectors", "subprocess"),
)
"""Modules that read clocks and files for what they print only, for how long they wait, or for code."""

_WRITING: dict[str, frozenset[str]] = {
    "_csv": frozenset({"writerow", "writerows"}),
    "_io": frozenset({"write", "writelines", "seek", "truncate"}),
    "_pickle": frozenset({"dump"}),
    "sqlite3": frozenset({"execute", "executemany", "executescript", "commit"}),
    "_socket": frozenset({"send", "sendall", "sendto", "sendmsg"}),
    "socket": frozenset({"send", "sendall", "sendto", "sendmsg"}),
    "mmap": frozenset({"write", "write_byte"}),
}
"""By module, methods in C of objects that nobody can compare, by which something is written."""

_HARMLESS_WRITERS = ("logging", "tqdm", "warnings", "traceback", "importlib", "_frozen_importlib", "multiprocessing")
"""Modules whose writing is recorded otherwise, or is none of the step's."""

_STOPPING = (breakpoint, sys.settrace)
"""Functions in C by which code asks for a debugger."""

_SETTERS = frozenset(getattr(torch._C, name) for name in SETTERS)
"""Functions in C that set PyTorch's switches."""

_NAMES = _READERS.union(
    _SWITCHES, _OF_CLASSES, *_WRITING.values(), SETTERS, (each.__name__ for each in (*_FUNCTIONS, *_STOPPING))
)

_READING: dict[CodeType, str] = {
    getattr(owner, name).__code__: what or f"{owner.__name__}.{name}()"
    for owner, names, what in (
        (type(os.environ), "__iter__ __len__", "which environment variables there are"),
        (torch, "initial_seed", ""),
        (threading, "active_count enumerate", ""),
        (signal, "getsignal", ""),
    )
    for name in names.split()
}
"""Code that gives settings which no guard compares, and what it reads."""

_STARTING = (
    ("threading", "Thread", "start", "a thread"),
    ("multiprocessing.process", "BaseProcess", "start", "a process"),
    ("subprocess", "Popen", "__init__", "a process"),
    ("multiprocessing.pool", "Pool", "_check_running", "work elsewhere"),  # which all of its methods begin with
    ("concurrent.futures.thread", "ThreadPoolExecutor", "submit", "work elsewhere"),
    ("concurrent.futures.process", "ProcessPoolExecutor", "submit", "work elsewhere"),
    ("torch.profiler", "profile", "__enter__", PROFILER),
    ("torch.profiler", "profile", "start", PROFILER),
    ("torch.autograd.profiler", "profile", "__enter__", PROFILER),
)
"""Module, class and method by which a program starts one of these."""


def _starting() -> dict[CodeType, str]:
    loaded = ((getattr(sys.modules.get(module), kind, None), name, what) for module, kind, name, what in _STARTING)
    return {getattr(kind, name).__code__: what for kind, name, what in loaded if kind is not None}
