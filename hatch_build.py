"""What is made when the package is built: what it says of itself, and the compiled code that a wheel brings.

The project's address is not in the sources, for a fork has another: ``MILLSTREAM_URL=https://… python -m build``.
Without it, links within the project become plain text, as they would lead nowhere.

A wheel is for one version of Python and one kind of machine, and has the module ``core`` of ``millstream._native``;
where that cannot be compiled, it is for all of them, and the module is compiled where it is first used.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
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


class NativeHook(BuildHookInterface):
    """Compiles what a wheel brings; an editable installation has its sources, and compiles them when it needs them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the module to the wheel."""
        compiler = (build := load_build(Path(self.root))).find_compiler()
        if version == "editable" or not compiler:
            return
        self._folder = tempfile.TemporaryDirectory()
        made = Path(self._folder.name) / build.PREBUILT_FILE
        if failure := build.CompileRecipe(build.PREBUILT, None, compiler).compile(made):
            self.app.display_warning(f"The wheel has no compiled code: {failure}")
            return
        build_data["force_include"][str(made)] = f"millstream/_native/{build.PREBUILT_FILE}"
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove what was made."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def load_build(root: Path) -> ModuleType:
    """The package's own way to compile, without the package: it would import PyTorch."""
    spec = importlib.util.spec_from_file_location("millstream_build", root / "src/millstream/_native/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


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
