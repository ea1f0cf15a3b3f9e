"""All compiled code of this package: how it is built, loaded, left out, and what takes its place.

| module | of | takes | without it |
|---|---|---|---|
| `core` | `copies`, `recorder`, `conversions` | Python's C API | PyTorch copies, more slowly; no step is recorded |
| `tensors` | `quick_guards`, `batches`, `switches` | PyTorch's headers, too | Python looks, and PyTorch makes tensors |
| `threads` | itself; it is called through ctypes | PyTorch's headers, too | plans on the CPU run on one thread |

- A wheel brings `core`, if there was a compiler where it was built, for one version of Python and any of PyTorch. All
  else, and `core` where there is no such wheel, is compiled where it is first needed, in two to nine seconds, and kept
  in the cache folder under a digest of its sources, of the command, and of the versions of Python and PyTorch.
- What looks into tensors in every call has PyTorch's headers, as to ask Python takes 50 ns for each property.
- ``load`` gives ``None`` where a module cannot be had, and ``why_not`` says why; so does ``millstream doctor``.
  ``MILLSTREAM_WITHOUT=native`` leaves all of it out.
- One thread at a time builds or loads a module, and one process at a time builds it; both locks end with a fork.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import stat
import tempfile
import threading
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch

from millstream._native import build
from millstream._torch.workarounds import is_off
from millstream.cache import cache_folder, file_lock
from millstream.locks import ForkSafeLock

_WAIT_S = 150.0  # for another process that compiles


class _Module(ForkSafeLock):
    """A module of compiled code, made when it is first asked for.

    Attributes:
        name: Of it.
        failure: Why it could not be had when it was last asked for; empty where it could.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.failure = name, ""

    def find(self) -> Path | None:
        """Its file, compiled if need be; ``None`` where that is not possible."""
        with self.lock:
            self.failure = "MILLSTREAM_WITHOUT=native leaves it out" if is_off("native") else ""
            if self.failure:
                return None
            brought = build.FOLDER / build.PREBUILT_FILE
            if self.name == build.PREBUILT and brought.exists() and _is_loadable(brought):
                return brought
            return self._find_compiled()

    def _find_compiled(self) -> Path | None:
        compiler = build.find_compiler()
        if not compiler:
            self.failure = "there is no compiler"
            return None
        is_of_torch = self.name != build.PREBUILT
        recipe = build.CompileRecipe(self.name, Path(torch.__file__).parent if is_of_torch else None, compiler)
        facts = (*recipe.facts(), *([torch.__version__] if is_of_torch else []))
        stem = f"{self.name}_{_digest(chr(10).join(facts).encode())}"
        if (found := _find_kept(stem)) is not None:
            return found
        self.failure = why_not_keep()
        if self.failure:
            return None
        with file_lock(cache_folder() / f"{self.name}.lock", _WAIT_S) as has_waited:
            if not has_waited or _find_kept(stem) is None:
                self.failure = _compile(recipe, stem)
        if (found := _find_kept(stem)) is None and not self.failure:
            self.failure = "what was compiled cannot be loaded"
        return found


NAMES = build.NAMES
_modules = {name: _Module(name) for name in NAMES}


@functools.cache
def load(name: str) -> Any | None:
    """A module of compiled code, with functions as Python's builtins; ``None`` where it cannot be had."""
    module = _modules[name]
    with module.lock:
        path = module.find()
        if path is None:
            return None
        loader = ExtensionFileLoader(f"{__name__}.{name}", str(path))
        spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
        assert spec is not None
        try:
            made = importlib.util.module_from_spec(spec)
        except ImportError as error:
            module.failure = str(error)
            return None
        loader.exec_module(made)
        return made


def find(name: str) -> Path | None:
    """The file of a module that is called through ctypes; ``None`` where it cannot be had."""
    return _modules[name].find()


def is_ready(name: str) -> bool:
    """Return whether ``load`` need not wait; if not, a thread loads it, in seconds."""
    return not _loading(name).is_alive()


@functools.cache
def _loading(name: str) -> threading.Thread:
    thread = threading.Thread(target=load, args=(name,), name=f"millstream-{name}", daemon=True)
    thread.start()
    return thread


def why_not(name: str) -> str:
    """Return why a module could not be had when it was last asked for, in a few words; empty if it could."""
    return _modules[name].failure


def why_not_keep() -> str:
    """Say in a few words why nothing can be kept that is compiled; empty when it can."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder):
            return "" if _is_guarded(folder) else f"others can write into the cache folder {folder}"
    except OSError as error:
        return f"nothing can be kept in the cache folder {folder} ({error.strerror})"


def _compile(recipe: build.CompileRecipe, stem: str) -> str:
    """Compile into the cache folder; what went wrong. After the stem stands a digest of what was compiled."""
    folder = cache_folder()
    try:
        with tempfile.TemporaryDirectory(dir=folder) as inside:
            made = Path(inside) / stem
            if not (failure := recipe.compile(made)):
                made.replace(folder / f"{stem}_{_digest(made.read_bytes())}.so")  # at once: others may look
            return failure
    except OSError as error:
        return f"nothing can be kept in the cache folder {folder} ({error.strerror})"


def _find_kept(stem: str) -> Path | None:
    """Return what ``_compile`` has made; ``None`` where there is nothing that can be loaded."""
    return next(filter(_is_kept_whole, sorted(cache_folder().glob(f"{stem}_*.so"))), None)


def _is_kept_whole(library: Path) -> bool:
    """Return whether it was made by this user, is whole, and for this machine: folders are shared between machines."""
    try:
        if not (_is_guarded(library) and _is_guarded(library.parent)):
            return False
        # loading a file that was cut off can end the process
        return library.stem.endswith(_digest(library.read_bytes())) and _is_loadable(library)
    except OSError:
        return False


def _is_loadable(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def _is_guarded(path: Path) -> bool:
    """Return whether nobody can write there but this user and the system's."""
    state = path.stat()
    return state.st_uid in (0, os.getuid()) and not state.st_mode & stat.S_IWOTH


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
