"""Lines of source as reports show them."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from pathlib import Path

from millstream.insight import Activity, LaunchCall, Recording, Site
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


def activity_text(activity: Activity, launches: Mapping[int, LaunchCall], recording: Recording) -> str:
    """Name of a kernel or copy, with its module and line where they are known."""
    launch = launches.get(activity.launch) if activity.launch is not None else None
    parts = [shorten(activity.name, 90) or str(activity.kind)]
    if launch is not None and launch.module:
        parts.append(f"in {launch.module}")
    if launch is not None and launch.stack:
        parts.append(place(recording.user_site(launch.stack)))
    return ", ".join(parts)


def code(site: Site | None, width: int = 60) -> str:
    """Return what stands there; empty where the file cannot be read."""
    return shorten(linecache.getline(site.file, site.line).strip(), width) if site is not None else ""
