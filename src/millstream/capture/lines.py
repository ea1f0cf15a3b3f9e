"""Tell the user's code from libraries, and find the line of it that is running."""

from __future__ import annotations

import dis
import functools
import json
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from itertools import chain, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn
from urllib.parse import urlsplit
from urllib.request import url2pathname

import filelock
import torch

from millstream.errors import CaptureError

BOUNDARY = "run_step"
"""Name of the function of ours that calls the user's: what lies beyond it is none of the step's lines."""


def find_site_folders(search_path: Sequence[str]) -> set[Path]:
    """The folders with installed packages: the environment's own, and those that it borrows.

    These are the user's (``pip install --user``), the system's under an environment with ``--system-site-packages``,
    and any that a ``.pth`` file adds. Code there would otherwise pass for the user's own, and all of it be looked into.

    Args:
        search_path: ``sys.path``.
    """
    paths = sysconfig.get_paths()
    borrowed = [each for each in search_path if Path(each).name in ("site-packages", "dist-packages")]
    return {Path(each).resolve() for each in (paths["purelib"], paths["platlib"], *borrowed)}


def find_packages_elsewhere(search_path: Sequence[str], at_work: Sequence[Path]) -> set[Path]:
    """Folders and files of installed packages that lie in no such folder: in a clone, or where ``--target`` said.

    Args:
        search_path: ``sys.path``.
        at_work: The folder in which somebody works, and the program: a project with one of them is the user's own.
    """
    site, found = find_site_folders(search_path), set[Path]()
    for package in distributions(path=[*search_path]):
        folder = Path(str(package.locate_file(""))).resolve()
        origin = json.loads(package.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            project = Path(url2pathname(urlsplit(origin["url"]).path)).resolve()
            found |= set() if any(each.is_relative_to(project) for each in at_work) else {project}
        elif folder not in site and package.read_text("WHEEL") is not None:
            found |= {folder / file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "bin")}
    return found


@functools.cache
def _packages_elsewhere() -> set[Path]:
    program = getattr(sys.modules["__main__"], "__file__", None)
    at_work = [Path.cwd().resolve(), *([] if program is None else [Path(program).resolve()])]
    with suppress(OSError, ValueError):  # somebody has broken the metadata of a package
        return find_packages_elsewhere(sys.path, at_work)
    return set()


def claim(function: Callable[..., Any]) -> None:
    """Take the project with the code of a step for the user's own, also if it is installed and lies elsewhere."""
    code = getattr(function, "__code__", None)
    path = Path(getattr(code, "co_filename", "")).resolve()
    if claimed := {each for each in _packages_elsewhere() if path.is_relative_to(each)}:
        _packages_elsewhere().difference_update(claimed)
        is_users_own.cache_clear()


_CALLS_A_MODULE = torch.nn.Module._call_impl.__code__
_MILLSTREAM = Path(__file__).resolve().parents[1]
_STDLIB = str(Path(sysconfig.get_paths()["stdlib"]).resolve())
_SITE = tuple(map(str, find_site_folders(sys.path)))
_LIBRARY = (
    str(Path(torch.__file__).resolve().parent),
    str(Path(filelock.__file__).resolve().parent),  # with which Inductor locks its cache, in threads of ours too
    *(
        str(path)
        for path in _MILLSTREAM.iterdir()
        if path.name not in ("cli", "testing", "__main__.py")  # jobs and helpers, which use it as users do
    ),
)

_MODELS = tuple(f"{_LIBRARY[0]}/{part}/" for part in ("nn", "optim", "amp", "distributions"))
_CALLED = (*_MODELS, *(f"{_LIBRARY[0]}/{part}" for part in ("autograd/", "utils/checkpoint.py")))


@functools.cache
def is_users(filename: str) -> bool:
    """Return whether code in ``filename`` is the user's or that of a library of theirs.

    Not Python's, PyTorch's or ours.
    """
    if filename.startswith("<frozen") or is_ours(filename):
        return False
    path = str(Path(filename).resolve())
    return path.startswith(_SITE) or not path.startswith(_STDLIB)


@functools.cache
def is_ours(filename: str) -> bool:
    """Return whether code in ``filename`` is PyTorch's or ours."""
    return str(Path(filename).resolve()).startswith(_LIBRARY)


@functools.cache
def is_part_of_project(filename: str) -> bool:
    """Return whether code in ``filename`` is this library's own."""
    return Path(filename).resolve().is_relative_to(_MILLSTREAM)


