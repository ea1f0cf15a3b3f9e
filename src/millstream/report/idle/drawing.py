"""The steps of a profile as pictures: a bar for each step, and one step with all that ran, idled and waited in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from millstream.insight import Activity, ActivityKind, Cause, Findings, Recording, Step
from millstream.insight.host import host_pieces
from millstream.insight.records import Stack
from millstream.report.idle.places import activity_text, code, place
from millstream.report.pictures.svg import ticks
from millstream.report.words import duration

MAX_BARS, MAX_PIECES = 200, 1500  # steps drawn as bars; pieces drawn in one step: a page stays below 2 MB
WIDTH, LEFT, LANE = 1060, 110, 26  # pixels

COLOURS = {
    Cause.DATA_WAIT: "#e15759",
    Cause.IN_PROCESS: "#c8403f",
    Cause.PASS: "#ff9d9a",
    Cause.SYNC: "#f28e2b",
    Cause.ALLOCATOR: "#b6992d",
    Cause.COMPILE: "#b07aa1",
    Cause.GRAPH_BREAK: "#d37295",
    Cause.GC: "#9d7660",
    Cause.IO: "#2f4b7c",
    Cause.GIL: "#5f3b8c",
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
_SHORT = 0.6  # pixels
_EXPOSED = {ActivityKind.COMMUNICATION: Cause.COMMUNICATION}


def legend_of(found: Findings) -> list[tuple[str, str]]:
    """Names and colours: what computes, and the causes that there are."""
    return [("busy", BUSY), *((str(cause), COLOURS[cause]) for cause in found.idle_by_cause)]


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


def draw_bars(found: Findings, *, with_titles: bool = True) -> str:
    """A bar for each of the last steps: what ran, and what it idled for."""
    steps = found.steps[-MAX_BARS:]
    spent = _idle_of(found, found.steps)[-MAX_BARS:]
    longest = max(step.end_ns - step.start_ns for step in steps)
    height, wide = 160, (WIDTH - LEFT) / len(steps)
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
                f"<rect class='step' x='{LEFT + number * wide:.2f}' y='{y:.2f}' width='{max(wide - 0.6, 0.4):.2f}' "
                f"height='{max(tall, 0):.2f}' fill='{colour}'"
                + (f"><title>step {number}: {duration(part)} {escape(name)}</title></rect>" if with_titles else "/>")
            )
    return f"<svg width='{WIDTH}' height='{height + 16}'>{''.join(lines)}</svg>"


def median_step(found: Findings) -> Step:
    """The step of median length."""
    return sorted(found.steps, key=lambda step: step.end_ns - step.start_ns)[len(found.steps) // 2]


def worst_step(found: Findings) -> Step:
    """The longest step."""
    return max(found.steps, key=lambda step: step.end_ns - step.start_ns)


class _Piece(NamedTuple):
    """Something in a row, within the step."""

    start_ns: int
    end_ns: int
    colour: str
    text: str
    is_odd: bool = False


def draw_step(found: Findings, step: Step, *, with_titles: bool = True) -> str:
    """Rows of one step: each stream, idle time by cause, the training thread, and the queue.

    Args:
        found: What the step is of.
        step: Which one.
        with_titles: Say of each piece what it is, where it is pointed at; else short neighbours become one.
    """
    recording = found.recording
    launches = {launch.number: launch for launch in recording.launches}
    scale = (WIDTH - LEFT - 10) / max(step.end_ns - step.start_ns, 1)
    streams = sorted({each.stream for each in recording.activities})[:8]
    rows = [("computing" if recording.is_synchronous else f"stream {s}", _ran(found, step, s)) for s in streams]
    rows.append(("idle, by cause", _idle(found, step)))
    rows.append(("training thread", _did(recording, step)))
    lines = []
    for lane, (name, pieces) in enumerate(rows):
        lines.append(_label(lane, name))
        shown = pieces if with_titles else _joined(pieces, round(_SHORT / scale))
        lines += [_draw_piece(lane, piece, step, scale, with_title=with_titles) for piece in shown]
    lane = len(rows) - 1
    if launches:
        lane += 1
        lines.append(_queue(recording, step, lane, scale))
    bottom = (lane + 1) * LANE + 14
    lines += [
        f"<text x='{LEFT + tick * scale:.1f}' y='{bottom}'>{duration(tick) if tick else '0'}</text>"
        for tick in ticks(step.end_ns - step.start_ns)
    ]
    return f"<svg width='{WIDTH}' height='{bottom + 6}'>{''.join(lines)}</svg>"


def _largest(pieces: Iterable[_Piece]) -> list[_Piece]:
    """So many that a page stays small, in order."""
    return sorted(sorted(pieces, key=lambda piece: piece.start_ns - piece.end_ns)[:MAX_PIECES])


def _within(step: Step, start: int, end: int) -> tuple[int, int]:
    return max(start, step.start_ns), min(end, step.end_ns)


def _ran(found: Findings, step: Step, stream: int) -> list[_Piece]:
    launches = {launch.number: launch for launch in found.recording.launches}

    def piece(each: Activity) -> _Piece:
        text = f"{duration(each.end_ns - each.start_ns)} {activity_text(each, launches, found.recording)}"
        colour = BUSY if each.kind is ActivityKind.KERNEL else COLOURS[_EXPOSED.get(each.kind, Cause.COPY)]
        return _Piece(*_within(step, each.start_ns, each.end_ns), colour, text)

    ran = (
        piece(each)
        for each in found.recording.activities
        if each.stream == stream and each.end_ns > step.start_ns and each.start_ns < step.end_ns
    )
    # Neighbours must not run together.
    return [each._replace(is_odd=number % 2 == 1) for number, each in enumerate(_largest(ran))]


def _idle(found: Findings, step: Step) -> list[_Piece]:
    return _largest(
        _piece_of(step, each.start_ns, each.end_ns, each.cause, each.stack, found.recording)
        for each in found.slices
        if each.end_ns > step.start_ns and each.start_ns < step.end_ns
    )


def _did(recording: Recording, step: Step) -> list[_Piece]:
    return [
        _piece_of(step, start, end, span.cause, span.stack, recording)
        for start, end, span in host_pieces(recording, ())
        if start < step.end_ns and end > step.start_ns
    ]


def _piece_of(step: Step, start: int, end: int, cause: Cause, stack: Stack, recording: Recording) -> _Piece:
    start, end = _within(step, start, end)
    site = recording.user_site(stack)
    colour = BUSY if cause is Cause.LAUNCH and recording.is_synchronous else COLOURS[cause]  # operators, on a CPU
    return _Piece(start, end, colour, f"{duration(end - start)} {cause}: {place(site)}  {code(site)}")


def _joined(pieces: Sequence[_Piece], short_ns: int) -> list[_Piece]:
    """Neighbours of one colour that nobody could tell apart become one."""
    found: list[_Piece] = []
    for each in pieces:
        last = found[-1] if found else None
        is_near = last is not None and each.start_ns - last.end_ns < short_ns and each.end_ns - each.start_ns < short_ns
        if last is not None and is_near and last.colour == each.colour:
            found[-1] = last._replace(end_ns=max(last.end_ns, each.end_ns))
        else:
            found.append(each)
    return found


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
    most, bottom, tall = max(depth for _, depth in points), (lane + 1) * LANE - 4, LANE - 6
    path = " ".join(
        f"{LEFT + (at - step.start_ns) * scale:.1f},{bottom - depth / max(most, 1) * tall:.1f}"
        for at, depth in _thin(points)
    )
    area = f"{LEFT},{bottom} {path} {LEFT + (step.end_ns - step.start_ns) * scale:.1f},{bottom}"
    return f"{_label(lane, f'queue, up to {most}')}<polygon points='{area}' fill='#9aa5b1'/>"


def _thin(points: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """So few points that the page stays small."""
    return points[:: -(-len(points) // (2 * MAX_PIECES))]


def _label(lane: int, text: str) -> str:
    return f"<text x='4' y='{lane * LANE + 16}'>{escape(text)}</text>"


def _draw_piece(lane: int, piece: _Piece, step: Step, scale: float, *, with_title: bool) -> str:
    look = f"fill='{piece.colour}'" + " fill-opacity='0.75'" * piece.is_odd
    x, wide = LEFT + (piece.start_ns - step.start_ns) * scale, (piece.end_ns - piece.start_ns) * scale
    shape = f"<rect x='{x:.2f}' y='{lane * LANE + 2}' width='{max(wide, 0.3):.2f}' height='{LANE - 6}' {look}"
    return f"{shape}><title>{escape(piece.text)}</title></rect>" if with_title else f"{shape}/>"
