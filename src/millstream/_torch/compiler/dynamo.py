"""Counters and settings of Dynamo. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any

import torch

from millstream._torch.modes.switches import present
from millstream._torch.one_thread import OneThreads


def is_compiling() -> bool:
    """Return whether this thread is compiling or tracing. While any thread is, PyTorch says so to all of them."""
    flag: Any = torch.compiler.is_compiling()
    return flag is not False and bool(flag) and _compiles_here()


def compile_lock() -> Any:
    """Return what Dynamo holds while it compiles, in all threads together; re-entrant."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def compiles_elsewhere() -> bool:
    """Return whether another thread is compiling or tracing."""
    lock: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    if lock is None:
        return False
    if is_free := lock.acquire(blocking=False):
        lock.release()
    return not is_free


def _compiles_here() -> bool:
    return isinstance(torch.compiler._is_compiling_flag, OneThreads) or not compiles_elsewhere()


_compiles_here._dynamo_marked_constant = True  # type: ignore[attr-defined] # Dynamo asks while it compiles


class DuringCalls:
    """Settings of Dynamo that hold in this thread while one of our functions is called, and for nobody else.

    A recompilation limit, unless the user's own is higher; and parameters as attributes of graphs, for Inductor to
    fold, where the backend that Dynamo compiles for has ``freezes`` set. A graph for any size leaves those that were
    compiled on their own to their graphs, which are better; else Dynamo, which tries the latest first, would use them
    no more (since torch 2.13). Recurrent networks are traced as the operators that they consist of (since torch 2.12,
    where that can be said for one thread).

    Args:
        freezes: Whether any backend may have it set.
        is_recurrent: Whether what is called has ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``.
    """

    def __init__(self, *, freezes: bool, is_recurrent: bool) -> None:
        self._freezes = freezes
        names = ("automatic_dynamic_exclusion_guard", *(("allow_rnn",) if is_recurrent else ()))
        self._set = [override for override in map(_override, names) if override is not None]

    def begin(self, limit: int, *, traces_turns: bool = True) -> Any:
        """Let the settings hold; returns what ``end`` needs.

        Args:
            limit: On recompilations.
            traces_turns: Whether recurrent networks are traced, where there are any.
        """
        if self._freezes:
            _freezing.begin()
        return _begin_limit(limit), [override.set(True) for override in (self._set if traces_turns else self._set[:1])]

    def end(self, token: Any) -> None:
        """Put back what was there."""
        limit, tokens = token
        for override, before in zip(self._set, tokens, strict=False):
            override.reset(before)
        _end_limit(limit)
        if self._freezes:
            _freezing.end()


def sizes_as_they_are() -> AbstractContextManager[None]:
    """For the length of the context Dynamo makes no size symbolic because it was another before.

    In this thread; in torch 2.11 in all threads. Tried on 2.13.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    return config.patch(automatic_dynamic_shapes=False)  # type: ignore[no-any-return]


@functools.cache
def _override(name: str) -> ContextVar[Any] | None:
    """Return where Dynamo asks for a setting in this thread; ``None`` where it has none, and before torch 2.12."""
    config: Any = importlib.import_module("torch._dynamo.config")
    override = getattr(config._config.get(name), "user_override", None)
    return override if isinstance(override, ContextVar) else None


@functools.cache
def _entry(name: str) -> Any:
    config: Any = importlib.import_module("torch._dynamo.config")
    return config._config[name]


def _begin_limit(limit: int) -> Any:
    override = _entry("recompile_limit").user_override
    if isinstance(override, ContextVar):  # since 2.12; Dynamo's configuration itself would take 10 µs
        now = override.get()
        return None if isinstance(now, int) and now >= limit else override.set(limit)
    _for_all.begin(limit)
    return _for_all


def _end_limit(token: Any) -> None:
    if isinstance(token, Token):
        token.var.reset(token)
    elif token is _for_all:
        _for_all.end()


class _ForAllThreads:
    """Dynamo's configuration while functions of ours are called, in torch 2.11, where all threads have the same.

    The first call raises the limit, and the last one puts back what there was: also of what Dynamo itself sets for the
    length of a call with ``dynamic=True`` or ``False``, and restores in the wrong order where threads overlap
    (``assume_static_by_default`` stayed off, and all sizes of all models were symbolic from then on).
    """

    NAMES = "recompile_limit", "assume_static_by_default", "automatic_dynamic_shapes"

    def __init__(self) -> None:
        self._lock, self._num_calls = threading.Lock(), 0
        self._before: list[Any] = []

    def begin(self, limit: int) -> None:
        with self._lock:
            self._num_calls += 1
            if self._num_calls > 1:
                return
            self._before = [_entry(name).user_override for name in self.NAMES]
            if not isinstance(self._before[0], int) or self._before[0] < limit:
                _entry("recompile_limit").user_override = limit

    def end(self) -> None:
        with self._lock:
            self._num_calls -= 1
            if not self._num_calls:
                for name, before in zip(self.NAMES, self._before, strict=True):
                    _entry(name).user_override = before


_for_all = _ForAllThreads()


class _Freezing:
    """Dynamo's question whether to freeze, answered by the backend it compiles for, while any call may want that.

    Inductor's own option is that of all backends, and in torch 2.11 of all threads. Tried on 2.11 and 2.13.
    """

    def __init__(self) -> None:
        self._lock, self._num_calls = threading.Lock(), 0
        self._before: Any = None

    def begin(self) -> None:
        from torch._dynamo.variables import builder

        with self._lock:
            self._num_calls += 1
            if self._num_calls == 1:
                self._before = builder.is_parameter_freezing
                builder.is_parameter_freezing = functools.partial(_is_freezing, self._before)

    def end(self) -> None:
        from torch._dynamo.variables import builder

        with self._lock:
            self._num_calls -= 1
            if not self._num_calls:
                builder.is_parameter_freezing = self._before


_freezing = _Freezing()


def _is_freezing(asked_before: Callable[[], bool]) -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if asked_before():
        return True
    return not torch.is_grad_enabled() and _freezes(InstructionTranslator.current_tx().output.compiler_fn)


def _freezes(backend: Any) -> bool:
    """Return whether a backend, or what it wraps, has ``freezes`` set."""
    wrapped = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn", "func")
    while backend is not None and not hasattr(backend, "freezes"):
        backend = next((getattr(backend, name) for name in wrapped if hasattr(backend, name)), None)
    return bool(backend is not None and backend.freezes)


def guard_switches() -> None:
    """Have what Dynamo now compiles used under the present switches only, of which it asks few by itself.

    Called by a backend. Dynamo adds to its guards what it finds in the context.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    from torch._dynamo.source import GlobalStateSource

    before, told = present(), ["PyTorch's switches are as they were"]

    def add_guard(builder: Any, _: Any) -> None:
        # Dynamo asks at once, and takes no for a bug. Where another thread has set one meanwhile, it is used but once.
        asked = itertools.chain((True,), itertools.repeat(False)) if present() is not before else None
        holds = (lambda scope: present() is before) if asked is None else (lambda scope: next(asked))
        builder.guard_manager.root.add_lambda_guard(holds, told, None)

    guard = torch._guards.Guard(GlobalStateSource(), add_guard)
    context.guards_context.dynamo_guards.add(guard)