@functools.cache
def is_called_by_models(filename: str) -> bool:
    """Return whether code is PyTorch's, and runs in a step as it is, rather than within operators or tracing."""
    path = Path(filename).resolve()
    is_at_top = str(path.parent) == _LIBRARY[0] and path.name not in _OF_TRACING
    return is_at_top or str(path).startswith(_CALLED)


_OF_TRACING = ("overrides.py", "_ops.py", "library.py", "_compile.py")


@functools.cache
def is_millstreams(filename: str) -> bool:
    """Return whether code in ``filename`` is ours."""
    return str(Path(filename).resolve()).startswith(str(_MILLSTREAM))


@functools.cache
def is_pythons(filename: str) -> bool:
    """Return whether code in ``filename`` belongs to Python's own library."""
    path = str(Path(filename).resolve())
    return filename.startswith("<frozen") or (path.startswith(_STDLIB) and not path.startswith(_SITE))


@functools.cache
def is_users_own(filename: str) -> bool:
    """Return whether code in ``filename`` is the user's, and not that of a library."""
    path = Path(filename).resolve()
    is_installed = str(path).startswith(_SITE) or any(map(path.is_relative_to, _packages_elsewhere()))
    return is_users(filename) and not is_installed


def may_be_caught() -> bool:
    """Return whether an error in what the traced step does now would come to code of the step that catches it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_part_of_project(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None and not is_part_of_project(frame.f_code.co_filename):
        if any(start <= frame.f_lasti < end for start, end in _caught_in(frame.f_code)):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=4096)
def _caught_in(code: CodeType) -> list[tuple[int, int]]:
    """Return where code is within ``try``, from one offset to another."""
    bytecode = dis.Bytecode(code)
    entries = bytecode.exception_entries  # type: ignore[attr-defined]  # pyrefly: ignore[missing-attribute]
    if not entries:
        return []
    items = [item for item in bytecode if item.opname != "CACHE"]
    names = {item.offset: [each.opname for each in items[place : place + 2]] for place, item in enumerate(items)}
    caught = [entry for entry in entries if names.get(entry.target, [""])[0] == "PUSH_EXC_INFO"]
    return [(entry.start, entry.end) for entry in caught if "WITH_EXCEPT_START" not in names[entry.target]]


def is_asked_by_user(frame: FrameType | None) -> bool:
    """Whether a frame runs code of the user's own, or of a library that such code has called, and not PyTorch."""
    while frame is not None and not is_ours(name := frame.f_code.co_filename):
        is_file = not name.startswith("<")
        if is_users_own(name) and (is_file or frame.f_globals.get("__name__") == "__main__"):
            return True
        frame = frame.f_back
    return False


def _is_boundary(code: CodeType) -> bool:
    return code.co_name == BOUNDARY and not is_users(code.co_filename)


def _frames_of_step() -> Iterator[FrameType]:
    """Yield what runs of the step, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_boundary(frame.f_code):
        yield frame
        frame = frame.f_back


def user_frames() -> list[tuple[str, int, str]]:
    """Frames of the user's code on the stack, innermost first: file, line, function."""
    codes = ((frame.f_code, frame.f_lineno) for frame in _frames_of_step())
    return [(code.co_filename, line, code.co_name) for code, line in codes if is_users(code.co_filename)]


def module_path() -> str:
    """The path from the outermost module whose forward pass is running to the innermost: ``layer1.conv2``."""
    found = [frame.f_locals["self"] for frame in _frames_of_step() if frame.f_code is _CALLS_A_MODULE]
    names = []
    for inner, outer in pairwise(found):
        parts = chain(outer.named_children(), outer.named_modules())  # mostly among the first, which are few
        name = next((name for name, each in parts if each is inner), "")
        if name:
            names.append(name)
    return ".".join(reversed(names))


def describe(frames: list[tuple[str, int, str]]) -> str:
    """The same as a traceback shows it, innermost last, as FX keeps it in ``stack_trace``."""
    return "\n".join(map(_describe_one, reversed(frames)))


@functools.lru_cache(maxsize=4096)
def _describe_one(frame: tuple[str, int, str]) -> str:
    filename, line, function = frame
    return f'  File "{filename}", line {line}, in {function}\n    {linecache.getline(filename, line).strip()}'


COMES_TO = ", which comes to "
"""Between the user's own line and that of a library, in a place."""


