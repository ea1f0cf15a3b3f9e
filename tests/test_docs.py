"""Pages say what is so: their programs run, recipes are the tested ones, lists are complete, links lead somewhere."""

import importlib
import posixpath
import re
import runpy
import textwrap
from pathlib import Path

import pytest

import millstream as ms
from millstream import errors
from millstream._torch.workarounds import PARTS
from millstream.api import compile, step
from millstream.cli.command import make_parser
from tests.processes import run_here

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Pages whose programs are pieces, and why they are not run here.
PIECES = {
    "data_parallel.md": "tests/parallel runs it in two processes",
    "effects.md": "its trainer and logger are the reader's; tests/capture runs the same calls",
    "recipes.md": "recipes/ runs them with the real packages; here they are compared with what is run there",
    "streams.md": "written by benchmarks.pages.inception_block",
    "streams_by_hand.md": "its tensors are the reader's; tests of streams by hand run the same calls",
    "architecture.md": "no programs",
}
MARKED = re.compile(r"^ *# shown: (\w+)\n(.*?)^ *# end of shown", re.DOTALL | re.MULTILINE)
WORKAROUND = re.compile(r"^\| (?:\[(?=pytorch#\d+\]\()|`)(\S+?)(?:\]\(\S+\)|`) \| (.+?) \| (.+?) \|$", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def programs(page):
    return BLOCK.findall(page.read_text(encoding="utf-8"))


RUNNABLE = [page for page in PAGES if page.name not in PIECES and programs(page)]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_programs_of_a_page_run_one_after_another_without_fallback(page, tmp_path, monkeypatch, capsys):
    program = tmp_path / "program.py"
    program.write_text("\n".join(programs(page)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    run_here(program)
    printed = capsys.readouterr().out
    if page.name == "README.md":
        losses = [float(text) for text in re.findall(r"epoch \d: loss ([\d.]+)", printed)]
        assert len(losses) == 5
        assert losses[-1] < losses[0] / 2
        assert "train_step" in printed.splitlines()[5]
    if page.name == "limits.md":
        assert "program.py" in printed


def sections(folder):
    """What the recipes mark as their page's: text between ``# shown: name`` and ``# end of shown``."""
    found = {}
    for path in sorted(folder.glob("test_*.py")):
        for name, body in MARKED.findall(path.read_text(encoding="utf-8")):
            found[name] = textwrap.dedent(body).strip()
    return found


def test_recipes_of_the_page_are_those_that_are_tested():
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"<!-- recipes: (\w+) -->\n```python\n(.*?)\n```", text, re.DOTALL))
    assert shown == sections(ROOT / "recipes")


def test_every_workaround_is_told_of():
    from millstream.lower.workarounds import WORKAROUNDS

    rows = WORKAROUND.findall((ROOT / "docs" / "upstream.md").read_text(encoding="utf-8"))
    told = {issue: (effect, versions) for issue, effect, versions in rows}

    def versions_of(each):
        bounds = (("from", each.since), ("before", each.until))
        return ", ".join(f"{word} {'.'.join(map(str, version))}" for word, version in bounds if version) or "all so far"

    known = {each.issue: (each.effect, versions_of(each)) for each in WORKAROUNDS}
    assert told == known


def test_every_option_is_in_the_reference():
    import inspect

    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    names = {*inspect.signature(compile).parameters, *inspect.signature(step).parameters} - {"model", "fn"}
    assert [name for name in sorted(names) if f"`{name}=" not in page] == []
    assert [name for name in PARTS if f"| `{name}` | " not in page] == []
    commands = next(action for action in make_parser()._actions if action.dest != "help" and action.choices).choices
    assert [name for name in commands if f"`millstream {name}" not in page] == []


def test_every_public_name_is_in_the_reference():
    """Under its own heading; errors are all those of their module."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^::: (\S+)\n    options:\n      heading: (\S+)$", text, re.MULTILINE))
    assert "::: millstream.errors\n" in text
    names = {f"ms.{name}": getattr(ms, name) for name in ms.__all__ if getattr(ms, name).__module__ != errors.__name__}
    assert {f"{each.__module__}.{each.__qualname__}": name for name, each in names.items()}.items() <= shown.items()
    missing = []
    for path in shown:
        module, _, name = path.rpartition(".")
        if not hasattr(importlib.import_module(module), name):
            missing.append(path)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for label, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{label}: {target}"
        docs = ROOT / "docs"  # the site has nothing else
        assert not page.is_relative_to(docs) or path.is_relative_to(docs), f"{label}: {target} is not on the site"
        if anchor:
            lines = path.read_text(encoding="utf-8").splitlines()
            assert anchor in [slug(line) for line in lines if line.startswith("#")], f"{label}: {target}"


def test_site_has_every_page_in_its_menu():
    hooks = runpy.run_path(str(ROOT / "tools" / "site_hooks.py"))
    outside = {path.relative_to(ROOT).as_posix() for pattern in hooks["OUTSIDE"] for path in ROOT.glob(pattern)}
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} | outside
    menu = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted(pages)
    for name in outside:
        text = hooks["for_site"]((ROOT / name).read_text(encoding="utf-8"), name)
        links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text)
        targets = {
            posixpath.normpath(posixpath.join(posixpath.dirname(name), link)) for link in links if ":" not in link
        }
        assert [each for each in targets if each not in pages and not (ROOT / "docs" / each).exists()] == []
    assert hooks["for_site"]("[a](docs/feed.md#b) [c](LICENSE)", "CHANGELOG.md") == "[a](feed.md#b) c"


def slug(heading):
    return re.sub(r"[^\w\s-]", "", heading.lstrip("#").strip().lower()).replace(" ", "-")


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"], ids=lambda page: page.name
)
def test_lines_of_prose_are_short(page):
    """Tables and listings are as wide as they are."""
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in prose.splitlines() if len(line) > 120 and not line.lstrip().startswith(("|", "!["))]
    assert long == []


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 120
