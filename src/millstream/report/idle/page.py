"""One HTML file without scripts or network: the diagnosis, a bar for each step, the table, two steps drawn in full."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from millstream.insight import Findings, Step
from millstream.report.idle.drawing import COLOURS, draw_bars, draw_step, legend_of, median_step, worst_step
from millstream.report.idle.places import code, place
from millstream.report.idle.remedies import TITLES, remedy
from millstream.report.idle.screen import to_text
from millstream.report.words import duration, percent

_MOST_ROWS, _LEAST = 40, 0.01  # of the window: smaller rows are folded

_STYLE = """
body { font: 14px/1.5 sans-serif; max-width: 1100px; margin: 24px auto; padding: 0 16px; color: #222; background: #fff }
pre { background: #f1f3f5; padding: 12px; overflow-x: auto; font-size: 12.5px }
table { border-collapse: collapse; width: 100%; font-size: 13px }
td, th { text-align: left; padding: 4px 8px; border-bottom: 1px solid #ddd; vertical-align: top }
td.n { text-align: right; white-space: nowrap }
code { font-size: 12px } i { display: inline-block; width: 11px; height: 11px; margin: 0 4px 0 0 }
p i { margin-left: 12px } summary { cursor: pointer; margin: 8px 0 }
svg text { font: 11px sans-serif; fill: currentColor }
@media (prefers-color-scheme: dark) { body { color: #dde3e8; background: #14181c } pre { background: #20262c }
td, th { border-color: #3c454e } }
"""


def to_page(found: Findings) -> str:
    """The report as a page."""
    script = escape(found.recording.script or "this process")
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>{script}: {escape(str(found.severity))}</title><style>{_STYLE}</style>",
        f"<h1>Why is the device idle? {script}</h1><pre>{escape(to_text(found))}</pre>",
    ]
    if found.steps:
        parts += ["<h2>Steps, measured</h2>", _legend(found), draw_bars(found)]
        parts += ["<h2>Causes</h2>", _table(found)]
        for title, step in _chosen(found):
            parts += [
                f"<h2>{title} step, measured: {duration(step.end_ns - step.start_ns)}</h2>",
                draw_step(found, step),
            ]
    parts += ["<h2>How it was measured</h2>", _measured(found), "</html>"]
    return "\n".join(parts) + "\n"


def _legend(found: Findings) -> str:
    entries = legend_of(found)
    return "<p>" + "".join(f"<i style='background:{colour}'></i>{escape(name)}" for name, colour in entries) + "</p>"


def _table(found: Findings) -> str:
    head = "<tr><th>cause<th>line<th>steps<th>idle<th>to win back<th>what to do</tr>"
    rows: list[str] = []
    small: list[str] = []
    for row in found.rows[:_MOST_ROWS]:
        inside = f"<br>in {escape(place(row.inside))}" if row.inside is not None else ""
        win = "" if row.is_rare else percent(row.recoverable_share, 1)
        is_small = max(row.share, row.recoverable_share) < _LEAST and row is not found.leading
        (small if is_small else rows).append(
            f"<tr><td><i style='background:{COLOURS[row.cause]}'></i>{escape(TITLES[row.cause])}"
            f"<td>{escape(place(row.site))}{inside}<br><code>{escape(code(row.site))}</code>"
            f"<td class='n'>{row.num_steps}"
            f"<td class='n'>{percent(row.share, 1)}<td class='n'>{win}<td>{escape(remedy(row, found))}</tr>"
        )
    table = f"<table>{head}{''.join(rows)}</table>"
    if not small:
        return table
    what = f"{len(small)} more below {percent(_LEAST, 1)}" + f", of {len(found.rows)}" * (len(found.rows) > _MOST_ROWS)
    return f"{table}<details><summary>{what}</summary><table>{head}{''.join(small)}</table></details>"


def _chosen(found: Findings) -> Iterator[tuple[str, Step]]:
    yield "The median", median_step(found)
    if len(found.steps) > 1:
        yield "The worst", worst_step(found)


def _measured(found: Findings) -> str:
    recording = found.recording
    facts = [
        f"{len(recording.steps)} steps seen, {len(found.steps)} after the warm-up judged; {len(recording.samples)} "
        f"samples of the training thread, {len(recording.spans)} exact spans, {len(recording.launches)} launches.",
        "All is measured, but what mending a cause would give: that is calculated, by playing the run without it.",
        *recording.caveats,
    ]
    if recording.looking_slowed is not None:
        slower = f"{recording.looking_slowed:.1%}".replace("%", " %")
        facts.append(f"Steps under the device's profiler took {slower} longer than others.")
    if recording.is_synchronous:
        facts.append("There is no GPU in this: busy is the time in which operators computed on the CPU, by samples.")
    return "<ul>" + "".join(f"<li>{escape(fact)}" for fact in facts) + "</ul>"
