"""Errors that Dynamo raises while it traces, and what PyTorch logs about them. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import functools
import logging
import sys
import traceback
from collections.abc import Callable
from types import CodeType

_TRACING = "_dynamo/convert_frame.py"


def raised_before_running(error: BaseException, is_users: Callable[[str], bool]) -> bool:
    """Return whether Dynamo has raised an error, or passed it on, before any of the user's code ran.

    Args:
        error: As caught where the compiled function was called.
        is_users: Tells whether a file is the user's code.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename.replace("\\", "/")
        if name.endswith(_TRACING):
            return True
        if is_users(name):
            return False
    return False


@functools.cache
def drop_logs_of_fake_tensors(within: CodeType) -> None:
    """Keep PyTorch from logging the traceback of an error on fake tensors that is raised within one of our functions.

    The error itself arrives. What others do is logged as usual.
    """
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not _is_within(within))


def _is_within(code: CodeType) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
