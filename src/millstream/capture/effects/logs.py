"""Logging while a step is traced: records are effects, and what the step asks of it is asked before each replay."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

from millstream._torch.tracing import patched, reads_seen
from millstream.capture.effects.recorder import Recorder
from millstream.capture.lines import is_users_own, raise_refusal

OTHERS = frozenset(("torch", "millstream", "warnings", "logging", "py"))
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
def logs_recorded(recorder: Recorder) -> Iterator[None]:
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


def _is_others(recorder: Recorder, name: str) -> bool:
    return not recorder.is_active or name.partition(".")[0] in OTHERS


def _handling(recorder: Recorder) -> Callable[..., None]:
    handling, enabled = logging.Logger.handle, logging.Logger.isEnabledFor

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if _is_others(recorder, logger.name):
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


def _asking(recorder: Recorder, question: Callable[..., Any]) -> Callable[..., Any]:
    def ask(logger: logging.Logger, *args: Any) -> Any:
        if _is_others(recorder, logger.name):
            return question(logger, *args)
        frame = sys._getframe(2)  # the one that called what `patched` has put there
        if frame.f_globals.get("__name__") == "logging" and frame.f_code.co_name != question.__name__:
            # By what is to log: that is asked after each replay.
            return question.__name__ == "isEnabledFor" or question(logger, *args)
        return _noted(recorder, functools.partial(question, logger, *args))

    return ask


def _setting(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if recorder.is_active and is_users_own(sys._getframe(2).f_code.co_filename):
            raise_refusal(
                recorder.questions.refused.append,
                f"The step calls logging's {original.__qualname__}(), which a graph would not do again.",
                "Call it outside of the step.",
            )
        return original(*args, **kwargs)

    return refuse


def _note_read(recorder: Recorder, owner: Any, name: str, reader: FrameType) -> None:
    if not _is_others(recorder, reader.f_globals.get("__name__", "")):
        held = functools.partial(_held, owner, name)
        if not callable(getattr(owner, name, None)):
            _noted(recorder, held)


def _noted(recorder: Recorder, ask: Callable[[], Any]) -> Any:
    """The answer to a question, which is to be the same before each replay."""
    answer = ask()
    recorder.conditions.append((ask, answer))
    return answer


def _held(owner: Any, name: str) -> Any:
    """What can be compared of an attribute that a logger or handler has, or has not."""
    value = getattr(owner, name, None)
    return [*value] if isinstance(value, list | dict) else value
