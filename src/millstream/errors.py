"""Every error and warning of the library.

An error says what happened (names and values), what was expected, where (kernel, buffer, the user's source line) and
what to do about it. It carries those as fields, so that a program can read them too. Bad arguments also subclass
``ValueError``.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from types import CodeType, MappingProxyType, TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=BaseException)


class MillstreamError(Exception):
    """Base of all errors raised by Millstream."""


class ArgumentError(MillstreamError, ValueError):
    """An argument of a public function is not acceptable; the message names the value and the choice."""


class GraphError(MillstreamError, ValueError):
    """A kernel graph contradicts itself.

    Attributes:
        kernel: Name of the kernel at fault, or ``None``.
        buffer: Id of the buffer at fault, or ``None``.
    """

    def __init__(self, message: str, *, kernel: str | None = None, buffer: str | None = None) -> None:
        super().__init__(message)
        self.kernel = kernel
        self.buffer = buffer


class PlanError(GraphError):
    """A plan contradicts its graph or itself.

    Attributes:
        step: Position of the offending step in ``plan.steps``, or ``None``.
    """

    def __init__(
        self, message: str, *, kernel: str | None = None, buffer: str | None = None, step: int | None = None
    ) -> None:
        super().__init__(message, kernel=kernel, buffer=buffer)
        self.step = step


class CaptureError(MillstreamError):
    """The user's function cannot be captured as one graph.

    Attributes:
        reason: What stands in the way, in one sentence.
        where: The user's source line, and after it a library's that it comes to; empty when it is not known.
        remedy: What the user can do about it.
    """

    def __init__(self, reason: str, *, where: str = "", remedy: str = "") -> None:
        if reason.endswith("..") and not reason.endswith("..."):  # it quotes another error, which ends with one
            reason = reason[:-1]
        what = reason if reason.endswith((".", "!", "?")) else f"{reason}."
        super().__init__(" ".join(part for part in (what, f"At {where}." if where else "", remedy) if part))
        self.reason = reason
        self.where = where
        self.remedy = remedy


def why_disabled() -> CaptureError | None:
    """Return why nothing is to be captured, if the environment says so."""
    if os.environ.get("MILLSTREAM_DISABLE", "") in ("", "0"):
        return None
    return CaptureError("MILLSTREAM_DISABLE is set: all of it runs as plain Python.", remedy="Unset it.")


class EmptyCaptureError(CaptureError):
    """There is nothing to capture."""


class FailingStepCaptureError(CaptureError):
    """The step fails for this call, captured or not."""


class LoweringError(MillstreamError):
    """PyTorch's compiler produced something that Millstream cannot turn into a kernel graph.

    Attributes:
        construct: What was met (an operator, a line of the wrapper program).
    """

    def __init__(self, message: str, *, construct: str = "") -> None:
        super().__init__(message)
        self.construct = construct


class MisreadError(LoweringError):
    """PyTorch's compiler made a program that would use a value after it has been overwritten."""


class DeviceError(MillstreamError):
    """A place is unknown, absent, already closed, or has failed."""


class StreamError(DeviceError):
    """A stream is used where or when it cannot be, or work on streams is not ordered; the message says what to do."""


class FeedError(MillstreamError):
    """A batch cannot be fed to the device; the message names the leaf and the remedy."""


class DataParallelError(MillstreamError, RuntimeError):
    """Processes that train together do not agree, or one of them is gone or does not answer.

    After a failure in the midst of a step the parameters of the processes may differ: go on from a checkpoint.
    """


class InternalError(MillstreamError):
    """A bug in Millstream: please report it with the message."""


class FallbackWarning(UserWarning):
    """Something could not be captured, lowered or scheduled, so it runs as plain torch.compile or eager instead."""


def never_the_end(error: BaseException) -> BaseException:
    """An error for code that iterates: what handles a batch must not end the pass as if the source had ended."""
    if not isinstance(error, StopIteration):
        return error
    raised = FeedError("A transform, or what moves or makes a part of a batch, has raised StopIteration.")
    raised.__cause__ = error
    return raised


def without_frames(error: E) -> E:
    """The error, as it is kept for later: without the frames that it came through, whose variables hold a batch."""
    each: BaseException | None = error
    while each is not None and (each.__traceback__ or each.__context__) is not None:
        each.__traceback__ = each.__context__ = None
        each = each.__cause__
    return error


def skip_frames(traceback: TracebackType | None, own: Set[CodeType]) -> TracebackType | None:
    """Drop the library's own frames from the front: they tell the user nothing, and keep alive what they refer to."""
    while traceback is not None and traceback.tb_frame.f_code in own:
        traceback = traceback.tb_next
    return traceback


def check_folder(path: Path) -> None:
    """See that a file can be written before what it is to hold is made.

    Raises:
        ArgumentError: Its folder is not there.
    """
    if not (folder := path.resolve().parent).is_dir():
        raise ArgumentError(f"cannot write {path}: there is no folder {folder}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question to put after what is said of an unknown name, with a space before; empty where none is like it."""
    near = difflib.get_close_matches(name, [*known], n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def names_are_suggested(
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function without ``**kwargs`` ask, of an argument that it has not, whether another was meant.

    Python 3.13 does so itself.

    Args:
        elsewhere: By names of arguments that others take, a sentence that says where they belong.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    told = f"{function.__name__}() got an unexpected keyword argument {name!r}."
                    raise TypeError(told + (f" {elsewhere[name]}" if name in elsewhere else did_you_mean(name, known)))
            return function(*args, **kwargs)

        return call

    return decorate


_INNER = {"millstream", "torch", "contextlib", ""}  # code that PyTorch generates is of no module


def warn_user(message: str) -> None:
    """Say that something runs otherwise than asked for, at the line of the last code outside Millstream and PyTorch.

    Where there is none, as in a thread of PyTorch's, at the thread's first.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        level, frame = level + 1, frame.f_back
    warnings.warn(FallbackWarning(message), stacklevel=level)
