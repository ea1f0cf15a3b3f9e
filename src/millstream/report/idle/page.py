"""One HTML file without scripts or network: the verdict, a bar for each step, the table, two steps drawn in full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape

from millstream.insight import ActivityKind, Cause, Findings, Recording, Step
from millstream.insight.host import host_pieces
from millstream.report.idle.places import activity_text, code, place
from millstream.report.idle.remedies import TITLES, remedy
from millstream.report.idle.screen import to_text
from millstream.report.svg import ticks
from millstream.report.words import duration, percent

MAX_BARS, MAX_PIECES = 200, 1500  # steps drawn as bars; pieces drawn in one step: the page stays below 2 MB
_WIDTH, _LEFT, _LANE = 1060, 110, 26  # pixels

COLOURS = {
    Cause.DATA_WAIT: "#e15759",
    Cause.IN_PROCESS: "#c8403f",
    Cause.SYNC: "#f28e2b",
    Cause.ALLOCATOR: "#b6992d",
    Cause.COMPILE: "#b07aa1",
    Cause.GRAPH_BREAK: "#d37295",
    Cause.GC: "#9d7660",
    Cause.IO: "#499894",
    Cause.GIL: "#86bcb6",
    Cause.DESCHEDULED: "#79706e",
    Cause.WAITING: "#ffbe7d",
    Cause.PYTHON: "#edc948",
    Cause.LAUNCH: "#4e79a7",
    Cause.GRAPH_TAIL: "#a0cbe8",
    Cause.STREAM_WAIT: "#d4a6c8",
    Cause.DEVICE_GAP: "#d7b5a6",
    Cause.PROFILER: "#fabfd2",
    Cause.UNKNOWN: "#bab0ac",
    Cause.COPY: "#8cd17d",
    Cause.COMMUNICATION: "#59a14f",
}
BUSY = "#76b7b2"
_MOST_ROWS, _LEAST = 40, 0.01  # of the window: smaller rows are folded
_EXPOSED = {ActivityKind.COMMUNICATION: Cause.COMMUNICATION}

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
        parts += ["<h2>Steps, measured</h2>", _legend(found), _bars(found)]
        parts += ["<h2>Causes</h2>", _table(found)]
        for title, step in _chosen(found):
            parts += [f"<h2>{title} step, measured: {duration(step.end_ns - step.start_ns)}</h2>", _draw(found, step)]
    parts += ["<h2>How it was measured</h2>", _measured(found), "</html>"]
    return "\n".join(parts) + "\n"


def _legend(found: Findings) -> str:
    entries = [("busy", BUSY), *((str(cause), COLOURS[cause]) for cause in found.idle_by_cause)]
    return "<p>" + "".join(f"<i style='background:{colour}'></i>{escape(name)}" for name, colour in entries) + "</p>"


def _idle_of(found: Findings, steps: Sequence[Step]) -> list[dict[Cause, int]]:
    """For each step its idle time by cause."""
    spent: list[dict[Cause, int]] = [defaultdict(int) for _ in steps]
    number = 0
    for each in found.slices:
        while number + 1 < len(steps) and each.start_ns >= steps[number].end_ns:
            number += 1
        k, start = number, each.start_ns
        while start < each.end_ns and k < len(steps):
            end = min(each.end_ns, steps[k].end_ns)
            spent[k][each.cause] += max(end - start, 0)
            start, k = max(end, start), k + 1
    return spent


def _bars(found: Findings) -> str:
    steps = found.steps[-MAX_BARS:]
    spent = _idle_of(found, found.steps)[-MAX_BARS:]
    longest = max(step.end_ns - step.start_ns for step in steps)
    height, wide = 160, (_WIDTH - _LEFT) / len(steps)
    lines = []
    for tick in ticks(longest, 4):
        y = height - tick / longest * height + 8
        lines.append(f"<text x='4' y='{y + 4:.1f}'>{duration(tick) if tick else '0'}</text>")
    for number, (step, causes) in enumerate(zip(steps, spent, strict=True)):
        length = step.end_ns - step.start_ns
        parts = [("busy", BUSY, length - sum(causes.values())), *((str(c), COLOURS[c], s) for c, s in causes.items())]
        y = height + 8.0
        for name, colour, part in parts:
            tall = part / longest * height
            y -= tall
            lines.append(
                f"<rect class='step' x='{_LEFT + number * wide:.2f}' y='{y:.2f}' width='{max(wide - 0.6, 0.4):.2f}' "
                f"height='{max(tall, 0):.2f}' fill='{colour}'>"
                f"<title>step {number}: {duration(part)} {escape(name)}</title></rect>"
            )
    return f"<svg width='{_WIDTH}' height='{height + 16}'>{''.join(lines)}</svg>"


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
    """The median step, and the worst."""
    order = sorted(found.steps, key=lambda step: step.end_ns - step.start_ns)
    yield "The median", order[len(order) // 2]
    if len(order) > 1:
        yield "The worst", order[-1]


def _draw(found: Findings, step: Step) -> str:
    scale = (_WIDTH - _LEFT - 10) / max(step.end_ns - step.start_ns, 1)
    streams = sorted({each.stream for each in found.recording.activities})[:8]
    lines = []
    launches = {launch.number: launch for launch in found.recording.launches}
    for lane, stream in enumerate(streams):
        ran = [
            each
            for each in found.recording.activities
            if each.stream == stream and each.end_ns > step.start_ns and each.start_ns < step.end_ns
        ]
        lines.append(_label(lane, "computing" if found.recording.is_synchronous else f"stream {stream}"))
        shown = sorted(ran, key=lambda each: each.start_ns - each.end_ns)[:MAX_PIECES]
        for number, each in enumerate(sorted(shown, key=lambda each: each.start_ns)):
            text = f"{duration(each.end_ns - each.start_ns)} {activity_text(each, launches, found.recording)}"
            start, end = max(each.start_ns, step.start_ns), min(each.end_ns, step.end_ns)
            colour = BUSY if each.kind is ActivityKind.KERNEL else COLOURS[_EXPOSED.get(each.kind, Cause.COPY)]
            lines.append(_piece(lane, start, end, colour, text, step, scale, is_odd=number % 2 == 1))
    lane = len(streams)
    lines.append(_label(lane, "idle, by cause"))
    idle = [each for each in found.slices if each.end_ns > step.start_ns and each.start_ns < step.end_ns]
    for each in sorted(idle, key=lambda each: each.start_ns - each.end_ns)[:MAX_PIECES]:
        site = found.recording.user_site(each.stack)
        start, end = max(each.start_ns, step.start_ns), min(each.end_ns, step.end_ns)
        text = f"{duration(end - start)} {each.cause}: {place(site)}  {code(site)}"
        lines.append(_piece(lane, start, end, COLOURS[each.cause], text, step, scale))
    lane += 1
    lines.append(_label(lane, "training thread"))
    for start, end, span in host_pieces(found.recording, ()):
        if start < step.end_ns and end > step.start_ns:
            start, end = max(start, step.start_ns), min(end, step.end_ns)
            site = found.recording.user_site(span.stack)
            text = f"{duration(end - start)} {span.cause}: {place(site)}  {code(site)}"
            lines.append(_piece(lane, start, end, COLOURS[span.cause], text, step, scale))
    if launches:
        lane += 1
        lines.append(_queue(found.recording, step, lane, scale))
    bottom = (lane + 1) * _LANE + 14
    lines += [
        f"<text x='{_LEFT + tick * scale:.1f}' y='{bottom}'>{duration(tick) if tick else '0'}</text>"
        for tick in ticks(step.end_ns - step.start_ns)
    ]
    return f"<svg width='{_WIDTH}' height='{bottom + 6}'>{''.join(lines)}</svg>"


def _queue(recording: Recording, step: Step, lane: int, scale: float) -> str:
    """How many launches wait for the device or run."""
    done: dict[int | None, int] = {}
    for each in recording.activities:
        done[each.launch] = max(done.get(each.launch, 0), each.end_ns)
    ends = [(launch.end_ns, done[launch.number]) for launch in recording.launches if launch.number in done]
    known = [(start, end) for start, end in ends if start < end]
    changes = sorted([(start, 1) for start, _ in known] + [(end, -1) for _, end in known])
    depth, points = 0, [(step.start_ns, 0)]
    for at, change in changes:
        if at >= step.end_ns:
            break
        before, depth = depth, depth + change
        if at > step.start_ns:
            points += [(at, before), (at, depth)]
        else:
            points = [(step.start_ns, depth)]
    points.append((step.end_ns, points[-1][1]))
    most, bottom, tall = max(depth for _, depth in points), (lane + 1) * _LANE - 4, _LANE - 6
    path = " ".join(
        f"{_LEFT + (at - step.start_ns) * scale:.1f},{bottom - depth / max(most, 1) * tall:.1f}"
        for at, depth in _thin(points)
    )
    area = f"{_LEFT},{bottom} {path} {_LEFT + (step.end_ns - step.start_ns) * scale:.1f},{bottom}"
    return f"{_label(lane, f'queue, up to {most}')}<polygon points='{area}' fill='#9aa5b1'/>"


def _thin(points: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """So few points that the page stays small."""
    return points[:: -(-len(points) // (2 * MAX_PIECES))]


def _label(lane: int, text: str) -> str:
    return f"<text x='4' y='{lane * _LANE + 16}'>{escape(text)}</text>"


def _piece(
    lane: int, start: int, end: int, colour: str, text: str, step: Step, scale: float, *, is_odd: bool = False
) -> str:
    look = f"fill='{colour}'" + " fill-opacity='0.75'" * is_odd  # neighbours must not run together
    x, wide = _LEFT + (start - step.start_ns) * scale, (end - start) * scale
    return (
        f"<rect x='{x:.2f}' y='{lane * _LANE + 2}' width='{max(wide, 0.3):.2f}' height='{_LANE - 6}' {look}>"
        f"<title>{escape(text)}</title></rect>"
    )


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
        facts.append(f"Steps under the device's profiler took {slower} longer than those after.")
    if recording.is_synchronous:
        facts.append("There is no GPU in this: busy is the time in which operators computed on the CPU, by samples.")
    return "<ul>" + "".join(f"<li>{escape(fact)}" for fact in facts) + "</ul>"
