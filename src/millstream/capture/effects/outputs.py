"""What writes to people: while a step is traced, calls of it are recorded instead of made.

``registry.py`` lists libraries; ``print``, open files and ``logging`` need more than a list.
All of it holds for the tracing thread alone.
"""

from __future__ import annotations

import builtins
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from millstream._torch.tracing import attributes_here, leave_to_python, patched
from millstream.capture.effects.logs import OTHERS, logs_recorded
from millstream.capture.effects.recorder import Recorder
from millstream.capture.effects.registry import REGISTERED
from millstream.capture.lines import is_users
from millstream.capture.state.discover import Found


@contextmanager
def outputs_recorded(recorder: Recorder) -> Iterator[Callable[[Found], None]]:
    """For the length of the context ``recorder`` gets what this thread prints, logs and writes.

    Yields a function that takes what the step reaches: from then on what is written to its open files is recorded, too,
    and ``print`` as a whole if it is named there: guards of other threads' compiled models notice that.
    """
    with ExitStack() as patches:
        streams = {id(stream): name for name in ("stderr", "stdout") if (stream := getattr(sys, name)) is not None}
        known = {*streams}
        for name in streams.values():
            patches.enter_context(_stream_recorded(recorder, getattr(sys, name), name))

        def add(found: Found) -> None:
            if "print" in found.names and id(print) not in known:
                patches.enter_context(patched(builtins, "print", _printing(recorder, streams)))
                known.add(id(print))
            for file in found.files:
                if id(file) not in known:
                    known.add(id(file))
                    patches.enter_context(_stream_recorded(recorder, file, file))

        patches.enter_context(logs_recorded(recorder))
        patches.enter_context(_warnings_recorded(recorder))
        for module, owner, names in REGISTERED:
            found = sys.modules.get(module)
            holder = getattr(found, owner, None) if owner else found
            for kind in with_subclasses(holder) if isinstance(holder, type) else [holder]:
                for name in names.split():
                    if kind is not None and name in vars(kind):
                        patches.enter_context(patched(kind, name, _recording(recorder, getattr(kind, name))))
        yield add


def _printing(recorder: Recorder, streams: dict[int, str]) -> Callable[..., None]:
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
def _stream_recorded(recorder: Recorder, stream: Any, name: Any) -> Iterator[None]:
    """Record what is written to ``stream``; ``name``, the stream or the name that it has in ``sys``, is written to."""
    with ExitStack() as patches:
        for method in ("write", "writelines", "flush"):
            original = getattr(stream, method, None)
            if original is None:
                continue

            def choose(*args: Any, original: Callable[..., Any] = original, method: str = method) -> Any:
                if not recorder.is_active or _is_of_others(sys._getframe(1)):
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


def _warnings_recorded(recorder: Recorder) -> AbstractContextManager[None]:
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


def _recording(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """What records calls of a function of a module or class."""

    def record(*args: Any, **kwargs: Any) -> Any:
        if not recorder.is_active:
            return function(*args, **kwargs)
        recorder.call(function, *args, **kwargs)
        return None

    return record


def _is_of_others(frame: Any) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in OTHERS


def with_subclasses(kind: type) -> list[type]:
    """A class and all that are derived from it."""
    return [kind, *(found for child in kind.__subclasses__() for found in with_subclasses(child))]
