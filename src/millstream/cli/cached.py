"""The commands ``cache`` and ``warm``: what lies in the cache, filling it by running a script, and taking it along."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.cache import CachedFile, cache_folder, limit_bytes, list_files, parse_bytes, trim
from millstream.cli.running import run_script
from millstream.errors import ArgumentError

if TYPE_CHECKING:
    from millstream.lower.kept.bundle import Taken


def show_cache(*, limit: str | None, clear: bool) -> int:
    """Remove what is asked for, print what is left, and return the exit code.

    Args:
        limit: So many bytes may stay, as in ``500M``; the files unused for longest go first.
        clear: Remove all.

    Raises:
        ArgumentError: ``limit`` is no number of bytes.
    """
    removed: list[CachedFile] = []
    if limit is not None:
        asked = parse_bytes(limit)
        if asked is None:
            raise ArgumentError(f"--limit {limit!r} is no number of bytes; write for instance 500M or 5G.")
        removed = trim(asked)
    if clear:
        removed += trim(0)
    if removed:
        print(f"removed {len(removed)} files, {_size(sum(file.num_bytes for file in removed))}")
    files = list_files()
    total = sum(file.num_bytes for file in files)
    print(f"{cache_folder()}: {_size(total)} of {_size(limit_bytes())}")
    count, size = Counter(file.kind for file in files), Counter[str]()
    for file in files:
        size[file.kind] += file.num_bytes
    for kind in count:
        print(f"  {kind:14}{count[kind]:6} files  {_size(size[kind])}")
    return 0


def warm(target: str, arguments: list[str], *, as_module: bool) -> int:
    """Run a script to its end or until Ctrl-C, and say what it has put into the cache.

    Returns:
        The script's exit code.
    """
    before = {file.path for file in list_files()}
    code = run_script(target, arguments, as_module=as_module)
    new = [file for file in list_files() if file.path not in before]
    programs = sum(file.kind == "programs" for file in new)
    size = _size(sum(file.num_bytes for file in new))
    print(f"millstream: {programs} new programs, {len(new)} new files, {size}, in {cache_folder()}", file=sys.stderr)
    return code


def export(path: Path, target: str, arguments: list[str], *, as_module: bool, key: Path | None) -> int:
    """Run a script to its end or until Ctrl-C, and write what it has compiled into a file.

    Returns:
        The script's exit code.

    Raises:
        ArgumentError: It has compiled nothing, or a file cannot be read or written.
    """
    secret = _secret(key)
    code = run_script(target, arguments, as_module=as_module)
    from millstream.lower.kept import bundle

    try:
        taken = bundle.save(path, secret)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from error
    _say(taken, path)
    return code


def take_in(path: Path, key: Path | None) -> int:
    """Put the programs of a file into the cache, and return the exit code.

    Raises:
        ArgumentError: It cannot be used, or a file cannot be read.
    """
    from millstream.lower.kept import bundle

    secret = _secret(key)
    try:
        taken = bundle.load(path, secret)
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from error
    _say(taken, cache_folder())
    return 0


def _say(taken: Taken, where: Path) -> None:
    size = _size(taken.num_bytes)
    print(f"millstream: {taken.programs} programs, {taken.files} files, {size}, in {where}", file=sys.stderr)


def _secret(path: Path | None) -> bytes | None:
    """Return what a file with a key holds.

    Raises:
        ArgumentError: It cannot be read, or is empty.
    """
    if path is None:
        return None
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from error
    if not secret:
        raise ArgumentError(f"{path} is empty; a key has at least one byte.")
    return secret


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