def place_in(frames: Sequence[tuple[str, Any]]) -> str:
    """``file:line`` of the innermost line that is the user's own, and after it that of a library which it comes to.

    Args:
        frames: File and line of each frame of the user's code and of libraries, innermost first.
    """
    own = next((each for each in frames if is_users_own(each[0])), None)
    told = [frames[0]] if own is None or own is frames[0] else [own, frames[0]]
    return COMES_TO.join(f"{file}:{line}" for file, line in told)


def library_in(place: str) -> str:
    """The name of the library whose line a place ends with; empty where that is the user's own, or PyTorch's."""
    file = place.rpartition(COMES_TO)[2].rpartition(":")[0]
    if not file or not is_users(file) or is_users_own(file):
        return ""
    path = Path(file).resolve()
    folder = next((each for each in _SITE if path.is_relative_to(each)), None)
    return "that library" if folder is None else path.relative_to(folder).parts[0].partition(".py")[0]


def in_library(library: str) -> str:
    """Return what to do about a line of a library that cannot be edited."""
    return (
        f"Where {library} cannot be edited, look for an option of its that leaves this out, or compile the parts of "
        "the model that do without: ms.compile(model.part)."
    )


def last_place(stack_trace: str) -> str:
    """The place of what ``describe`` has written, or an empty string."""
    found: list[tuple[str, str]] = re.findall(r'File "(.+)", line (\d+), in ', stack_trace)
    return place_in(found[::-1]) if found else ""


def here(*, num_left_out: int = 0) -> str:
    """The place where the user's code is, or with so many frames left out; empty where there is none."""
    frames = [(filename, line) for filename, line, _ in user_frames()[num_left_out:]]
    return place_in(frames) if frames else ""


def raise_refusal(refuse: Callable[[CaptureError], object], reason: str, remedy: str) -> NoReturn:
    """Raise that the line of the user's cannot be captured; ``refuse`` is told, too, as the program may catch it."""
    stopped = stopped_at()
    error = CaptureError(reason, where=here(), remedy=remedy) if stopped is None else stops_in_debugger(stopped)
    refuse(error)
    raise error


def stops_in_debugger(where: str) -> CaptureError:
    """The refusal of a step in which a debugger stops: it would show what has no values."""
    return CaptureError(
        "The step stops in a debugger while it is captured, where its tensors have no values.",
        where=where,
        remedy="Set MILLSTREAM_DISABLE=1 in the environment while you debug: then steps run as plain Python.",
    )


def stopped_at() -> str | None:
    """``file:line`` at which a debugger has stopped the step and now asks for something; ``None`` if none has."""
    place: str | None = None
    for frame in _frames_of_step():
        if frame.f_globals.get("__name__", "").partition(".")[0] in _DEBUGGERS:
            place = ""
        elif place == "" and is_users(frame.f_code.co_filename):
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return place


_DEBUGGERS = frozenset({"bdb", "pdb", "ipdb", "pudb", "pydevd", "_pydevd_bundle", "_pydevd_frame_eval", "debugpy"})
"""Packages; IPython's debugger is one of ``bdb``'s, and those of editors are ``pydevd``'s."""


def told(error: BaseException) -> str:
    """The first line of an error, with the name of its type, or of the public one that it is of."""
    kind = next(each for each in type(error).__mro__ if not each.__module__.startswith("torch._"))
    return ": ".join((kind.__name__, *str(error).splitlines()[:1]))


def place_of(error: BaseException) -> str:
    """The place in the user's code that led to ``error``, or an empty string."""
    frames: list[tuple[str, int]] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_boundary(frame.f_code):  # what was on the way to the step, code made by FX too, is not its
            frames = []
        elif is_users(frame.f_code.co_filename):
            frames.append((frame.f_code.co_filename, line))
    return place_in(frames[::-1]) if frames else ""


def is_of_call(error: BaseException) -> bool:
    """Return whether the step's arguments are others than its function takes: no line of it has run."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, TypeError) and bool(frames) and _is_boundary(frames[-1].f_code)


def caller_of(error: BaseException, package: str) -> str | None:
    """``file:line`` of the user's line that called code of ``package`` which led to ``error``; ``None`` if none did."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package:
            return place
        if is_users(frame.f_code.co_filename):
            place = f"{frame.f_code.co_filename}:{line}"
    return None


def runs_for_us(frame: FrameType | None) -> bool:
    """Return whether code of Python's library runs since code of ours has called it."""
    while frame is not None and is_pythons(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_part_of_project(frame.f_code.co_filename)
