"""Which line of the user's program is running."""

from __future__ import annotations

import functools
import linecache
import sys
import traceback
from types import FrameType

from millstream.capture.discover import is_users

BOUNDARY = "run_step"
"""Name of the function of ours that calls the user's: what lies beyond it is none of the step's lines."""


def user_frames() -> list[tuple[str, int, str]]:
    """Frames of the user's code on the stack, innermost first: file, line, function."""
    frames: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
        elif code.co_name == BOUNDARY:
            break
        frame = frame.f_back
    return frames


def describe(frames: list[tuple[str, int, str]]) -> str:
    """The same as a traceback shows it, innermost last, as FX keeps it in ``stack_trace``."""
    return "\n".join(map(_describe_one, reversed(frames)))


@functools.lru_cache(maxsize=4096)
def _describe_one(frame: tuple[str, int, str]) -> str:
    filename, line, function = frame
    return f'  File "{filename}", line {line}, in {function}\n    {linecache.getline(filename, line).strip()}'


def here() -> str:
    """``file:line`` of the user's innermost line."""
    for filename, line, _ in user_frames():
        return f"{filename}:{line}"
    return ""


def place_of(error: BaseException) -> str:
    """``file:line`` of the user's innermost line that led to ``error``, or an empty string."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return ""
