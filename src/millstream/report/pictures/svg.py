"""Pictures as one SVG: for pages and papers. What can be hovered has a title; light and dark follow the reader."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from textwrap import wrap

from millstream.report.pictures.picture import COLOURS, CRITICAL, Arrow, Picture, describe
from millstream.report.words import duration, percent, shorten

_WIDTH, _LEFT, _RIGHT = 1000, 108, 16  # pixels: all of it, room for the names of streams, and for the last tick
_LANE, _BAR, _LINE = 34, 20, 17  # pixels: from stream to stream, a kernel's height, a line of text
_CHARACTER = 6.2  # pixels: width at 11 pixels height, on the safe side
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, section 2.2

_STYLE = f"""
text {{ font: 11px sans-serif; fill: #222222 }}
.title {{ font-size: 14px; font-weight: bold }}
.paper {{ fill: #ffffff }}
.lane {{ fill: #f1f3f5 }}
.tick {{ stroke: #c8ced4 }}
.label {{ fill: #000000; pointer-events: none }}
.odd {{ fill-opacity: 0.78 }}
.critical {{ fill: {CRITICAL} }}
.wait {{ fill: none; stroke: #555f69; }}
.head {{ fill: #555f69 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #dde3e8 }}
.paper {{ fill: #14181c }}
.lane {{ fill: #20262c }}
.tick {{ stroke: #3c454e }}
.label {{ fill: #000000 }}
.wait {{ stroke: #aab4be }}
.head {{ fill: #aab4be }}
}}
{"".join(f".{kind} {{ fill: {colour} }}" + chr(10) for kind, colour in COLOURS.items())}"""


def to_svg(pictures: Sequence[Picture]) -> str:
    """Draw pictures one below the other.

    Each kernel is one element of class ``bar``, each wait one of class ``wait``.
    """
    parts, top = [], 0.0
    for picture in pictures:
        lines, height = _draw(picture)
        parts += [f'<g transform="translate(0 {top:g})">', *lines, "</g>"]
        top += height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top:g}" viewBox="0 0 {_WIDTH} {top:g}">',
        f"<style>{_STYLE}</style>",
        '<defs><marker id="head" orient="auto" markerWidth="6" markerHeight="6" refX="5" refY="3">'
        '<path class="head" d="M0 0L6 3L0 6z"/></marker></defs>',
        '<rect class="paper" width="100%" height="100%"/>',
    )
    return "\n".join((*head, *parts, "</svg>")) + "\n"


def _draw(picture: Picture) -> tuple[list[str], float]:
    """Return the elements of one picture, and its height."""
    lines = [_text(12, 22, picture.title, "title")]
    top = 22.0
    for sentence in picture.caption:
        for line in wrap(sentence, 165):
            top += _LINE
            lines.append(_text(12, top, line))
    lines += _legend(picture, top + 10)
    top += 34
    scale = (_WIDTH - _LEFT - _RIGHT) / max(picture.end_ns, 1)
    bottom = top + picture.num_streams * _LANE
    for time in ticks(picture.end_ns):
        x = _number(_LEFT + time * scale)
        lines.append(f'<path class="tick" d="M{x} {top:g}V{bottom + 4:g}"/>')
        lines.append(_text(_LEFT + time * scale, bottom + 16, duration(time) if time else "0", anchor="middle"))
    for stream in range(picture.num_streams):
        busy = percent(picture.busy_ns(stream), picture.end_ns)
        y = top + stream * _LANE
        lines.append(
            f'<rect class="lane" x="{_LEFT}" y="{y + 4:g}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_BAR}"/>'
        )
        lines.append(_text(12, y + 18, f"{picture.lane(stream)}: {busy}"))
    lines += _bars(picture, top, scale)
    lines.append(f'<g opacity="{min(0.7, 200 / max(len(picture.arrows), 1)):.2f}">')  # many must not hide the bars
    lines += (_arrow(picture, arrow, top, scale) for arrow in picture.arrows)
    lines.append("</g>")
    return lines, bottom + 30


def _legend(picture: Picture, top: float) -> Iterator[str]:
    x = 12.0
    entries = [*picture.kinds, *(["critical path"] if any(bar.is_critical for bar in picture.bars) else [])]
    for entry in entries:
        name = entry if entry in COLOURS else "critical"
        yield f'<rect class="{name}" x="{x:g}" y="{top:g}" width="11" height="11"/>'
        yield _text(x + 16, top + 10, entry)
        x += 32 + _CHARACTER * len(entry)


def _bars(picture: Picture, top: float, scale: float) -> Iterator[str]:
    number_on = [0] * picture.num_streams
    for bar in picture.bars:
        x, end = _LEFT + bar.start_ns * scale, _LEFT + bar.end_ns * scale
        y, width = top + bar.stream * _LANE + 4, _number(float(_number(end)) - float(_number(x)))
        shade = " odd" if number_on[bar.stream] % 2 else ""  # neighbours of one kind must not run together
        number_on[bar.stream] += 1
        place = f'x="{_number(x)}" y="{y:g}" width="{width}" height="{_BAR}"'
        title = "\n".join(describe(bar))
        yield f'<rect class="bar {bar.kind}{shade}" {place}><title>{_clean(title)}</title></rect>'
        if bar.is_critical:
            yield f'<rect class="critical" x="{_number(x)}" y="{y + _BAR:g}" width="{width}" height="4"/>'
        room = int((end - x - 4) / _CHARACTER)
        if room >= 3:
            yield _text(x + 3, y + 14, shorten(bar.label, room), "label")


def _arrow(picture: Picture, arrow: Arrow, top: float, scale: float) -> str:
    source = picture.bars[arrow.source]
    stream, start_ns = 0, picture.end_ns
    if arrow.target is not None:
        stream, start_ns = picture.bars[arrow.target].stream, picture.bars[arrow.target].start_ns
    down = stream > source.stream
    x, y = _LEFT + source.end_ns * scale, top + source.stream * _LANE + (4 + _BAR if down else 4)
    to_x, to_y = _LEFT + start_ns * scale, top + stream * _LANE + (4 if down else 4 + _BAR)
    middle = (y + to_y) / 2
    curve = f"M{_number(x)} {y:g}C{_number(x)} {middle:g} {_number(to_x)} {middle:g} {_number(to_x)} {to_y:g}"
    return f'<path class="wait" d="{curve}" marker-end="url(#head)"/>'


def ticks(end_ns: int, at_most: int = 10) -> list[int]:
    """Round times from 0 to the end of the run, in steps of 1, 2 or 5."""
    step = 1
    while end_ns > step * at_most:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return list(range(0, end_ns + 1, step))


def _text(x: float, y: float, content: str, name: str = "", anchor: str = "start") -> str:
    attributes = (f' class="{name}"' if name else "") + ("" if anchor == "start" else f' text-anchor="{anchor}"')
    return f'<text x="{_number(x)}" y="{y:g}"{attributes}>{_clean(content)}</text>'


def _number(value: float) -> str:
    """A coordinate, short; rounding keeps the order, so that what does not overlap in time does not in the picture."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _clean(content: str) -> str:
    """Text that no XML reader stumbles over."""
    return escape(_FORBIDDEN.sub("�", content))
