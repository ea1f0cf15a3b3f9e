"""Lines of source as reports show them."""

from __future__ import annotations

import linecache
from pathlib import Path

from millstream.insight import Site
from millstream.report.words import shorten


def place(site: Site | None) -> str:
    """File and line, as short as they still say which file it is."""
    if site is None:
        return "no line known"
    path = Path(site.file)
    if path.is_absolute():
        try:
            path = path.relative_to(Path.cwd())
        except ValueError:
            parts = path.parts
            path = Path(*parts[parts.index("site-packages") + 1 :]) if "site-packages" in parts else Path(path.name)
    return f"{path}:{site.line}"


def code(site: Site | None, width: int = 60) -> str:
    """What stands there; empty where the file cannot be read."""
    return shorten(linecache.getline(site.file, site.line).strip(), width) if site is not None else ""
