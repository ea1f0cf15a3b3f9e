"""Brings what lies beside ``docs/`` into the site: the changelog, and the benchmarks with their pages of results.

MkDocs calls it (``hooks`` in ``mkdocs.yml``). Links keep leading to where they lead in the sources; a page of results
that is named as code, as ``benchmarks/results/feed.md``, becomes a link.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = ("CHANGELOG.md", "benchmarks/README.md", "benchmarks/results/*.md")
_LINK = re.compile(r"(\[[^\]]*\]\()(?!https?:|#)([^)#\s]+)([^)\s]*\))")
_NAMED = re.compile(r"`(benchmarks/results/\w+\.md)`")


def on_pre_build(config: MkDocsConfig) -> None:
    """Replace what the plugin ``offline`` would load from elsewhere by a script of the site's own."""
    config.extra["polyfills"] = ["scripts/frame_worker.js"]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside."""
    from mkdocs.structure.files import File

    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, content=for_site(path.read_text(encoding="utf-8"), name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Link pages of results that a page names."""
    folder = posixpath.dirname(page.file.src_uri)
    return _NAMED.sub(lambda found: f"[{found[1]}]({posixpath.relpath(found[1], folder or '.')})", markdown)


def for_site(text: str, name: str) -> str:
    """A page from outside of ``docs/`` with its links as they are there; a link off the site becomes its text."""
    folder = posixpath.dirname(name)

    def replace(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2])).removeprefix("docs/")
        is_page = (ROOT / "docs" / target).exists() or any(Path(target).match(each) for each in OUTSIDE)
        label = found[1].rstrip("(")
        return f"{found[1]}{posixpath.relpath(target, folder or '.')}{found[3]}" if is_page else label[1:-1]

    return _LINK.sub(replace, text)
