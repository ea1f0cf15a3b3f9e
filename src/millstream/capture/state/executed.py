"""Which of the user's code runs, and which attributes of modules are read: what did not run was not read.

A method of the user's own trainer may be found by its name alone, as ``train`` is by ``self.model.train()``. What such
code would read need not be the same in each call.
"""

from __future__ import annotations

import _locale
import bdb
import contextlib
import datetime
import decimal
import gc
import io
import logging
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    TracebackType,
)
from typing import Any, TypeVar

import torch
from torch import nn

from millstream.capture.effects.values import holds_token
from millstream.capture.lines import is_asked_by_user, is_ours, is_part_of_models, is_pythons, is_users, is_users_own
from millstream.capture.state.code import (
    MUTATING,
    NAMESPACES,
    WITHOUT_ATTRIBUTES,
    Reach,
    computes_a_global,
    modules_handed_on,
    nameable,
    nameable_from,
    reach_of,
    stores_of,
)
from millstream.capture.state.location import Location
from millstream.heap import objects_of_types

T = TypeVar("T")

WHOLE = ("__dict__", "__getstate__")
"""Attributes with all others in them; the second is what copies are made from."""


def name_of(place: Location) -> Any:
    """By what code tells a place: the name of a variable, attribute, or the key of an item."""
    return place.name if isinstance(place.holder, CellType) else place.key


@dataclass
class Ran:
    """What ran; ``None`` where nobody has watched."""

    codes: set[CodeType] | None = None  # code of functions
    # of modules, by id and name of the attribute that was read; ``__dict__`` stands for all of them
    attributes: dict[tuple[int, str], nn.Module] | None = None
    # by id, objects any of whose attributes may have been read, by code that computes their names
    computed: dict[int, Any] = field(default_factory=dict)
    variables: set[str] = field(default_factory=set)  # names of environment variables that were read
    # code that may have written to objects of the user's, and whether also under names that do not stand in it
    writers: dict[CodeType, bool] = field(default_factory=dict)
    # by id, containers of which methods were called that change them, and by what code, on which line
    filled: dict[int, tuple[CodeType, int]] = field(default_factory=dict)

    def may_have_run(self, code: CodeType) -> bool:
        """Whether that code may have run."""
        return self.codes is None or code in self.codes

    def may_have_stored(self, place: Location, *, is_item: bool) -> bool:
        """Whether something may have been put there; ``is_item``: by its key, and not as an attribute or variable."""
        if self.codes is None:
            return True
        key = name_of(place)
        stores = [(stores_of(code), is_open) for code, is_open in self.writers.items()]
        if is_item:
            return any(key in each.keys or (is_open and each.any_item) for each, is_open in stores)
        return any(
            key in each.globals or key in each.attributes or (is_open and each.any_name) for each, is_open in stores
        )

    def only_counts(self, place: Location) -> bool:
        """Whether a number there can have become another in no other way than by ``+=`` and the like."""
        key = name_of(place)
        stores = [(stores_of(code), is_open) for code, is_open in self.writers.items()]
        return not any(
            key in each.assigned or (is_open and (each.any_name or each.any_item)) for each, is_open in stores
        )

    def may_have_filled(self, container: Any) -> bool:
        """Whether what is in a container may have been changed."""
        if self.codes is None or id(container) in self.filled:
            return True
        return any(stores_of(code).fills for code, is_open in self.writers.items() if is_open)

    def where_stored(self, place: Location) -> str:
        """``file:line`` of the user's that has changed what is there, where only one can have been it."""
        code, line = self.filled.get(id(place.holder), (None, 0))
        found = set() if code is None or place.key is not None else {(code.co_filename, line)}
        for name in (str(name_of(place)), str(None)):
            found = found or {
                (code.co_filename, line) for code in self.writers for line in stores_of(code).lines.get(name, ())
            }
        own = [f"{file}:{line}" for file, line in found if is_users_own(file)]
        return own[0] if len(own) == 1 else ""

    def has_read(self, module: nn.Module, name: str) -> bool:
        """Whether that attribute was read."""
        read = self.attributes
        return read is None or any((id(module), key) in read for key in (name, *WHOLE))

    def note_read(self, module: nn.Module, name: str, reader: FrameType) -> None:
        """An attribute is read; not ``__dict__`` by PyTorch, which looks for parameters there."""
        if self.attributes is not None and (name != "__dict__" or not is_ours(reader.f_code.co_filename)):
            self.attributes[id(module), name] = module


