"""The folder on disk that keeps measurements, choices and compiled code for later processes."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

DEFAULT_LIMIT_BYTES = 5 << 30
"""Of all files together, unless ``MILLSTREAM_CACHE_LIMIT`` says otherwise."""

KINDS = {
    "programs": ("programs/*.program", "traces/*.trace"),
    "choices": ("tuning/*.json", "plans-*.json"),
    "measurements": ("costs-*.json",),
    "native parts": ("*_*.so",),
}
"""What lies in the cache, and under which names."""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def cache_folder() -> Path:
    """``MILLSTREAM_CACHE_DIR``, or else ``~/.cache/millstream``; it may not exist, and may be deleted at any time."""
    if named := os.environ.get("MILLSTREAM_CACHE_DIR"):
        return Path(named)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "millstream"
    try:
        return Path.home() / ".cache" / "millstream"
    except RuntimeError:  # a container whose user has no home
        return Path(tempfile.gettempdir()) / f"millstream-{getpass.getuser() if os.name == 'nt' else os.getuid()}"


def write(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Replace a file at once, so that other processes read the old content or the new; where refused, do nothing.

    Args:
        path: Of the file.
        content: All of it.
        mode: Who may read and write it; by default as the process's umask allows.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # gone in any case, also where the disk is full
            file = Path(folder) / path.name
            file.write_bytes(content.encode() if isinstance(content, str) else content)
            if mode is not None:
                file.chmod(mode)
            file.replace(path)


@contextlib.contextmanager
def file_lock(path: Path, timeout_s: float, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold a lock that one process at a time can have; the system releases it where the process dies.

    The block runs without the lock where the system has none, the folder cannot be written, or the time is over.

    Args:
        path: A file that the lock is on; it is made, empty, where there is none.
        timeout_s: How long to wait for it at most.
        on_wait: Called once where another process has it.

    Yields:
        Whether another process had it.
    """
    with contextlib.ExitStack() as stack:
        has_waited = False
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a"))
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not has_waited:
                        on_wait()
                    has_waited = True
                    time.sleep(0.01)
                else:
                    stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a forked child may have the file, too
                    break
        yield has_waited


# --- files that are run ----------------------------------------------------------------------------------------------


def write_private(path: Path, content: bytes) -> None:
    """Write a file that holds code: into a folder that is this user's alone, or else not at all."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_private(path.parent):
        write(path, content, 0o600)


def read_private(path: Path) -> bytes | None:
    """Read a file that holds code, and note that it was used; ``None`` where it is not there or others can write it."""
    try:
        if not is_private(path.parent) or not is_private(path):
            return None
        content = path.read_bytes()
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a folder that is read only
        os.utime(path)
    return content


def is_private(path: Path) -> bool:
    """Return whether a file or folder is this user's, is no link, and nobody else can write it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return not stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & others


# --- all files together ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CachedFile:
    """A file of the cache.

    Attributes:
        path: Where it is.
        kind: What is in it.
        num_bytes: Its size.
        used_s: When it was written or, if that is noted, last used: in seconds since 1970.
    """

    path: Path
    kind: str
    num_bytes: int
    used_s: float


def list_files() -> list[CachedFile]:
    """The files of the cache, the one unused for longest first. Others in the same folder are nobody's business."""
    files = []
    for kind, patterns in KINDS.items():
        for path in (path for pattern in patterns for path in cache_folder().glob(pattern)):
            with contextlib.suppress(OSError):  # another process has removed it
                found = path.lstat()
                files.append(CachedFile(path, kind, found.st_size, found.st_mtime))
    return sorted(files, key=lambda file: file.used_s)


def limit_bytes() -> int:
    """So much may lie in the cache: ``MILLSTREAM_CACHE_LIMIT``, such as ``500M``, or where that says nothing, 5 GiB."""
    asked = parse_bytes(os.environ.get("MILLSTREAM_CACHE_LIMIT", ""))
    return DEFAULT_LIMIT_BYTES if asked is None else asked


def parse_bytes(text: str) -> int | None:
    """Read a number of bytes, such as ``1000``, ``500M`` or ``2.5GiB``; ``None`` where it is none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def trim(limit: int) -> list[CachedFile]:
    """Remove files, those unused for longest first, until all take at most ``limit`` bytes; return what was removed."""
    files = list_files()
    excess = sum(file.num_bytes for file in files) - limit
    removed = []
    for file in files:
        if excess <= 0:
            break
        with contextlib.suppress(OSError):
            file.path.unlink()
            removed.append(file)
            excess -= file.num_bytes
    return removed
