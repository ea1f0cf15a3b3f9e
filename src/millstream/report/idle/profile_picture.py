"""A profile as one SVG for pages and papers: the diagnosis, a bar for each step, and the median step."""

from __future__ import annotations

import textwrap

from millstream.insight import Findings
from millstream.report.idle.drawing import bars_of, draw_step, joined, legend_of, median_step
from millstream.report.idle.screen import to_text
from millstream.report.pages import render

_WIDTH, _LEFT, _LANE = 1060, 110, 26  # pixels
_LINE, _TOP, _BARS, _CHARACTER = 17, 22, 186, 6.6  # pixels
_FITS = int((_WIDTH - 8) / 7.3)  # characters of what is said, in a font of one width


def _fitting(line: str) -> list[str]:
    """A line in pieces that fit the picture."""
    return textwrap.wrap(line, _FITS, subsequent_indent="  ", drop_whitespace=False, break_on_hyphens=False)


def to_picture(found: Findings) -> str:
    """The report as a picture that needs nothing else."""
    lines = [line for line in to_text(found).splitlines() if line.strip()]
    table = next((number for number, line in enumerate(lines) if line.lstrip().startswith("cause ")), len(lines))
    parts = [part for whole in lines[: max(table, 1)] for part in _fitting(whole)]
    said = [(_TOP + _LINE * number, part) for number, part in enumerate(parts)]
    top = _TOP + _LINE * len(said)
    if not found.steps:
        return render("profile.svg", said=said, width=_WIDTH, height=top, bars=None)
    legend, x = [], 4.0
    for name, colour in legend_of(found):
        legend.append((round(x), name, colour))
        x += 30 + _CHARACTER * len(name)
    step = draw_step(found, median_step(found), "median")
    step = step._replace(lanes=[lane._replace(pieces=joined(lane.pieces)) for lane in step.lanes])
    step_top = top + 14 + _BARS + 2 * _LINE
    return render(
        "profile.svg",
        said=said,
        legend=legend,
        bars=bars_of(found),
        step=step,
        width=_WIDTH,
        left=_LEFT,
        lane_height=_LANE,
        top=top - 4,
        bars_top=top + 14,
        step_top=step_top,
        height=step_top + _LANE * len(step.lanes) + 20,
    )
