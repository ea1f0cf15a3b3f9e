"""Runs a script as ``python script.py`` would, in this process, and says how it ended."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import os
import runpy
import signal
import sys
import threading
import traceback
import zipfile
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

from millstream.errors import ArgumentError


@contextlib.contextmanager
def compiling_at_once() -> Iterator[None]:
    """Have steps be compiled by the calls that need them, unless the user says otherwise."""
    is_said = "MILLSTREAM_TUNE" in os.environ
    os.environ.setdefault("MILLSTREAM_TUNE", "first")
    try:
        yield
    finally:
        if not is_said:
            os.environ.pop("MILLSTREAM_TUNE", None)


def run_script(target: str, arguments: list[str], *, as_module: bool = False) -> int:
    """Run it to its end and return the exit code that ``python`` would have given.

    An uncaught exception is printed as Python does, without the frames of this package; Ctrl-C gives 130. Threads that
    the script leaves running, and that are no daemons, are waited for.

    Args:
        target: A file, a folder or a .zip with a ``__main__.py``, or with ``as_module`` the name of a module.
        arguments: The script's own.
        as_module: As ``python -m``.

    Raises:
        ArgumentError: There is no such file.
    """
    source = b""
    is_package = not as_module and (os.path.isdir(target) or zipfile.is_zipfile(target))  # noqa: PTH112
    if not as_module and not is_package:
        try:
            with open(target, "rb") as file:  # noqa: PTH123 - as Python opens it
                source = file.read()
        except OSError as error:
            raise ArgumentError(f"cannot read {target}: {error.strerror}") from error
    before = sys.modules["__main__"], sys.argv, sys.path[:]
    sys.argv = [target, *arguments]
    at_once = contextlib.ExitStack()
    try:
        at_once.enter_context(compiling_at_once())
        if as_module:
            sys.path[0:1] = [os.getcwd()]  # noqa: PTH109 - as Python does
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        elif is_package:
            del sys.path[:1]
            runpy.run_path(target, run_name="__main__")
        else:
            sys.path[0:1] = [os.path.dirname(os.path.realpath(target))]  # noqa: PTH120 - as Python does
            module = ModuleType("__main__")
            module.__file__, module.__loader__ = target, SourceFileLoader("__main__", target)
            vars(module).update(__builtins__=__builtins__, __annotations__={}, __cached__=None)
            sys.modules["__main__"] = module
            exec(compile(source, target, "exec"), vars(module))  # noqa: S102 - the user's own script, as Python runs it
        _join_threads()
    except SystemExit as error:
        return _code_of(error)
    except KeyboardInterrupt:
        _print_error()
        return 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 - as Python's own top level
        _print_error()
        return 1
    finally:
        at_once.close()
        sys.argv, sys.path[:] = before[1], before[2]
        # ``__main__`` stays the script's: threads, pickles and exit handlers may still look there.
    return 0


def _join_threads() -> None:
    """Wait for threads as Python does at its end, but not for those of executors, which are only told to end there."""
    executors = getattr(concurrent.futures.thread, "_threads_queues", {})
    for thread in threading.enumerate():
        is_ours = thread in (threading.main_thread(), threading.current_thread())
        if not (is_ours or thread.daemon or thread in executors):
            thread.join()


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stdout.flush()
    sys.stderr.write(f"{error.code}\n")
    return 1


def _print_error() -> None:
    kind, error, place = sys.exc_info()
    sys.stdout.flush()
    here = os.path.dirname(__file__)  # noqa: PTH120
    while place is not None and _is_ours(place, here):
        place = place.tb_next
    if sys.excepthook is not sys.__excepthook__ and kind is not None and error is not None:
        sys.excepthook(kind, error.with_traceback(place), place)  # the script's own, which may print that of the error
    else:
        traceback.print_exception(kind, error, place)


def _is_ours(place: TracebackType, here: str) -> bool:
    name = place.tb_frame.f_code.co_filename
    return name.startswith(here) or name == "<frozen runpy>" or name.endswith("/runpy.py")
