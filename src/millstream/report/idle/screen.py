"""The first screen: the diagnosis, why, what to do, and how the idle time is made up."""

from __future__ import annotations

from textwrap import wrap

from millstream.insight import SAMPLED, Cause, Findings, Row, Severity
from millstream.insight.causes import REMEDY_FREE
from millstream.insight.findings import MODERATE, UNSURE
from millstream.report.idle.remedies import TITLES, remedy
from millstream.report.idle.source_lines import code, place
from millstream.report.words import count, duration, percent, table

_WIDTH = 118
_SHOWN = 8  # rows of the table
_LEAST = 0.01  # of the window: smaller rows are left out of the table
_LONG_NS = 100_000_000  # what samples tell of is seen by several of them
_INDENT = " " * 10


def to_text(found: Findings) -> str:
    """The report for a terminal."""
    lines = [_headline(found), *diagnosis(found)]
    if found.steps:
        lines += [_sum(found)] if found.recording.has_steps else []
        lines += _rows(found)
    lines += event_lines(found)
    if found.unseen_python >= MODERATE:
        lines.append(f"note: {_unseen(found)}, and counts as calling operators")
    lines += [f"note: {caveat}" for caveat in found.recording.caveats if caveat != found.why_unreliable]
    return "\n".join(lines)


def headline_facts(found: Findings) -> str:
    """Return how many steps, on what, and what looking cost."""
    recording = found.recording
    facts = [recording.device, count(len(found.steps), "step") if recording.has_steps else "no steps"]
    if found.idle_ns:
        facts.append(f"lines found for {percent(found.located_share, 1)}")
    if recording.cost_share is not None:
        facts.append(f"profiling cost {recording.cost_share:.1%}".replace("%", " %"))
    return ", ".join(facts)


def idle_share(found: Findings) -> str:
    """Of the window, in percent."""
    return percent(found.idle_ns, found.window_ns)


def _headline(found: Findings) -> str:
    recording = found.recording
    name = recording.script or "this run"
    if not found.steps:
        return f"{name}: {duration(recording.end_ns - recording.start_ns)}, {recording.device}."
    whose = "The CPU does not compute for" if recording.is_synchronous else "GPU idle"
    if not recording.has_steps and found.why_unreliable:
        length = duration(recording.end_ns - recording.start_ns)
        return f"{name}: {length}, {headline_facts(found)}.  Unreliable."
    if not recording.has_steps:
        idle, length = duration(found.idle_ns), duration(found.window_ns)
        share = idle_share(found)
        return f"{whose} {share} of the run ({idle} of {length}; {headline_facts(found)}).  Reliable."
    if recording.is_synchronous and found.why_unreliable:  # what was not seen is not idle
        return f"{name}: a step takes {duration(found.step_ns)}; {headline_facts(found)}.  Unreliable."
    idle, step = duration(found.idle_ns / len(found.steps)), duration(found.step_ns)
    reliable = "Unreliable." if found.why_unreliable else "Reliable."
    share = idle_share(found)
    return f"{whose} {share} of a step ({idle} of {step}; {headline_facts(found)}).  {reliable}"


def diagnosis(found: Findings) -> list[str]:
    """Return what matters most, its line, and what to do."""
    severity, row = found.severity, found.leading
    if severity is Severity.UNRELIABLE:
        return [f"No diagnosis: {found.why_unreliable}."]
    if severity is Severity.NOT_SURE:
        return [f"{severity}  {_why_unsure(found)}."]
    if row is None:
        busy = "the step computes" if found.recording.is_synchronous else "the device is kept busy"
        share = percent(found.window_ns - found.idle_ns, found.window_ns)
        return [f"{severity}  Nothing to gain above 5 %: {busy} {share} of the time."]
    lines = [f"{severity:<8}  {TITLES[row.cause]}. {promise(row, found)}"]
    for text in (f"{place(row.site)}  {code(row.site)}   {how_often(row, found)}", remedy(row, found)):
        lines += wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return lines


def _why_unsure(found: Findings) -> str:
    unknown = found.idle_by_cause.get(Cause.UNKNOWN, 0)
    if unknown <= UNSURE * found.window_ns:
        return f"Nothing to gain above 5 % was seen, but {_unseen(found)}"
    why = next((each.detail for each in found.rows if each.cause is Cause.UNKNOWN and each.detail), "")
    share = percent(unknown, found.window_ns)
    return f"Of {share} of the time nobody knows what it was{f': {why}' if why else ''}"


