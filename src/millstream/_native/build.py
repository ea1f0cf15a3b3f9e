"""Compile C++ into a Python module. The wheel's build uses this file too, so it needs only the standard library."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PREBUILT = "core"
"""What a wheel brings: it needs neither PyTorch nor any one version of it."""
PREBUILT_FILE = f"{PREBUILT}{sysconfig.get_config_var('EXT_SUFFIX')}"

_SOURCES = {
    "core": ("core", "collector", "conversions", "copies", "recorder"),
    "tensors": ("tensors", "batches", "quick_guards", "switches"),
    "threads": ("threads",),
}
NAMES = tuple(_SOURCES)

_LIMIT_S = 120.0  # for one file
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-pthread")
_LINKED = ("-shared", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()))


def find_compiler() -> list[str]:
    """The command that compiles C++; empty where there is none."""
    named = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if named is None or sys.platform == "win32":
        return []
    try:
        return shlex.split(named)
    except ValueError:  # a quote without its other half
        return []


@dataclass(frozen=True)
class CompileRecipe:
    """The command and flags that compile a module.

    Attributes:
        name: Of it.
        torch_root: Where PyTorch is installed; ``None`` for ``PREBUILT``, which has nothing of it.
        compiler: The command that compiles C++.
    """

    name: str
    torch_root: Path | None
    compiler: Sequence[str]

    def facts(self) -> Iterator[str]:
        """All that makes a compiled module another one, but for the version of PyTorch."""
        yield from (*self._command(), *self._libraries(), *_LINKED)
        yield from (sys.version, str(sysconfig.get_config_var("SOABI")), *platform.libc_ver())
        for path in (*self._paths(), *sorted(FOLDER.glob("*.h"))):
            yield path.read_text(encoding="utf-8")

    def compile(self, target: Path) -> str:
        """Compile its files beside each other; what the compiler complains of first, or empty where all is well."""
        objects = [f"{target}-{path.stem}.o" for path in self._paths()]
        commands = [
            [*self._command(), "-c", str(path), "-o", made] for path, made in zip(self._paths(), objects, strict=True)
        ]
        with ThreadPoolExecutor(len(commands)) as threads:
            failure = next(filter(None, threads.map(_run, commands)), "")
        return failure or _run([*self.compiler, *_FLAGS, *_LINKED, *objects, *self._libraries(), "-o", str(target)])

    def _paths(self) -> list[Path]:
        return [FOLDER / f"{source}.cpp" for source in _SOURCES[self.name]]

    def _command(self) -> list[str]:
        headers = [sysconfig.get_paths()["include"]]
        headers += [] if self.torch_root is None else [str(self.torch_root / "include")]
        return [*self.compiler, *_FLAGS, *(f"-I{each}" for each in headers)]

    def _libraries(self) -> list[str]:
        if self.torch_root is None:
            return []
        return [f"-L{self.torch_root / 'lib'}", *(f"-l{each}" for each in ("c10", "torch_cpu", "torch_python"))]


def _run(command: Sequence[str]) -> str:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return next((line for line in lines if "error" in line), f"{command[0]} ends with {error.returncode}")
    except subprocess.TimeoutExpired:
        return f"{command[0]} took longer than {_LIMIT_S:.0f} s"
    except OSError as error:
        return f"{command[0]} does not run ({error.strerror})"
    return ""