def known_obstacles() -> Counter[str]:
    """Return how often Dynamo has met what it cannot capture, by reason. Tried on 2.11 and 2.13."""
    from torch._dynamo.utils import counters

    return Counter[str](counters["graph_break"]) + Counter[str](counters["unimplemented"])


def num_refused_forms() -> int:
    """Return how often Dynamo has refused one more form of a function, of which it takes so many.

    Tried on 2.11 and 2.13.
    """
    from torch._dynamo.utils import counters

    return sum(number for reason, number in counters["unimplemented"].items() if "recompile limit" in reason)


def is_compiled_by_torch(function: Any) -> bool:
    """Return whether ``torch.compile`` has made a module or function. Tried on 2.11 and 2.13."""
    if isinstance(function, torch._dynamo.OptimizedModule):
        return True
    names = getattr(function, "__dict__", {})  # not by getattr: a compiled part's attribute is not the whole's
    return "_torchdynamo_orig_callable" in names and not names.get("_torchdynamo_disable", False)


def torch_backend_of(function: Any) -> Any:
    """Return the object that ``torch.compile`` keeps for a call of it, and calls to compile graphs.

    Args:
        function: What it returned, or a module that compiles in place. ``None`` is the answer for anything else, and
            for a backend of which Dynamo keeps no such object. Tried on 2.13.
    """
    if isinstance(function, torch.nn.Module) and not isinstance(function, torch._dynamo.OptimizedModule):
        function = function._compiled_call_impl
    elif not is_compiled_by_torch(function):
        return None
    if isinstance(function, torch._dynamo.OptimizedModule):
        found: Any = function.dynamo_ctx.callback
    else:
        cells = (_content_of(cell) for cell in getattr(function, "__closure__", None) or ())
        found = next((each for each in cells if hasattr(each, _WRAPPED)), None)
    while hasattr(found, _WRAPPED):
        found = getattr(found, _WRAPPED)
    return found if type(found) is torch._TorchCompileWrapper else None


def backend_that_calls() -> Any:
    """Return the same object in a backend that it has called, if it has."""
    caller = sys._getframe(2).f_locals.get("self")
    return caller if type(caller) is torch._TorchCompileWrapper else None


def name_being_compiled() -> str:
    """What Dynamo compiles in this thread, by the class of a module or the name of a function; "" if it is not known.

    Tried on 2.13.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    with contextlib.suppress(AttributeError):
        root: Any = InstructionTranslator.current_tx().output.root_tx
        code = root.f_code
        first = root.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        called = root.f_locals.get("fn") if code.co_name == "inner" else first  # in place of a module of PyTorch's
        owner = getattr(called, "__self__", called)
        is_module = isinstance(owner, torch.nn.Module) and code.co_name in ("forward", "inner")
        return type(owner).__name__ if is_module else code.co_qualname.rpartition("<locals>.")[2]
    return ""


_WRAPPED = "_torchdynamo_orig_backend"


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
