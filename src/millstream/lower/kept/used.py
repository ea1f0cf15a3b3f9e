"""Note which kept files this process has used: ``bundle.py`` takes them along.

Private APIs of Inductor, for where Triton's machine code lies; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

_programs: dict[Path, None] = {}
_compiled: dict[tuple[int, Path], None] = {}


def note_program(path: Path) -> None:
    """A program's file was read or written."""
    _programs[path] = None


def note_tuners(tuners: Iterable[Any]) -> None:
    """Triton kernels were compiled, or found in Triton's cache."""
    for tuner in tuners:
        with suppress(AttributeError, TypeError, KeyError):  # not as upstream's used to be
            device = tuner.device_props.index or 0
            for result in tuner.compile_results:
                folder = Path(triton_cache_dir(device)) / triton_hash_to_path_key(result.kernel.hash)
                _compiled[device, folder] = None


def programs() -> list[Path]:
    """The files of programs, those that others point to among them, as far as they are still there."""
    return [path for path in _programs if path.exists()]


def compiled() -> list[tuple[int, Path]]:
    """The folders with Triton's machine code, each with the number of its device."""
    return [(device, path) for device, path in _compiled if path.is_dir()]


def libraries(folder: Path) -> list[Path]:
    """Shared libraries in a folder, or below it, that are loaded in this process."""
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        names = dict.fromkeys(line[line.index("/") :] for line in lines if "/" in line)
        return [path for path in map(Path, names) if path.is_relative_to(folder.resolve()) and path.suffix == ".so"]
    return []
