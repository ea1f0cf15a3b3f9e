"""Record calls that write to people while a step is traced, instead of making them.

``registry.py`` lists libraries; ``print``, open files and ``logging`` need more than a list. What the step asks of
logging is asked again before each replay.
All of it holds for the tracing thread alone.
"""

from __future__ import annotations

import builtins
import functools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

from millstream._torch.one_thread import attributes_here, leave_to_python, patched, reads_seen
from millstream.capture.effects.output_libraries import REGISTERED
from millstream.capture.lines import is_users, is_users_own, raise_refusal
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder


@contextmanager
def outputs_recorded(recorder: EffectRecorder) -> Iterator[Callable[[Any], None]]:
    """For the length of the context ``recorder`` gets what this thread prints, logs and writes.

    Yields a function that takes an open file, or ``print``: from then on what is written to it is recorded, too. To
    take ``print`` is left to a step that has it, as guards of other threads' compiled models notice that.
    """
    with ExitStack() as patches:
        streams = {id(stream): name for name in ("stderr", "stdout") if (stream := getattr(sys, name)) is not None}
        known = {*streams}
        for name in streams.values():
            patches.enter_context(_stream_recorded(recorder, getattr(sys, name), name))

        def add(output: Any) -> None:
            if id(output) in known:
                return
            known.add(id(output))
            if output is print:
                patches.enter_context(patched(builtins, "print", _printing(recorder, streams)))
            else:
                patches.enter_context(_stream_recorded(recorder, output, output))

        patches.enter_context(_logs_recorded(recorder))
        patches.enter_context(_warnings_recorded(recorder))
        for module, owner, names in REGISTERED:
            found = sys.modules.get(module)
            holder = getattr(found, owner, None) if owner else found
            for kind in with_subclasses(holder) if isinstance(holder, type) else [holder]:
                for name in names.split():
                    if kind is not None and name in vars(kind):
                        patches.enter_context(patched(kind, name, _recording(recorder, getattr(kind, name))))
        yield add


def _printing(recorder: EffectRecorder, streams: dict[int, str]) -> Callable[..., None]:
    def record(
        *values: Any, sep: str | None = None, end: str | None = None, file: Any = None, flush: Any = False
    ) -> None:
        if not recorder.is_active:  # somebody has kept this function
            original(*values, sep=sep, end=end, file=file, flush=flush)
            return
        file = sys.stdout if file is None else file
        if file is not None:
            recorder.call(_print, *map(str, values), sep=sep, end=end, file=streams.get(id(file), file), flush=flush)

    original = builtins.print
    return record


def _print(*texts: str, file: Any, **how: Any) -> None:
    print(*texts, file=getattr(sys, file) if isinstance(file, str) else file, **how)


@contextmanager
def _stream_recorded(recorder: EffectRecorder, stream: Any, name: Any) -> Iterator[None]:
    """Record what is written to ``stream``; ``name``, the stream or the name that it has in ``sys``, is written to."""
    thread = threading.get_ident()  # asked for here: in compiled code of other threads Dynamo would look at any call
    with ExitStack() as patches:
        for method in ("write", "writelines", "flush"):
            original = getattr(stream, method, None)
            if original is None:
                continue

            def choose(*args: Any, original: Callable[..., Any] = original, method: str = method) -> Any:
                if threading.get_ident() != thread or _is_others(recorder, sys._getframe(1)):
                    return original(*args)
                recorder.call(_write, name, method, *args)
                return len(args[0]) if method == "write" else None

            leave_to_python(choose)
            try:
                setattr(stream, method, choose)
            except (AttributeError, TypeError):  # of a kind that takes no attributes
                continue
            patches.callback(delattr, stream, method)
        yield


def _write(stream: Any, method: str, *args: Any) -> None:
    getattr(getattr(sys, stream) if isinstance(stream, str) else stream, method)(*args)


