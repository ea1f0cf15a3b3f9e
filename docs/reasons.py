"""Writes ``docs/reasons.md``: every reason for which something is not captured, and its remedy, as the code has them.

python docs/reasons.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reasons.md"

HEAD = """# Reasons and remedies

Every reason for which a step or a graph is not captured, as warnings and errors say it, and what to do. `…` stands for
your names and lines. `python docs/reasons.py` makes this page from the code.

| it says | do |
|---|---|
"""


def text_of(node: ast.expr | None) -> str:
    """The text of a string in the code, with ``…`` where something is filled in; empty for what is none."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "…" for part in parts)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return (text_of(left) or "…") + (text_of(right) or "…")
        case _:
            return ""


def reasons_in(source: str, named: dict[str, str]) -> list[tuple[str, str]]:
    """Reason and remedy of each ``CaptureError`` that ``source`` makes, by itself or not, with a text of its own."""
    found = []
    for node in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        function, first = getattr(node.func, "id", getattr(node.func, "attr", "")), 0
        if function.endswith("CaptureError") and node.args:
            remedy = next((keyword.value for keyword in node.keywords if keyword.arg == "remedy"), None)
        elif function in ("raise_refusal", "_fail") and len(node.args) > 1:
            remedy, first = node.args[-1], len(node.args) - 2
        else:
            continue
        text = named.get(remedy.id, "") if isinstance(remedy, ast.Name) else text_of(remedy)
        found.append((text_of(node.args[first]), text))
    return [(reason, remedy) for reason, remedy in found if len(reason.strip("… .")) > 5]


def constants_in(source: str) -> dict[str, str]:
    """Texts that a module has given names."""
    body = ast.parse(source).body
    return {
        node.targets[0].id: text_of(node.value)
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and text_of(node.value)
    }


def make_page() -> str:
    """The page as it should be now."""
    sources = [path.read_text() for path in sorted((ROOT / "src" / "millstream").rglob("*.py"))]
    named = {name: text for source in sources for name, text in constants_in(source).items()}
    rows = sorted({row for source in sources for row in reasons_in(source, named)})
    return HEAD + "".join(f"| {reason} | {remedy} |\n".replace("\n |", " |") for reason, remedy in rows)


if __name__ == "__main__":
    PAGE.write_text(make_page())
