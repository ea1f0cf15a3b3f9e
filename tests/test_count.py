"""The script that counts the project: what it takes for code, and what it finds to be mended."""

import runpy
from pathlib import Path

COUNT = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "count.py"))
PACKAGE = COUNT["PACKAGE"]

MODULE = '''"""A docstring
of two lines."""

import b  # a comment

class Twice:
    """Another."""
    size: int = 1
    """One of an attribute."""

    def __init__(self, a, b, c, d, e, f, g, h, i):
        text = """code
of two lines"""
'''


def test_docstrings_comments_and_blank_lines_are_no_code():
    assert COUNT["code_lines"](MODULE) == 6
    assert COUNT["cpp_code_lines"]("int a; // one\n\n/* two\nthree */\nint b;\n") == 2


def test_defects_of_a_package_are_found(tmp_path):
    source = tmp_path / "src" / PACKAGE
    for folder in ("", "one", "two"):
        (source / folder).mkdir(parents=True, exist_ok=True)
        (source / folder / "__init__.py").touch()
    (source / "one" / "same.py").write_text(MODULE)
    (source / "two" / "same.py").write_text(f"from {PACKAGE}.two.other import x\nclass Twice: ...\n" + "pass\n" * 500)
    (source / "two" / "other.py").write_text(
        f"from typing import TYPE_CHECKING\nx = 1\nif TYPE_CHECKING:\n    import {PACKAGE}.two.same\n"
        "@triton.jit\ndef kernel(a, b, c, d, e, f, g, h, i): ...\n"
    )
    trees = {COUNT["module_name"](path, source): COUNT["ast"].parse(path.read_text()) for path in source.rglob("*.py")}
    found = {what: which or number for what, number, which in COUNT["defects"](source, trees)}
    assert found == {
        "lines of the median file": 13,
        "files over 450 lines": f"{Path('two', 'same.py')} 502",
        "folders over 12 files": 0,
        "functions over 8 parameters": "Twice 9",
        "file names for several things": "same.py ×2",
        "class names for several things": "Twice ×2",
        "import cycles": 0,
        "import cycles with TYPE_CHECKING": "two.other ↔ two.same",
    }


def test_no_name_stands_for_two_things_and_no_file_imports_another_in_a_circle():
    """Nor for annotations; within a package, too, which the contracts of layers see as one."""
    source = Path(__file__).parents[1] / "src" / PACKAGE
    trees = {COUNT["module_name"](path, source): COUNT["ast"].parse(path.read_text()) for path in source.rglob("*.py")}
    found = {
        what: which for what, _, which in COUNT["defects"](source, trees) if what.startswith(("file n", "cl", "im"))
    }
    assert found == {
        "file names for several things": "",
        "class names for several things": "",
        "import cycles": "",
        "import cycles with TYPE_CHECKING": "",
    }
