"""One HTML file without network: what idles, what can be gained, the line; each step, the causes, two steps in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from millstream.insight import Cause, Findings, Row, Severity
from millstream.insight.causes import REMEDY_FREE
from millstream.report.idle.drawing import (
    COLOURS,
    DrawnStep,
    bars_of,
    draw_step,
    legend_of,
    median_step,
    worst_step,
)
from millstream.report.idle.remedies import TITLES, remedy
from millstream.report.idle.screen import diagnosis, event_lines, gain, headline_facts, how_often, idle_share
from millstream.report.idle.source_lines import code, place
from millstream.report.pages import render
from millstream.report.words import count, duration, percent

_MOST_LINES, _LEAST = 8, 0.01  # of one cause; of the window: smaller causes are folded


class Figure(NamedTuple):
    """A number to be read from far away, and what it is."""

    value: str
    text: str


class LineRow(NamedTuple):
    """A line of the user's, and what happened there."""

    place: str
    code: str
    inside: str = ""
    count: str = ""
    share: float = 0.0


class CauseRows(NamedTuple):
    """All rows of one cause: what is to be done about it is said once."""

    title: str
    colour: str
    share: float
    gain: float | None
    remedy: str
    lines: list[LineRow]
    num_more: int


def to_page(found: Findings) -> str:
    """The report as a page."""
    row = found.leading
    causes, small = _causes(found)
    return render(
        "profile.html",
        found=found,
        script=found.recording.script or "this process",
        facts=f"{headline_facts(found)}. {'Unreliable' if found.why_unreliable else 'Reliable'}.",
        idle=_idle(found),
        gain=_gain(found),
        row=row,
        title=TITLES[row.cause] if row is not None else "",
        line=_line(row, found) if row is not None else None,
        said=" ".join(diagnosis(found)[0].split()),
        notes=[*([remedy(row, found)] if row is not None else []), *(each.strip() for each in event_lines(found))],
        legend=legend_of(found),
        bars=bars_of(found) if found.steps else None,
        causes=causes,
        small=small,
        steps=list(_steps(found)),
        measured=list(_measured(found)),
    )


def _idle(found: Findings) -> Figure:
    if not found.steps or (found.why_unreliable and found.recording.is_synchronous):
        return Figure("?", "of a step is idle")
    of = "a step" if found.recording.has_steps else "the run"
    number = len(found.steps) if found.recording.has_steps else 1
    times = f"{duration(found.idle_ns / number)} of {duration(found.window_ns / number)}"
    what = f"of {of} the CPU does not compute" if found.recording.is_synchronous else f"of {of} the GPU is idle"
    return Figure(idle_share(found), f"{what}: {times}")


def _gain(found: Findings) -> Figure:
    row = found.leading
    if row is None:
        none = found.severity is Severity.HEALTHY
        return Figure("–" if none else "?", "nothing to gain above 5 %" if none else "can be gained")
    if row.is_rare:
        return Figure(percent(row.recoverable_share, 1), "of the run can be gained")
    before, after = gain(row, found)
    of = "a step" if found.recording.has_steps else "for all of it"
    return Figure(f"{before / after:.3g}×", f"as fast without it: {duration(before)} → about {duration(after)} {of}")


def _line(row: Row, found: Findings) -> LineRow:
    inside = place(row.inside) if row.inside is not None else ""
    return LineRow(place(row.site), code(row.site), inside, how_often(row, found), row.share)


def _causes(found: Findings) -> tuple[list[CauseRows], list[CauseRows]]:
    """The causes that matter, and the small ones."""
    groups: dict[tuple[Cause, bool], list[Row]] = {}
    for row in found.rows:
        groups.setdefault((row.cause, row.is_rare), []).append(row)
    large, small = [], []
    for (cause, is_rare), rows in groups.items():
        rows = sorted(rows, key=lambda row: -row.idle_ns)
        share, back = sum(row.share for row in rows), sum(row.recoverable_share for row in rows)
        is_small = max(share, back) < _LEAST and found.leading not in rows
        shown = [row for row in rows[:_MOST_LINES] if is_small or row.share >= _LEAST or row is rows[0]]
        (small if is_small else large).append(
            CauseRows(
                TITLES[cause] + " (of the whole run)" * is_rare,
                COLOURS[cause],
                share,
                None if is_rare or cause in REMEDY_FREE else back,
                remedy(rows[0], found) if found.leading not in rows else "",
                [_line(row, found) for row in shown],
                len(rows) - len(shown),
            )
        )
    return large, small


def _steps(found: Findings) -> Iterator[DrawnStep]:
    if found.steps:
        yield draw_step(found, median_step(found), "median")
    if len(found.steps) > 1:
        yield draw_step(found, worst_step(found), "longest")


def _measured(found: Findings) -> Sequence[str]:
    recording = found.recording
    seen = (
        f"{count(len(recording.steps), 'step')} seen, {len(found.steps)} after the warm-up judged; "
        f"{count(len(recording.samples), 'sample')} of the training thread, "
        f"{count(len(recording.spans), 'exact span')}, {count(len(recording.launches), 'launch')}."
    )
    facts = [
        seen.replace("launchs", "launches"),
        "All is measured, but what mending a cause would give: that is calculated, by playing the run without it.",
        *recording.caveats,
    ]
    if recording.looking_slowed is not None:
        slower = percent(recording.looking_slowed, 1)
        facts.append(f"Steps under the device's profiler took {slower} longer than others.")
    if recording.is_synchronous:
        facts.append("There is no GPU in this: busy is the time in which operators computed on the CPU, by samples.")
    return facts
