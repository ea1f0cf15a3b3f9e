"""A profile as one SVG for pages and papers: the diagnosis, a bar for each step, and the median step."""

from __future__ import annotations

import re
import textwrap
from html import escape

from millstream.insight import Findings
from millstream.report.idle.drawing import WIDTH, draw_bars, draw_step, legend_of, median_step
from millstream.report.idle.screen import to_text
from millstream.report.words import duration

_LINE, _TOP, _BARS, _CHARACTER = 17, 22, 176, 6.6  # pixels
_FITS = int((WIDTH - 8) / 7.3)  # characters of what is said, in a font of one width
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, section 2.2
_STYLE = """
svg { color: #222 } text { font: 11px sans-serif; fill: currentColor }
.say { font: 12px monospace } .paper { fill: #fff }
@media (prefers-color-scheme: dark) { svg { color: #dde3e8 } .paper { fill: #14181c } }
"""


def _fitting(line: str) -> list[str]:
    """A line in pieces that fit the picture."""
    return textwrap.wrap(line, _FITS, subsequent_indent="  ", drop_whitespace=False, break_on_hyphens=False)


def to_picture(found: Findings) -> str:
    """The report as a picture that needs nothing else."""
    said = [line for line in to_text(found).splitlines() if line.strip()]
    table = next((number for number, line in enumerate(said) if line.lstrip().startswith("cause ")), len(said))
    lines, y = [], _TOP
    for line in (part for whole in said[: max(table, 1)] for part in _fitting(whole)):
        lines.append(f"<text class='say' xml:space='preserve' x='4' y='{y}'>{_text(line)}</text>")
        y += _LINE
    if found.steps:
        x = 4.0
        for name, colour in legend_of(found):
            lines.append(f"<rect x='{x:.0f}' y='{y - 4}' width='11' height='11' fill='{colour}'/>")
            lines.append(f"<text x='{x + 15:.0f}' y='{y + 6}'>{_text(name)}</text>")
            x += 30 + _CHARACTER * len(name)
        lines.append(f"<g transform='translate(0 {y + 14})'>{draw_bars(found, with_titles=False)}</g>")
        y += 14 + _BARS + _LINE
        step = median_step(found)
        length = duration(step.end_ns - step.start_ns)
        lines.append(f"<text x='4' y='{y}'>The median step, measured: {length}</text>")
        drawn = draw_step(found, step, with_titles=False)
        lines.append(f"<g transform='translate(0 {y + 8})'>{drawn}</g>")
        y += 8 + int(drawn.split("height='", 1)[1].split("'", 1)[0])
    size = f"width='{WIDTH}' height='{y}' viewBox='0 0 {WIDTH} {y}'"
    body = "\n".join(lines)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size}><style>{_STYLE}</style>\n"
        f"<rect class='paper' width='{WIDTH}' height='{y}'/>\n{body}\n</svg>\n"
    )


def _text(text: str) -> str:
    return escape(_FORBIDDEN.sub("�", text))
