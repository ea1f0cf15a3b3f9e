"""What the package says of itself where it is published: the README with absolute links, and the project's addresses.

The address is not in the sources, for a fork has another: ``MILLSTREAM_URL=https://… python -m build``. Without it,
links within the project become plain text, as they would lead nowhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    """Fills ``readme`` and ``urls`` when the package is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Change the metadata in place."""
        address = os.environ.get("MILLSTREAM_URL", "").rstrip("/")
        text = absolute_links(Path(self.root, "README.md").read_text(encoding="utf-8"), address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if address:
            metadata["urls"] = project_urls(address)


def project_urls(address: str) -> dict[str, str]:
    """The project's pages at an address that serves files as GitHub does."""
    files = f"{address}/blob/main"
    return {
        "Homepage": address,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def absolute_links(text: str, address: str) -> str:
    """Turn links and pictures of the project's own files into absolute ones; without an address, into their text."""

    def replace(found: re.Match[str]) -> str:
        is_picture, label, target = found.groups()
        if target.startswith(("http:", "https:", "#")):
            return found[0]
        if not address:
            return "" if is_picture else label
        return f"{is_picture}[{label}]({address}/{'raw' if is_picture else 'blob'}/main/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replace, text)