def _unseen(found: Findings) -> str:
    share = percent(found.unseen_python, 1)
    where = f" (most often in or before {place(found.unseen_before)})" if found.unseen_before is not None else ""
    return f"for about {share} of the time Python code ran in pieces too short to be looked into{where}"


def promise(row: Row, found: Findings) -> str:
    """Return what mending a cause would give."""
    if row.is_rare:
        saved = f", of which {percent(row.recoverable_share, 1)} can be saved" * (
            row.recoverable_share < 0.9 * row.share
        )
        return f"It takes {percent(row.share, 1)} of the run{saved}."
    before, after = gain(row, found)
    of = " a step" if found.recording.has_steps else ""
    return f"Fixing it: {duration(before)} → about {duration(after)}{of} ({before / after:.3g}×)."


def gain(row: Row, found: Findings) -> tuple[float, float]:
    """Return what a step, or all of a run without steps, takes, and would take without a row's cause."""
    share = sum(each.recoverable_share for each in found.rows if each.cause is row.cause)
    before = found.usual_step_ns if found.recording.has_steps else found.window_ns
    return before, before * (1 - min(share, 0.999))


def how_often(row: Row, found: Findings) -> str:
    """In how many steps, and how long."""
    if row.is_rare:
        return f"{count(row.num_steps, 'time')}, {duration(row.idle_ns / max(row.num_steps, 1))} each"
    if not found.recording.has_steps:
        return f"{duration(row.idle_ns)} in all"
    is_seen = row.num_steps >= 0.9 * len(found.steps) or row.idle_ns >= row.num_steps * _LONG_NS
    if not row.num_steps or (row.cause in SAMPLED and not is_seen):
        return duration(row.idle_ns / len(found.steps)) + " a step"
    return f"{row.num_steps} of {count(len(found.steps), 'step')}, {duration(row.idle_ns / row.num_steps)} each"


def _sum(found: Findings) -> str:
    steps = len(found.steps)
    parts = " | ".join(f"{spent / steps / 1e6:.3g} {cause}" for cause, spent in found.idle_by_cause.items())
    line = f" idle, ms a step: {parts or 'nothing'} = {found.idle_ns / steps / 1e6:.3g}"
    exposed = {cause: spent for cause, spent in found.exposed.items() if spent}
    if exposed:
        line += "   exposed: " + ", ".join(f"{cause} {spent / steps / 1e6:.3g}" for cause, spent in exposed.items())
    return line


def _rows(found: Findings) -> list[str]:
    shown = [row for row in found.rows if row.share >= _LEAST or row is found.leading][:_SHOWN]
    if not shown:
        return []
    cells = [
        (
            str(row.cause) + (" (whole run)" if row.is_rare else ""),
            place(row.site) + (f" in {place(row.inside)}" if row.inside is not None else ""),
            how_often(row, found),
            percent(row.share, 1),
            "" if row.is_rare or row.cause in REMEDY_FREE else percent(row.recoverable_share, 1),
        )
        for row in shown
    ]
    return table(("cause", "line", "count", "idle", "to win back"), cells, right={3, 4})


def event_lines(found: Findings) -> list[str]:
    """Return what is no idle time and worth knowing.

    Recompilations and graph breaks by line, and what is no training.
    """
    lines = []
    if (aside := found.aside) is not None:
        steps = f"{aside.num_steps} of {count(len(found.steps), 'step')}"
        where = f"{place(aside.site)}  {code(aside.site)}".rstrip()
        lines.append(f" not idle, but not training: {where}  takes {percent(aside.share, 1)} of the time, in {steps}")
    for cause, noun in ((Cause.COMPILE, "recompilation"), (Cause.GRAPH_BREAK, "graph break")):
        notes = [note for note in found.notes if note.cause is cause]
        places: dict[str, list[str]] = {}
        for note in notes:
            places.setdefault(place(note.site), []).append(note.text)
        for where, texts in places.items():
            lines.append(f" {count(len(texts), noun)}: {where}  {texts[-1][:_WIDTH]}")
    return lines
