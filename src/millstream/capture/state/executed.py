"""Which of the user's code runs, and which attributes of modules are read: what did not run was not read.

A method of the user's own trainer may be found by its name alone, as ``train`` is by ``self.model.train()``. What such
code would read need not be the same in each call.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import threading
from _lsprof import Profiler
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from types import CellType, CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, TypeVar

from torch import nn

from millstream._torch.tracing import code_asking, reads_seen
from millstream.capture.effects.values import holds_token
from millstream.capture.lines import is_asked_by_user, is_ours, is_users, is_users_own
from millstream.capture.state.code import (
    NAMESPACES,
    WITHOUT_ATTRIBUTES,
    Reach,
    computes_a_global,
    is_users_module,
    modules_handed_on,
    nameable,
    nameable_from,
    reach_of,
)
from millstream.capture.state.extensions import takes_tensors
from millstream.capture.state.impure import ImpureCalls, beyond_library, writer_kinds
from millstream.capture.state.location import Location
from millstream.heap import instances, objects_of_types

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
    frames: dict[int, tuple[CodeType, dict[str, Any]]] = field(default_factory=dict)  # all of it, by id; its globals
    # of modules, by id and name of the attribute that was read; ``__dict__`` stands for all of them
    attributes: dict[tuple[int, str], nn.Module] | None = None
    # by id, objects any of whose attributes may have been read, by code that computes their names
    computed: dict[int, Any] = field(default_factory=dict)
    # by id, modules of Python that are none of the user's, and are given to such code
    handed_on: dict[int, ModuleType] = field(default_factory=dict)
    variables: set[str] = field(default_factory=set)  # names of environment variables that were read

    def may_have_run(self, code: CodeType) -> bool:
        """Whether that code may have run."""
        return self.codes is None or code in self.codes

    def has_read(self, module: nn.Module, name: str) -> bool:
        """Whether that attribute was read."""
        read = self.attributes
        return read is None or any((id(module), key) in read for key in (name, *WHOLE))

    def note_read(self, module: nn.Module, name: str, reader: FrameType) -> None:
        """An attribute is read; not ``__dict__`` by PyTorch, which looks for parameters there."""
        if self.attributes is not None and (name != "__dict__" or not is_ours(reader.f_code.co_filename)):
            self.attributes[id(module), name] = module


def record_module_reads(on_forward: Callable[[nn.Module], None], ran: Ran) -> AbstractContextManager[None]:
    """Note which attributes of modules this thread reads, or looks for in vain: the graph depends on them.

    ``on_forward`` is told of every module that is about to be called.
    """

    def note(module: nn.Module, name: str, reader: FrameType) -> None:
        ran.note_read(module, name, reader)
        if name == "forward":
            on_forward(module)

    return reads_seen(nn.Module, note)


class CodeWatch:
    """Notes which code runs in this thread and what it reads unseen, for the length of a context.

    It is a profiler of Python's, in the place of one that is there already. A function in Python is told of each event
    as before, and cProfile pauses (see ``profiler_that_stays`` for others). Debuggers and coverage tools don't matter
    to it. Each call takes several times as long with it, so what can't lead to code of the user's is best called by
    ``unwatched``.

    Args:
        ran: Where it is noted.
        on_code: Called with its frame before code of the user's runs for the first time; may raise an error there.
        on_impure: As of ``ImpureCalls``.
        always: Code before which ``on_code`` is called each time.
        opaque: Gives the ids of objects in C whose state nobody can compare.
        on_opaque: Called with a frame that is about to call a method of one, with that; may raise an error there.
        on_text: Called with a frame of the user's that is about to call a method of text with tokens; likewise.
        on_stop: Likewise.
        on_switch: Called with a frame that is about to set a switch of PyTorch's.
        on_event: Called at each call and each return, if it is given.
        on_extension: Called with a frame that is about to call a function of a C++ extension of PyTorch's, with that;
            may raise an error there.
        on_computed: Called with objects of which code may read attributes by names that it computes, before it does as
            far as that can be told; may raise an error there.

    Attributes:
        is_whole: Whether it has seen all, in the end: the code has put no other profiler in its place.
        failure: What was raised while it took note, after which it has seen no more, if the code has caught that.
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
        on_switch: Callable[[FrameType], None] = lambda frame: None,
        on_event: Callable[[], None] | None = None,
        on_computed: Callable[[list[Any]], None] = lambda objects: None,
        on_extension: Callable[[FrameType, Any], None] = lambda frame, function: None,
    ) -> None:
        self._ran, self._on_code, self._always = ran, on_code, always
        self._opaque, self._on_opaque, self._on_text = opaque, on_opaque, on_text
        self._impure = ImpureCalls(ran.variables, on_impure, on_stop, on_switch)
        self._on_event, self._on_computed, self._on_extension = on_event, on_computed, on_extension
        self._codes: set[CodeType] = set()
        self._functions: dict[int, list[FunctionType]] = {}  # by id of the code; those that have not run yet
        self._met: dict[int, CodeType] = {}  # by id: code that says the same in another place is equal
        self._thread = threading.get_ident()
        self._again: set[int] = set()  # by id: code that is looked at in each call
        self._reaching: set[int] = set()  # likewise: that may read attributes by names that it computes
        self._early: set[int] = set()  # those of it that may change what such an attribute holds
        self._computing: dict[tuple[Any, ...], Any] = {}  # code and ids of the objects in its variables; and these
        self._outer: Any = None  # the profiler in whose place it is
        self._told: Any = None  # the same, if it is told of each event
        self._base: FrameType | None = None  # with the block whose context this is
        self.is_whole = False
        self.failure: BaseException | None = None
        self._collecting: FrameType | None = None  # what Python's collector calls, which is none of the step's
        self._profile = self._notice  # one object, to be known again

    def __enter__(self) -> None:
        if profiler_that_stays():
            return
        self._outer, self._base = sys.getprofile(), sys._getframe(1)
        self._told = None if isinstance(self._outer, Profiler) else self._outer
        for function in objects_of_types([FunctionType, *writer_kinds()]):
            if type(function) is not FunctionType:
                self._impure.writers.append(function)
            elif is_users(function.__code__.co_filename):
                self._functions.setdefault(id(function.__code__), []).append(function)
        self._ran.codes = self._codes
        sys.setprofile(self._profile)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ran.codes is None:
            return
        self.is_whole = sys.getprofile() is self._profile  # the code has not set another, or none
        if self.failure is not None:  # as it was, so that for the outer one each return follows a call
            if self._told is not None:
                self._told(sys._getframe(), "call", None)
            sys.setprofile(self._profile)
        if sys.getprofile() is self._profile:
            if isinstance(self._outer, Profiler):
                Profiler.enable(self._outer)  # as deep as where it was paused: it counts returns, for calls in progress
            else:
                sys.setprofile(self._outer)
        if threading.Thread.start.__code__ in self._codes:  # nobody watched what that did
            self._ran.codes = None
        self.failure = self.failure if error is None else None
        self._base = None
        self._functions.clear()
        self._impure.writers.clear()

    def _notice(self, frame: FrameType, event: str, arg: Any) -> None:  # noqa: C901  called too often to call others
        try:
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
        except BaseException as error:  # after which Python calls no profiler any more
            self._end_calls(frame.f_back if event == "call" else frame)
            self.failure = error
            raise
        if self._told is not None:
            self._told(frame, event, arg)

    def _end_calls(self, frame: FrameType | None) -> None:
        """Tell the outer profiler, which will not see it, that what it knows to be running ends."""
        while self._told is not None and frame is not None and frame is not self._base:
            self._told(frame, "return", None)
            frame = frame.f_back

    def _note_call(self, frame: FrameType, function: Any) -> None:
        """A function in C is about to be called."""
        name = function.__name__
        if function is globals and computes_a_global(frame) and is_users_own(frame.f_code.co_filename):
            self._impure.on_impure(frame, "a global whose name it computes", False)
        self._impure.see_call(frame, function)
        if function is getattr and id(frame.f_code) in self._early:
            self._note_computed(frame, reach_of(frame.f_code))
        if takes_tensors(function) and threading.get_ident() == self._thread:
            self._on_extension(frame, function)
        owner = function.__self__
        is_text = type(owner) is str and name not in _PUTTING_TOGETHER and is_users(frame.f_code.co_filename)
        if is_text and holds_token(owner) and threading.get_ident() == self._thread:
            self._on_text(frame)
        if id(owner) in self._opaque() and name not in _BALANCED:
            asking = beyond_library(frame)
            if asking is not None and threading.get_ident() == self._thread and is_asked_by_user(asking):
                self._on_opaque(asking, function)

    def _note_computed(self, frame: FrameType, reach: Reach) -> None:
        values = [value for value in frame.f_locals.values() if not isinstance(value, WITHOUT_ATTRIBUTES)]
        known = (frame.f_code, *map(id, values))
        if known not in self._computing:
            self._computing[known] = values
            kinds = NAMESPACES if reach is Reach.NAMESPACES else object
            objects = [each for each in nameable(frame) if isinstance(each, kinds)]
            for module in modules_handed_on(frame) if reach >= Reach.NAMED else ():
                if is_users_module(module):
                    objects.append(module)
                else:
                    self._ran.handed_on[id(module)] = module
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

    def _note(self, frame: FrameType) -> None:
        code = frame.f_code
        if code in _codes_of_collector():
            self._again.add(id(code))
            self._met[id(code)] = code
            self._collecting = frame
            return
        is_impure = self._impure.see(frame)
        waiting, is_new = self._functions.get(id(code), []), id(code) not in self._met or code in self._always
        self._met[id(code)] = code
        self._codes.add(code)
        self._ran.frames[id(code)] = code, frame.f_globals
        functions = functions_of(frame, waiting)
        for function in functions:
            waiting.remove(function)
        # Another function may have the code, with another closure.
        is_again = (waiting and code.co_freevars) or is_impure or code in self._always
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


