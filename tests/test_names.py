"""What the code and the pages name is there: also what is imported within a function that runs on a GPU alone."""

import ast
import contextlib
import functools
import re
import textwrap
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PACKAGES = {"millstream": ROOT / "src" / "millstream", "benchmarks": ROOT / "benchmarks", "tests": ROOT / "tests"}
FOLDERS = ["src", "tests", "benchmarks", "examples", "recipes", "tools", "docs"]
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [ROOT / name for name in ("README.md", "pyproject.toml", "Makefile", "benchmarks/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [path for path in (*SOURCES, *PAGES) if path != Path(__file__)]
DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.[a-z_]\w*)+")
SLASHED = re.compile(r"(?<![\w./*-])(?:\w+/)+\w+\.(?:py|cpp|html)\b")
#: Loggers, and files of PyTorch and of users.
OTHERS = {"millstream.workarounds", "millstream.test", "tests.effects"}
OTHERS |= {"pkg/train.py"}
PYTORCH = Path(torch.__file__).parent


def module_at(dotted):
    """The file of a module or package; a folder without an ``__init__.py`` is a package too."""
    first, *rest = dotted.split(".")
    path = PACKAGES[first].joinpath(*rest)
    candidates = (path / "__init__.py", path.with_suffix(".py"), path)
    return next((each for each in candidates if each.exists()), None)


@functools.cache
def names_in(path):
    """What a module binds at its top level, and whatever it names in a string where it imports on demand."""
    if path.is_dir():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names, waiting = {"__file__"}, [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(each.asname or each.name).split(".")[0] for each in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        waiting += ast.iter_child_nodes(node)
    if "__getattr__" in names:
        constants = (each.value for each in ast.walk(tree) if isinstance(each, ast.Constant))
        names |= {each for each in constants if isinstance(each, str)}
    return frozenset(names)


def is_there(dotted):
    """Whether a dotted name is a module, or something that a module binds; what follows that is not looked at."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = module_at(".".join(parts[:length]))
        if path is not None:
            return length == len(parts) or parts[length] in names_in(path)
    return False


PROGRAM = re.compile(rf"^\s*from (?:{'|'.join(PACKAGES)})\b.* import ", re.MULTILINE)


def imported_names(tree):
    """What a module imports, also in the programs that it holds as texts and runs in other processes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and PROGRAM.search(node.value):
            with contextlib.suppress(SyntaxError):  # a text with places to fill in
                yield from imported_names(ast.parse(textwrap.dedent(node.value)))
        if isinstance(node, ast.Import):
            found = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found = [f"{node.module}.{each.name}" for each in node.names]
        else:
            continue
        yield from (name for name in found if name.split(".")[0] in PACKAGES)


def test_imports_find_what_they_name():
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in imported_names(ast.parse(path.read_text(encoding="utf-8")))
        if not is_there(name)
    }
    assert not missing


def test_modules_named_in_texts_are_there():
    """As in programs that a test runs in another process, attributes that it replaces, and commands on a page."""
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in TEXTS
        for name in DOTTED.findall(path.read_text(encoding="utf-8"))
        if name not in OTHERS and not is_there(name)
    }
    assert not missing


def test_files_named_in_texts_are_there():
    kinds = (".py", ".cpp", ".html")
    files = [f"/{path}" for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in TEXTS
        for name in SLASHED.findall(path.read_text(encoding="utf-8"))
        if name not in OTHERS and not any(file.endswith(f"/{name}") for file in files)
        if not (PYTORCH / name).exists() and not (PYTORCH.parent / name).exists()
    }
    assert not missing


@pytest.mark.parametrize(
    "name", ["millstream.engines", "millstream.errors.NoError", "millstream.lower.compile.nothing", "tests.nowhere"]
)
def test_a_name_of_nothing_is_seen(name):
    assert not is_there(name)


def test_every_folder_of_a_package_stands_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    source = PACKAGES["millstream"]
    folders = [path.parent.relative_to(source).as_posix() for path in source.glob("*/**/__init__.py")]
    assert [each for each in folders if "/" in each and f"`{each}/`" not in text] == []


def test_slow_tests_are_there():
    """A test that was renamed would be among the quick ones again, without a word."""
    for line in (ROOT / "tests" / "slow.txt").read_text().splitlines():
        path, name = line.partition("[")[0].split("::")
        assert f"def {name}(" in (ROOT / path).read_text(), line
