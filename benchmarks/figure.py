"""The README's picture: a training step in milliseconds, from the results. ``python -m benchmarks.figure``."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "training.json"
PICTURE = Path(__file__).parents[1] / "docs" / "figures" / "training.svg"
BASELINE = "compile loop"
LEFT, WIDTH, BAR, GAP = 190, 420, 18, 22  # pixels
COLOURS = {"torch.compile": "#9aa5b1", "millstream": "#1f7a8c"}


def draw(cases: list[tuple[str, float, float]], device: str) -> str:
    """Return an SVG with two bars for each ``(case, baseline ms, our ms)``."""
    longest = max(max(theirs, ours) for _, theirs, ours in cases)
    parts, y = [], 34
    for case, theirs, ours in cases:
        parts.append(text(LEFT - 10, y + BAR + 4, case, anchor="end"))
        for name, value in zip(COLOURS, (theirs, ours), strict=True):
            length = max(value / longest * WIDTH, 1)
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{COLOURS[name]}"/>')
            label = f"{value:.3g} ms" + (f"  ({theirs / ours:.1f}× faster)" if name == "millstream" else "")
            parts.append(text(LEFT + length + 6, y + BAR - 6, label))
            y += BAR
        y += GAP
    keys = [
        f'<rect x="{LEFT + 210 * i}" y="8" width="12" height="12" fill="{colour}"/>'
        + text(LEFT + 210 * i + 18, 18, name)
        for i, (name, colour) in enumerate(
            zip(("torch.compile, training loop", "ms.step"), COLOURS.values(), strict=True)
        )
    ]
    parts.append(text(LEFT, y + 4, f"one training step, {device}; less is better"))
    size = f'width="{LEFT + WIDTH + 170}" height="{y + 16}"'
    background = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{background}{"".join(keys + parts)}</svg>\n'


def text(x: float, y: float, content: str, anchor: str = "start") -> str:
    """One line of text."""
    font = 'font-family="sans-serif" font-size="13" fill="#222222"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {font}>{escape(content)}</text>'


def main() -> None:
    report: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    cases = [(row["case"], row["baseline_ms"], row["ours_ms"]) for row in report["rows"] if row["baseline"] == BASELINE]
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(cases, report["device"].split(",")[0]), encoding="utf-8")
    print(PICTURE)


if __name__ == "__main__":
    main()
