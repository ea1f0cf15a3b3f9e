"""The README's picture: our share of torch.compile's time, from the results. ``python -m benchmarks.pages.figure``."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
PICTURE = Path(__file__).parents[2] / "docs" / "figures" / "speed.svg"
SUITES = {"training": ("compile loop", "step"), "inference": ("inductor graph", "")}  # baseline, and what a case is of
LEFT, WIDTH, BAR, GAP = 215, 420, 18, 10  # pixels
COLOURS = {"torch.compile: training loop, or kernels in one CUDA graph": "#9aa5b1", "millstream": "#1f7a8c"}


def draw(cases: list[tuple[str, float, float]], device: str) -> str:
    """Return an SVG with two bars for each ``(case, baseline ms, our ms)``, the baseline's as long as any other's."""
    parts, y = [], 34
    for case, theirs, ours in cases:
        parts.append(text(LEFT - 10, y + BAR + 4, case, anchor="end"))
        for colour, value in zip(COLOURS.values(), (theirs, ours), strict=True):
            length = value / theirs * WIDTH
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{colour}"/>')
            label = f"{value:.3g} ms" + (f"  ({theirs / ours:.2f}× faster)" if value is ours else "")
            parts.append(text(LEFT + length + 6, y + BAR - 6, label))
            y += BAR
        y += GAP
    keys, x = [], LEFT
    for name, colour in COLOURS.items():
        keys.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}"/>' + text(x + 18, 18, name))
        x += 410
    parts.append(text(LEFT, y + 8, f"{device}; less is better"))
    size = f'width="{LEFT + WIDTH + 170}" height="{y + 20}"'
    background = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{background}{"".join(keys + parts)}</svg>\n'


def text(x: float, y: float, content: str, anchor: str = "start") -> str:
    """One line of text."""
    font = 'font-family="sans-serif" font-size="13" fill="#222222"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {font}>{escape(content)}</text>'


def main() -> None:
    cases, device = [], ""
    for suite, (baseline, kind) in SUITES.items():
        report: dict[str, Any] = json.loads((RESULTS / f"{suite}.json").read_text(encoding="utf-8"))
        device = report["device"].split(",")[0]
        cases += [  # each case once
            (f"{row['case']} {kind}".strip(), row["baseline_ms"], row["ours_ms"])
            for row in report["rows"]
            if row["baseline"] == baseline and row["ratio"] and "host)" not in row["case"] and "," not in row["variant"]
        ]
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(cases, device), encoding="utf-8")
    print(PICTURE)


if __name__ == "__main__":
    main()
