"""Where on disk lies what one process leaves to the next: measurements, choices, compiled code."""

from __future__ import annotations

import contextlib
import getpass
import os
import tempfile
from pathlib import Path


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


def write(path: Path, text: str) -> None:
    """Replace a file at once, so that other processes read the old text or the new; where refused, do nothing."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # gone in any case, also where the disk is full
            file = Path(folder) / path.name
            file.write_text(text)
            file.replace(path)
