"""Writes ``docs/idioms.md`` from the table that ``tests/capture/test_idioms.py`` runs.

PYTHONPATH=. python docs/idioms.py
"""

from __future__ import annotations

from pathlib import Path

from tests.capture.idioms import IDIOMS

PAGE = Path(__file__).with_name("idioms.md")

HEAD = """# Idioms of training loops

What becomes of what people write in their steps: captured as it is, or run as plain Python with one warning, and what
to write instead. Each row is a test that compares with eager Python; this page is made from them by `python
docs/idioms.py`. [What is done after the graph](effects.md) and [all reasons](reasons.md) say more.

"""


def make_page() -> str:
    """The page as it should be now."""
    rows = [(each.title, each.remedy) for each in IDIOMS]
    captured = "".join(f"- {title}\n" for title, remedy in rows if not remedy)
    warned = "".join(f"| {title} | {remedy} |\n" for title, remedy in rows if remedy)
    return (
        f"{HEAD}## Captured as they are\n\n{captured}\n## With a warning\n\n| written | instead |\n|---|---|\n{warned}"
    )


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