@contextlib.contextmanager
def record_module_reads(on_forward: Callable[[nn.Module], None], ran: Ran) -> Iterator[None]:
    """Note which attributes of modules this thread reads, or looks for in vain: the graph depends on them.

    ``on_forward`` is told of every module that is about to be called. For the length of the context ``nn.Module`` has a
    ``__getattribute__`` of its own.
    """
    thread = threading.get_ident()

    def read(module: nn.Module, name: str) -> Any:
        if threading.get_ident() == thread:
            ran.note_read(module, name, sys._getframe(1))
            if name == "forward":
                on_forward(module)
        return object.__getattribute__(module, name)

    nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del nn.Module.__getattribute__


class CodeWatch:
    """Notes which code runs in this thread and what it reads unseen, for the length of a context, if that can be told.

    It is a profiler of Python's: where another one is at work it leaves that alone, and nothing is noted. Debuggers and
    coverage tools don't matter to it. Each call takes several times as long with it, so what can't lead to code of the
    user's is best called by ``unwatched``.

    Args:
        ran: Where it is noted.
        on_code: Called with its frame before code of the user's runs for the first time; may raise an error there.
        on_impure: Called with a frame that is about to call what gives something else each time (``IMPURE``) or what
            writes to the world (``WRITING``), with what that is and whether it writes; may raise an error there.
        always: Code before which ``on_code`` is called each time.
        opaque: Gives the ids of objects in C whose state nobody can compare.
        on_opaque: Called with a frame that is about to call a method of one, with that; may raise an error there.
        on_text: Called with a frame of the user's that is about to call a method of text with tokens; likewise.
        on_stop: Called with a frame of the user's that starts a debugger; likewise.
        on_event: Called at each call and each return, if it is given.
        on_computed: Called with objects of which code may read attributes by names that it computes, before it does as
            far as that can be told; may raise an error there.
    """

    def __init__(  # noqa: PLR0913  what is told of each kind of event, each with a default
        self,
        ran: Ran,
        on_code: Callable[[FrameType, list[FunctionType]], None],
        on_impure: Callable[[FrameType, str, bool], None] = lambda frame, what, is_written: None,
        always: Container[CodeType] = frozenset(),
        opaque: Callable[[], Container[int]] = frozenset,
        on_opaque: Callable[[FrameType, Any], None] = lambda frame, function: None,
        on_text: Callable[[FrameType], None] = lambda frame: None,
        on_stop: Callable[[FrameType], None] = lambda frame: None,
        on_event: Callable[[], None] | None = None,
        on_computed: Callable[[list[Any]], None] = lambda objects: None,
    ) -> None:
        self._ran, self._on_code, self._on_impure, self._always = ran, on_code, on_impure, always
        self._opaque, self._on_opaque, self._on_text, self._on_stop = opaque, on_opaque, on_text, on_stop
        self._on_event, self._on_computed = on_event, on_computed
        self._codes: set[CodeType] = set()
        self._functions: dict[int, list[FunctionType]] = {}  # by id of the code; those that have not run yet
        self._met: dict[int, CodeType] = {}  # by id: code that says the same in another place is equal
        self._thread = threading.get_ident()
        self._again: set[int] = set()  # by id: code that is looked at in each call
        self._reaching: set[int] = set()  # likewise: that may read attributes by names that it computes
        self._early: set[int] = set()  # those of it that may change what such an attribute holds
        self._computing: dict[tuple[Any, ...], Any] = {}  # code and ids of the objects in its variables; and these
        self._outer: Any = None
        self._writers: list[Any] = []  # what was there before and may be written to
        self._collecting: FrameType | None = None  # what Python's collector calls, which is none of the step's
        self._profile = self._notice  # one object, to be known again
        self._starting = _starting()

    def __enter__(self) -> None:
        self._outer = sys.getprofile()
        if self._outer is not None and not isinstance(getattr(self._outer, "__self__", None), CodeWatch):
            return
        kinds = _writer_kinds()
        for function in objects_of_types([FunctionType, *kinds]):
            if type(function) is not FunctionType:
                self._writers.append(function)
            elif is_users(function.__code__.co_filename):
                self._functions.setdefault(id(function.__code__), []).append(function)
        self._ran.codes = self._codes
        sys.setprofile(self._profile)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ran.codes is None:
            return
        is_watched = sys.getprofile() is self._profile  # the code has not set another, or none
        if is_watched:
            sys.setprofile(self._outer)
        if not is_watched or threading.Thread.start.__code__ in self._codes:  # nobody watched what that did
            self._ran.codes = None
        self._functions.clear()
        self._writers.clear()

    def _notice(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._on_event is not None:
            self._on_event()
        # Of every call there is: code is told by its id, as to hash it takes a look into all of it.
        code = id(frame.f_code)
        if self._collecting is not None:
            if event == "return" and frame is self._collecting:
                self._collecting = None
        elif event == "call":
            if code not in self._met or code in self._again:
                self._note(frame)
            if code in self._early:
                self._note_computed(frame, reach_of(frame.f_code))
        elif event == "c_call":
            self._note_call(frame, arg)
        elif event == "return":
            if code in self._reaching:
                self._note_computed(frame, reach_of(frame.f_code))
            if frame.f_back is not None and id(frame.f_back.f_code) in self._early:
                self._note_given(frame.f_back, arg)
        if self._outer is not None:
            self._outer(frame, event, arg)

    def _note_call(self, frame: FrameType, function: Any) -> None:
        """A function in C is about to be called."""
        name = function.__name__
        if function is globals and computes_a_global(frame) and is_users_own(frame.f_code.co_filename):
            self._on_impure(frame, "a global whose name it computes", False)
        if name in _NAMES:
            self._note_impure(frame, function)
        if function is getattr and id(frame.f_code) in self._early:
            self._note_computed(frame, reach_of(frame.f_code))
        owner = function.__self__
        if name in MUTATING:
            self._ran.filled[id(owner)] = frame.f_code, frame.f_lineno
        is_text = type(owner) is str and name not in _PUTTING_TOGETHER and is_users(frame.f_code.co_filename)
        if is_text and holds_token(owner) and threading.get_ident() == self._thread:
            self._on_text(frame)
        if id(owner) in self._opaque() and name not in _BALANCED:
            asking = _beyond_library(frame)
            if asking is not None and threading.get_ident() == self._thread and is_asked_by_user(asking):
                self._on_opaque(asking, function)

    def _note_computed(self, frame: FrameType, reach: Reach) -> None:
        values = [value for value in frame.f_locals.values() if not isinstance(value, WITHOUT_ATTRIBUTES)]
        known = (frame.f_code, *map(id, values))
        if known not in self._computing:
            self._computing[known] = values
            kinds = NAMESPACES if reach is Reach.NAMESPACES else object
            objects = [each for each in nameable(frame) if isinstance(each, kinds)]
            if reach >= Reach.NAMED:
                objects += modules_handed_on(frame)
            self._add_computed(frame, objects)

    def _note_given(self, frame: FrameType, value: Any) -> None:
        """Code that computes names is given something by what it calls, whose attributes they may be."""
        if not isinstance(value, WITHOUT_ATTRIBUTES) and id(value) not in self._ran.computed:
            self._add_computed(frame, [*nameable_from(frame, [value])])

    def _add_computed(self, frame: FrameType, objects: list[Any]) -> None:
        new = [each for each in objects if id(each) not in self._ran.computed]
        self._ran.computed.update((id(each), each) for each in new)
        if new and id(frame.f_code) in self._early and is_asked_by_user(frame):
            self._on_computed(new)

    def _note_variable(self, frame: FrameType) -> None:
        if threading.get_ident() == self._thread and is_asked_by_user(_beyond_library(frame)):
            self._ran.variables.add(str(frame.f_locals.get("key")))

    def _note_impure(self, frame: FrameType, function: Any) -> None:
        if function in _STOPPING:
            self._note_stop(frame)
        what, is_written = IMPURE.get(function), False
        if what is None and isinstance(function.__self__, type):
            what = _OF_CLASSES.get(function.__name__)
        if what is None and function.__name__ in _READERS and isinstance(function.__self__, io.IOBase):
            what = None if self._is_new(function.__self__) else "a file"
        if what is None:
            what, is_written = self._written_by(function), True
        if what is None:
            return
        asking = _beyond_library(frame)
        harmless = _HARMLESS_WRITERS if is_written else _HARMLESS
        if (
            threading.get_ident() == self._thread
            and asking is not None
            and is_users_own(asking.f_code.co_filename)
            and not any(each.f_globals.get("__name__", "").startswith(harmless) for each in _between(frame, asking))
        ):
            self._on_impure(asking, what, is_written)

    def _note_stop(self, frame: FrameType) -> None:
        """A debugger is about to stop in the user's code, in which it says so itself."""
        asking: FrameType | None = frame
        while asking is not None and not is_users_own(asking.f_code.co_filename):
            asking = asking.f_back
        if asking is not None and threading.get_ident() == self._thread:
            self._on_stop(asking)

    def _written_by(self, function: Any) -> str | None:
        """What a function in C writes to, unless that was made while this watches."""
        owner = function.__self__
        if function.__name__ not in WRITING.get(type(owner).__module__, ()):
            return WRITING_FUNCTIONS.get(function)
        kind = type(owner)
        return None if self._is_new(owner) else f"{kind.__module__.strip('_')}.{kind.__qualname__}"

    def _is_new(self, owner: Any) -> bool:
        """Whether something in memory to which one writes was made while this watches."""
        if type(owner) not in _writer_kinds() or any(owner is each for each in self._writers):
            return False
        return any(owner is each for each in objects_of_types([type(owner)]))  # or ``gc.freeze()`` hides it

    def _note_writer(self, frame: FrameType) -> bool:
        """Note code that may write to objects of the user's; returns whether to look at it again."""
        code, file = frame.f_code, frame.f_code.co_filename
        is_theirs = is_users(file) and not _is_made_for_library(frame) and not _is_pytorchs_affair(frame)
        is_library = not is_theirs and (is_pythons(file) or file.startswith("<"))
        if not (is_library or is_theirs or is_part_of_models(file)):
            return False
        stores = stores_of(code)
        is_telling = stores.any_name or stores.any_item
        is_open = is_theirs or self._ran.writers.get(code, False)
        is_open = is_open or (is_library and is_telling and is_asked_by_user(frame))
        self._ran.writers[code] = is_open
        return is_library and is_telling and not is_open

    def _is_asked_again(self, code: CodeType) -> bool:
        return (
            code is _ENVIRONMENT
            or code is _DEBUGGER
            or code in _SETTINGS
            or code in self._starting
            or code in self._always
        )

    def _note(self, frame: FrameType) -> None:
        code = frame.f_code
        if code in _codes_of_collector():
            self._again.add(id(code))
            self._met[id(code)] = code
            self._collecting = frame
            return
        if code is _ENVIRONMENT and frame.f_locals.get("self") is os.environ:
            self._note_variable(frame)
        if code in _SETTINGS and threading.get_ident() == self._thread:
            asking = _beyond_library(frame) if code in _LISTING else frame.f_back
            if asking is not None and is_users_own(asking.f_code.co_filename):
                self._on_impure(asking, _SETTINGS[code], False)
        if code is _DEBUGGER:
            self._note_stop(frame)
        if code in self._starting and threading.get_ident() == self._thread:
            asking = _beyond_library(frame)
            if asking is not None and is_users_own(asking.f_code.co_filename):
                self._on_impure(asking, self._starting[code], True)
        if code is _SAVE and threading.get_ident() == self._thread and frame.f_back is not None:
            self._on_impure(frame.f_back, "a file", True)
        waiting, is_new = self._functions.get(id(code), []), id(code) not in self._met or code in self._always
        self._met[id(code)] = code
        self._codes.add(code)
        functions = functions_of(frame, waiting)
        for function in functions:
            waiting.remove(function)
        is_again = self._note_writer(frame)
        # Another function may have the code, with another closure.
        is_again = is_again or (waiting and code.co_freevars) or self._is_asked_again(code)
        (self._again.add if is_again else self._again.discard)(id(code))
        reach = reach_of(code) if is_users(code.co_filename) else Reach.NONE
        self._reaching |= {id(code)} if reach else set()
        self._early |= {id(code)} if reach >= Reach.NAMED else set()
        if is_users(code.co_filename) and (is_new or functions):
            self._on_code(frame, functions)


def _is_made_for_library(frame: FrameType) -> bool:
    """Whether its code was made from text, as methods of data classes are, for a module that is none of the user's."""
    if not frame.f_code.co_filename.startswith("<"):
        return False
    file = getattr(sys.modules.get(frame.f_globals.get("__name__", "")), "__file__", None)
    return file is not None and not is_users(file)


def _codes_of_collector() -> Iterator[CodeType]:
    """Code that Python's collector calls, at whatever moment it is at work."""
    for each in gc.callbacks:
        function = getattr(each, "__func__", each)  # of a method
        function = function if isinstance(function, FunctionType) else getattr(type(each), "__call__", None)  # noqa: B004  what it is
        if isinstance(function, FunctionType):
            yield function.__code__


def _is_pytorchs_affair(frame: FrameType) -> bool:
    """Whether code of some library is no part of a step: PyTorch calculates sizes or logs by it."""
    outer, is_logging = frame.f_back, False
    while outer is not None and not is_ours(outer.f_code.co_filename):
        if is_users_own(outer.f_code.co_filename):
            return False
        is_logging |= outer.f_code.co_filename == logging.__file__
        outer = outer.f_back
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return outer is not None and (is_logging or package in _FOR_SIZES)


_FOR_SIZES = ("sympy", "mpmath")
"""Packages by which PyTorch calculates with sizes that have no value yet."""


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


def unwatched(function: Callable[..., T], *args: Any) -> T:
    """Call a function of which no ``CodeWatch`` is to note anything."""
    watch = sys.getprofile()
    if not isinstance(getattr(watch, "__self__", None), CodeWatch):
        return function(*args)
    sys.setprofile(None)
    try:
        return function(*args)
    finally:
        sys.setprofile(watch)


_CLOCKS = """
    time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns thread_time
    thread_time_ns clock_gettime clock_gettime_ns localtime gmtime ctime asctime strftime
    """.split()

IMPURE: dict[Any, str] = {
    **{getattr(time, name): "a clock" for name in _CLOCKS if hasattr(time, name)},
    **dict.fromkeys((datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today), "a clock"),
    **dict.fromkeys((datetime.date.today, os.times), "a clock"),
    **dict.fromkeys((open, os.open, os.listdir, os.scandir, os.stat, input), "a file"),
    os.urandom: "the system's randomness",
    torch.get_num_threads: "torch.get_num_threads()",
    **{
        getattr(module, name): f"{module.__name__.strip('_')}.{name}()"
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
}
"""Functions in C that give something else each time, and what they read."""

_OF_CLASSES = {"__subclasses__": "which subclasses a class has"}
"""Methods of classes that read what belongs to no place of theirs."""

_PUTTING_TOGETHER = frozenset({"format", "format_map", "join"})
"""Methods of text that keep what is in it as it is."""

_READERS = frozenset({"read", "readline", "readlines", "readinto", "getvalue"})
"""Methods of files."""

_HARMLESS = (
    *("logging", "tqdm", "warnings", "traceback", "linecache", "tokenize", "importlib", "_frozen_importlib"),
    *("threading", "queue", "concurrent", "multiprocessing", "asyncio", "selectors", "subprocess"),
)
"""Modules that read clocks and files for what they print only, for how long they wait, or for code."""

WRITING: dict[str, frozenset[str]] = {
    "_csv": frozenset({"writerow", "writerows"}),
    "_io": frozenset({"write", "writelines", "seek", "truncate"}),
    "_pickle": frozenset({"dump"}),
    "sqlite3": frozenset({"execute", "executemany", "executescript", "commit"}),
    "_socket": frozenset({"send", "sendall", "sendto", "sendmsg"}),
    "socket": frozenset({"send", "sendall", "sendto", "sendmsg"}),
    "mmap": frozenset({"write", "write_byte"}),
}
"""By module, methods in C of objects that nobody can compare, by which something is written."""

WRITING_FUNCTIONS: dict[Any, str] = {
    getattr(os, name): f"os.{name}()"
    for name in """
        write writev pwrite sendfile remove unlink rename replace mkdir rmdir system kill putenv
        """.split()
    if hasattr(os, name)
} | {pickle.dump: "a file"}
"""Functions in C that write."""

STARTED = frozenset({"a thread", "a process", "work elsewhere"})
"""What a step may start that does something besides."""

WRITING_FUNCTIONS |= {getattr(os, name): "a process" for name in ("fork", "forkpty") if hasattr(os, name)}

_STARTING = (
    ("threading", "Thread", "start", "a thread"),
    ("multiprocessing.process", "BaseProcess", "start", "a process"),
    ("subprocess", "Popen", "__init__", "a process"),
    ("multiprocessing.pool", "Pool", "_check_running", "work elsewhere"),  # which all of its methods begin with
    ("concurrent.futures.thread", "ThreadPoolExecutor", "submit", "work elsewhere"),
    ("concurrent.futures.process", "ProcessPoolExecutor", "submit", "work elsewhere"),
)
"""Module, class and method by which a program starts one of these."""


def _starting() -> dict[CodeType, str]:
    loaded = ((getattr(sys.modules.get(module), kind, None), name, what) for module, kind, name, what in _STARTING)
    return {getattr(kind, name).__code__: what for kind, name, what in loaded if kind is not None}


_BALANCED = frozenset({"__enter__", "__exit__"})
"""Methods of locks that a block undoes at its end."""

_HARMLESS_WRITERS = ("logging", "tqdm", "warnings", "traceback", "importlib", "_frozen_importlib", "multiprocessing")
"""Modules whose writing is recorded otherwise, or is none of the step's."""

_NAMES = _READERS.union(
    _OF_CLASSES, *WRITING.values(), (each.__name__ for each in (*IMPURE, *WRITING_FUNCTIONS, breakpoint, sys.settrace))
)


def _writer_kinds() -> set[type]:
    """Classes of objects in memory to which a step may write that has made them."""
    kinds: set[type] = {io.StringIO, io.BytesIO, pickle.Pickler}
    if (module := sys.modules.get("_csv")) is not None:
        kinds.add(module.Writer if hasattr(module, "Writer") else type(module.writer(io.StringIO())))
    return kinds


_SAVE = torch.save.__code__

_DEBUGGER = bdb.Bdb.__init__.__code__

_STOPPING = (breakpoint, sys.settrace)
"""Functions in C by which code asks for a debugger."""

_ENVIRONMENT = type(os.environ).__getitem__.__code__

_LISTING = {
    getattr(type(os.environ), name).__code__: "which environment variables there are"
    for name in ("__iter__", "__len__")
}

_SETTINGS = (
    _LISTING
    | {
        getattr(torch, name).__code__: f"torch.{name}()"
        for name in ("are_deterministic_algorithms_enabled", "get_float32_matmul_precision", "initial_seed")
    }
    | {
        getattr(module, name).__code__: f"{module.__name__}.{name}()"
        for module, name in ((threading, "active_count"), (threading, "enumerate"), (signal, "getsignal"))
    }
)
"""Code that gives settings which no guard compares, and what it reads; asked by the user's own code itself."""


def _beyond_library(frame: FrameType | None) -> FrameType | None:
    """The frame, or if it runs code of Python's library the nearest one that has called it and doesn't."""
    while frame is not None and is_pythons(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _between(frame: FrameType | None, last: FrameType) -> Iterator[FrameType]:
    while frame is not None and frame is not last:
        yield frame
        frame = frame.f_back


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