def profiler_that_stays() -> str:
    """Of what kind the profiler of this thread is, where nothing else can watch for a while; empty otherwise.

    Python takes functions, and says nothing else of a profiler in C than its object: only cProfile's can be set again.
    """
    profiler = sys.getprofile()
    if profiler is None or callable(profiler) or isinstance(profiler, Profiler):
        return ""
    return type(profiler).__qualname__


def unwatched(function: Callable[..., T], *args: Any) -> T:
    """Call a function of which no ``CodeWatch`` is to note anything."""
    watch = outer = sys.getprofile()
    while isinstance(each := getattr(outer, "__self__", None), CodeWatch):
        outer = each._told
    if watch is outer:
        return function(*args)
    sys.setprofile(outer)
    try:
        return function(*args)
    finally:
        sys.setprofile(watch)


def function_asking(func: Any, frame: FrameType) -> Any:
    """What a mode, or a tensor, is to call that ``frame`` asks to call ``func``: what has been replaced by that."""
    code = code_asking(func, frame)
    return func if code is None else unwatched(_function_of, code) or func


@functools.lru_cache(maxsize=64)
def _function_of(code: CodeType) -> FunctionType | None:
    return next((each for each in instances([FunctionType]) if each.__code__ is code), None)


_PUTTING_TOGETHER = frozenset({"format", "format_map", "join"})
"""Methods of text that keep what is in it as it is."""

_BALANCED = frozenset({"__enter__", "__exit__"})
"""Methods of locks that a block undoes at its end."""


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
