"""The commands ``cache`` and ``warm``: what lies in the cache, and filling it by running a script."""

from __future__ import annotations

import sys
from collections import Counter

from millstream.cache import CachedFile, cache_folder, limit_bytes, list_files, parse_bytes, trim
from millstream.cli.running import run_script
from millstream.errors import ArgumentError


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


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