def _warnings_recorded(recorder: EffectRecorder) -> AbstractContextManager[None]:
    original = warnings.warn

    def warn(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        if not recorder.is_active or args or kwargs or not is_users(frame.f_code.co_filename):
            original(message, category, stacklevel + 1, *args, **kwargs)
            return
        for _ in range(stacklevel - 1):
            frame = frame.f_back or frame
        place = {"filename": frame.f_code.co_filename, "lineno": frame.f_lineno, "module": frame.f_globals["__name__"]}
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        kind = type(message) if isinstance(message, Warning) else category or UserWarning
        tell = functools.partial(warnings.warn_explicit, category=kind, registry=registry, **place)
        recorder.call(tell, message if isinstance(message, Warning) else str(message))

    return attributes_here(warnings, warn=warn)


def _recording(recorder: EffectRecorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what records calls of a function of a module or class."""

    def record(*args: Any, **kwargs: Any) -> Any:
        if not recorder.is_active:
            return function(*args, **kwargs)
        recorder.call(function, *args, **kwargs)
        return None

    return record


def with_subclasses(kind: type) -> list[type]:
    """A class and all that are derived from it."""
    return [kind, *(found for child in kind.__subclasses__() for found in with_subclasses(child))]


# --- logging ----------------------------------------------------------------------------------------------------------

_OTHERS = frozenset(("torch", "millstream", "warnings", "logging", "py"))
"""Packages whose own messages are about the tracing, not of the step."""

_OF_MOMENT = frozenset(
    "msg args exc_info created msecs relativeCreated thread threadName process processName taskName message".split()
)
"""Attributes of a log record that are made anew."""

_ASKED = ("isEnabledFor", "getEffectiveLevel", "hasHandlers")

_SETTINGS = (
    (logging.Logger, "setLevel addHandler removeHandler"),
    (logging.Handler, "setLevel setFormatter"),
    (logging.Filterer, "addFilter removeFilter"),
    (logging, "disable"),
)


@contextmanager
def _logs_recorded(recorder: EffectRecorder) -> Iterator[None]:
    """For the length of the context ``recorder`` gets this thread's records, questions and reads."""
    with ExitStack() as patches:
        patches.enter_context(patched(logging.Logger, "handle", _handling(recorder)))
        for name in _ASKED:
            patches.enter_context(patched(logging.Logger, name, _asking(recorder, getattr(logging.Logger, name))))
        for owner, names in _SETTINGS:
            for name in names.split():
                patches.enter_context(patched(owner, name, _setting(recorder, vars(owner)[name])))
        for kind in (logging.Filterer, logging.Manager):  # loggers, handlers, and what has them all
            patches.enter_context(reads_seen(kind, functools.partial(_note_read, recorder)))
        yield


def _is_others(recorder: EffectRecorder, asking: FrameType | logging.Logger) -> bool:
    """Return whether what somebody asks or writes is none of the step's."""
    name = asking.name if isinstance(asking, logging.Logger) else asking.f_globals.get("__name__", "")
    return name.partition(".")[0] in _OTHERS or not recorder.is_active


def _handling(recorder: EffectRecorder) -> Callable[..., None]:
    handling, enabled = logging.Logger.handle, logging.Logger.isEnabledFor

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if _is_others(recorder, logger):
            with recorder.active(is_on=False) if recorder.is_active else nullcontext():  # what handlers read is theirs
                handling(logger, record)
            return
        fields = {key: value for key, value in vars(record).items() if key not in _OF_MOMENT}
        if record.exc_info:
            fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
        is_wanted = functools.partial(enabled, logger, record.levelno)
        recorder.call(_log, logger, record.msg, record.args, fields, is_wanted=is_wanted)

    return handle


def _log(logger: logging.Logger, message: Any, args: Any, fields: dict[str, Any]) -> None:
    logger.handle(logging.makeLogRecord({**fields, "msg": message, "args": args}))


def _asking(recorder: EffectRecorder, question: Callable[..., Any]) -> Callable[..., Any]:
    def ask(logger: logging.Logger, *args: Any) -> Any:
        if _is_others(recorder, logger):
            return question(logger, *args)
        frame = sys._getframe(2)  # the one that called what `patched` has put there
        if frame.f_globals.get("__name__") == "logging" and frame.f_code.co_name != question.__name__:
            # By what is to log: that is asked after each replay.
            return question.__name__ == "isEnabledFor" or question(logger, *args)
        return _noted(recorder, functools.partial(question, logger, *args))

    return ask


def _setting(recorder: EffectRecorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if recorder.is_active and is_users_own(sys._getframe(2).f_code.co_filename):
            raise_refusal(
                recorder.questions.refused.append,
                f"The step calls logging's {original.__qualname__}(), which a graph would not do again.",
                "Call it outside of the step.",
            )
        return original(*args, **kwargs)

    return refuse


def _note_read(recorder: EffectRecorder, owner: Any, name: str, reader: FrameType) -> None:
    if not _is_others(recorder, reader):
        held = functools.partial(_held, owner, name)
        if not callable(getattr(owner, name, None)):
            _noted(recorder, held)


def _noted(recorder: EffectRecorder, ask: Callable[[], Any]) -> Any:
    """The answer to a question, which is to be the same before each replay."""
    answer = ask()
    recorder.conditions.append((ask, answer))
    return answer


def _held(owner: Any, name: str) -> Any:
    """Return what can be compared of an attribute that a logger or handler has, or has not."""
    value = getattr(owner, name, None)
    return [*value] if isinstance(value, list | dict) else value
