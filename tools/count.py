"""Count the project: lines by package, and what should be few, as a table in Markdown.

*Code* is what is left of the lines without docstrings, comments and blank lines. Run it on another checkout to compare:
``python tools/count.py [ROOT]``.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

PACKAGE = "millstream"
OTHERS = ("tools", "examples", "recipes")
LONG_FILE, FULL_FOLDER, MANY_PARAMETERS = 450, 12, 8
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class Size(NamedTuple):
    """Of some files."""

    files: int
    lines: int
    code: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1], help="a checkout")
    root: Path = parser.parse_args().root
    source = root / "src" / PACKAGE
    trees = {module_name(path, source): ast.parse(path.read_text(encoding="utf-8")) for path in python_in(source)}
    print("\n".join(table(["lines", "files", "lines", "code"], sizes(root))))
    print()
    print("\n".join(table(["what should be few", "number", "which"], defects(source, trees))))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lines of a Markdown table whose second column and those after it with numbers are aligned to the right."""
    yield f"| {' | '.join(head)} |"
    yield f"|---|{''.join('---|' if name == 'which' else '--:|' for name in head[1:])}"
    for row in rows:
        yield f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else str(cell) for cell in row)} |"


def sizes(root: Path) -> Iterator[tuple[object, ...]]:
    """The rows of the first table: packages of ``src`` by their code, their sum, and everything else."""
    source = root / "src" / PACKAGE
    packages: defaultdict[str, list[Path]] = defaultdict(list)
    for path in python_in(source):
        packages[path.relative_to(source).parts[0].removesuffix(".py")].append(path)
    of_package = {name: size_of(paths) for name, paths in packages.items()}
    for name, size in sorted(of_package.items(), key=lambda item: -item[1].code):
        yield (f"`{name}`", *size)
    yield ("**src**", *map(sum, zip(*of_package.values(), strict=True)))
    yield ("C++", *size_of(sorted(source.rglob("*.cpp"))))
    yield ("tests", *size_of(python_in(root / "tests")))
    yield ("benchmarks", *size_of(python_in(root / "benchmarks")))
    yield (", ".join(OTHERS), *size_of([path for name in OTHERS for path in python_in(root / name)]))


def defects(source: Path, trees: Mapping[str, ast.Module]) -> Iterator[tuple[object, ...]]:
    """The rows of the second table, all about ``src``."""
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_in(source)}
    named = {path: length for path, length in lengths.items() if not path.stem.startswith("__")}
    yield ("lines of the median file", int(median(named.values())), "")
    long = sorted(((length, path) for path, length in lengths.items() if length > LONG_FILE), reverse=True)
    yield row(f"files over {LONG_FILE} lines", [f"{path.relative_to(source)} {length}" for length, path in long])
    folders = Counter(path.parent for path in [*named, *source.rglob("*.cpp")])
    full = [f"{each.relative_to(source)}/ {count}" for each, count in folders.most_common() if count > FULL_FOLDER]
    yield row(f"folders over {FULL_FOLDER} files", full)
    many = sorted(((count, name) for tree in trees.values() for name, count in wide_functions(tree)), reverse=True)
    yield row(f"functions over {MANY_PARAMETERS} parameters", [f"{name} {count}" for count, name in many])
    yield row("file names for several things", repeated(path.name for path in named))
    classes = (node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    yield row("class names for several things", repeated(classes))
    for what, typing in (("import cycles", False), ("import cycles with TYPE_CHECKING", True)):
        imports = {name: set(imported(name, tree, trees, typing)) for name, tree in trees.items()}
        yield row(what, [" ↔ ".join(each) for each in cycles(imports)])


def row(what: str, found: Sequence[str]) -> tuple[object, ...]:
    return what, len(found), ", ".join(found)


def repeated(names: Iterable[str]) -> list[str]:
    """Names that occur more than once, with how often."""
    return [f"{name} ×{count}" for name, count in Counter(names).most_common() if count > 1]


def python_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def module_name(path: Path, source: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def size_of(paths: Sequence[Path]) -> Size:
    texts = [(path, path.read_text(encoding="utf-8")) for path in paths]
    code = sum(code_lines(text) if path.suffix == ".py" else cpp_code_lines(text) for path, text in texts)
    return Size(len(texts), sum(len(text.splitlines()) for _, text in texts), code)


def code_lines(text: str) -> int:
    """Lines of Python that are neither docstring nor comment nor blank."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))  # a docstring
    return len(lines)


def cpp_code_lines(text: str) -> int:
    return sum(bool(line.strip()) for line in _CPP_COMMENT.sub("", text).splitlines())


def wide_functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Functions with many parameters, ``self`` not counted; kernels of Triton and overloads are left out."""
    makers = {id(each): node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        marks = " ".join(ast.unparse(each) for each in node.decorator_list)
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        count = len(positional) + len(arguments.kwonlyargs)
        count -= bool(positional) and positional[0].arg in ("self", "cls")
        is_kernel = "jit" in marks or any("constexpr" in ast.unparse(each) for each in positional if each.annotation)
        if count > MANY_PARAMETERS and not is_kernel and "overload" not in marks:
            yield makers.get(id(node), node.name) if node.name == "__init__" else node.name, count


def imported(name: str, tree: ast.Module, trees: Mapping[str, ast.Module], typing: bool) -> Iterator[str]:
    """The package's modules that a module imports when it is imported; with ``typing``, for annotations as well."""
    for node in at_import(tree.body, typing):
        if isinstance(node, ast.Import):
            candidates = [alias.name for alias in node.names]
        else:
            base = node.module or ""
            candidates = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in trees else base for alias in node.names]
        yield from (each for each in candidates if each in trees and each != name)


def at_import(body: Sequence[ast.stmt], typing: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a body, those within functions left out."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_import(node.body if typing else node.orelse, typing)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            parts = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            parts += [handler.body for handler in getattr(node, "handlers", [])]
            for part in parts:
                yield from at_import(part, typing)


def cycles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which is reached from each other one."""

    def reach(first: str) -> set[str]:
        found, waiting = set(), [first]
        while waiting:
            for each in imports[waiting.pop()] - found:
                found.add(each)
                waiting.append(each)
        return found

    reached = {name: reach(name) for name in imports}
    groups = {frozenset(each for each in reached[name] if name in reached[each]) for name in imports}
    return sorted(sorted(each.removeprefix(f"{PACKAGE}.") for each in group) for group in groups if len(group) > 1)


if __name__ == "__main__":
    main()
