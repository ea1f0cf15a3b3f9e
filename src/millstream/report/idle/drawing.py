"""Pictures of a profile: a bar for each step, and one step with all that ran, idled and waited in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from millstream.insight import ActivityKind, Cause, Findings, ProfiledStep, Recording
from millstream.insight.host import host_pieces
from millstream.insight.records import Stack
from millstream.report.idle.source_lines import activity_text, code, place
from millstream.report.pictures.svg import ticks
from millstream.report.words import duration

MAX_BARS, MAX_PIECES = 200, 1500  # steps drawn as bars; pieces drawn in one step: a page stays below 2 MB
LENGTH, HEIGHT = 1000, 10  # of a lane, in units of its own: the templates scale it

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
_SHORT = 0.6  # units
_NUMBERS = 12  # steps that have their number below them
_EXPOSED = {ActivityKind.COMMUNICATION: Cause.COMMUNICATION}


class BarPart(NamedTuple):
    """A part of a step's bar; the longest step is 100 high."""

    colour: str
    top: float
    height: float


class StepBar(NamedTuple):
    """One step: its place, what is said of it, and what it is made of, from the bottom."""

    at: int
    text: str
    parts: list[BarPart]


class Bars(NamedTuple):
    """Steps side by side, heights and numbers of the axes in percent."""

    bars: list[StepBar]
    ticks: list[tuple[float, str]]
    numbers: list[tuple[float, int]]


class LanePiece(NamedTuple):
    """Something in a lane, in the lane's units."""

    x: float
    width: float
    colour: str
    text: str
    is_odd: bool = False


class Lane(NamedTuple):
    """A row of a step: pieces, or the outline of an area."""

    name: str
    pieces: list[LanePiece]
    outline: str = ""


class DrawnStep(NamedTuple):
    """One step in full."""

    title: str
    lanes: list[Lane]
    ticks: list[tuple[float, str]]


def legend_of(found: Findings) -> list[tuple[str, str]]:
    """Names and colours: what computes, and the causes that there are."""
    return [("busy", BUSY), *((str(cause), COLOURS[cause]) for cause in found.idle_by_cause)]


def _idle_of(found: Findings, steps: Sequence[ProfiledStep]) -> list[dict[Cause, int]]:
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


def bars_of(found: Findings) -> Bars:
    """A bar for each of the last steps: what ran, and what it idled for."""
    steps = found.steps[-MAX_BARS:]
    spent = _idle_of(found, found.steps)[-MAX_BARS:]
    longest = max(step.end_ns - step.start_ns for step in steps)
    recording = found.recording
    first = recording.first_step + len(recording.steps) - len(steps) if recording.has_steps else 0
    bars = []
    for at, (step, causes) in enumerate(zip(steps, spent, strict=True)):
        length = step.end_ns - step.start_ns
        told = {"busy": (BUSY, length - sum(causes.values())), **{str(c): (COLOURS[c], s) for c, s in causes.items()}}
        top, parts = 100.0, []
        for colour, part in told.values():
            height = max(part / longest * 100, 0)
            top -= height
            parts.append(BarPart(colour, round(top, 2), round(height, 2)))
        listed = "\n".join(f"{name} {duration(part)}" for name, (_, part) in told.items() if part > 0)
        bars.append(StepBar(at, f"step {first + at}: {duration(length)}\n{listed}", parts))
    heights = [(round(tick / longest * 100, 1), duration(tick) if tick else "0") for tick in ticks(longest, 4)]
    every = -(-len(steps) // _NUMBERS)
    numbers = [(round((at + 0.5) / len(steps) * 100, 1), first + at) for at in range(0, len(steps), every)]
    return Bars(bars, heights, numbers)


def median_step(found: Findings) -> ProfiledStep:
    """The step of median length."""
    return sorted(found.steps, key=lambda step: step.end_ns - step.start_ns)[len(found.steps) // 2]


def worst_step(found: Findings) -> ProfiledStep:
    """The longest step."""
    return max(found.steps, key=lambda step: step.end_ns - step.start_ns)


def draw_step(found: Findings, step: ProfiledStep, which: str) -> DrawnStep:
    """Lanes of one step: each stream, idle time by cause, the training thread, and the queue."""
    recording, scale = found.recording, _Scale(step)
    streams = sorted({each.stream for each in recording.activities})[:8]
    lanes = [Lane("computing" if recording.is_synchronous else f"stream {s}", _ran(found, scale, s)) for s in streams]
    lanes.append(Lane("idle, by cause", _idle(found, scale)))
    lanes.append(Lane("training thread", _did(recording, scale)))
    if recording.launches:
        lanes.append(_queue(recording, scale))
    length = step.end_ns - step.start_ns
    marks = [(scale.x(step.start_ns + tick), duration(tick) if tick else "0") for tick in ticks(length, 6)]
    return DrawnStep(f"The {which} step, measured: {duration(length)}", lanes, marks)


class _Scale:
    """The scale from the time of a step to a lane's units."""

    def __init__(self, step: ProfiledStep) -> None:
        self.step = step
        self.of_ns = LENGTH / max(step.end_ns - step.start_ns, 1)

    def x(self, at_ns: int) -> float:
        return round((at_ns - self.step.start_ns) * self.of_ns, 2)

    def meets(self, start_ns: int, end_ns: int) -> bool:
        return end_ns > self.step.start_ns and start_ns < self.step.end_ns

    def piece(self, start_ns: int, end_ns: int, colour: str, what: str) -> LanePiece:
        start_ns, end_ns = max(start_ns, self.step.start_ns), min(end_ns, self.step.end_ns)
        wide = max(round((end_ns - start_ns) * self.of_ns, 2), 0.3)
        return LanePiece(self.x(start_ns), wide, colour, f"{duration(end_ns - start_ns)} {what}")


def _largest(pieces: Iterable[LanePiece]) -> list[LanePiece]:
    """So many that a page stays small, in order."""
    return sorted(sorted(pieces, key=lambda piece: -piece.width)[:MAX_PIECES])


def _ran(found: Findings, scale: _Scale, stream: int) -> list[LanePiece]:
    launches = {launch.number: launch for launch in found.recording.launches}
    ran = (
        scale.piece(
            each.start_ns,
            each.end_ns,
            BUSY if each.kind is ActivityKind.KERNEL else COLOURS[_EXPOSED.get(each.kind, Cause.COPY)],
            activity_text(each, launches, found.recording),
        )
        for each in found.recording.activities
        if each.stream == stream and scale.meets(each.start_ns, each.end_ns)
    )
    # Neighbours must not run together.
    return [each._replace(is_odd=number % 2 == 1) for number, each in enumerate(_largest(ran))]


def _idle(found: Findings, scale: _Scale) -> list[LanePiece]:
    return _largest(
        _piece_of(scale, each.start_ns, each.end_ns, each.cause, each.stack, found.recording)
        for each in found.slices
        if scale.meets(each.start_ns, each.end_ns)
    )


def _did(recording: Recording, scale: _Scale) -> list[LanePiece]:
    return [
        _piece_of(scale, start, end, span.cause, span.stack, recording)
        for start, end, span in host_pieces(recording, ())
        if scale.meets(start, end)
    ]


def _piece_of(scale: _Scale, start: int, end: int, cause: Cause, stack: Stack, recording: Recording) -> LanePiece:
    site = recording.user_site(stack)
    colour = BUSY if cause is Cause.LAUNCH and recording.is_synchronous else COLOURS[cause]  # operators, on a CPU
    return scale.piece(start, end, colour, f"{cause}: {place(site)}  {code(site)}".rstrip())


def joined(pieces: Sequence[LanePiece]) -> list[LanePiece]:
    """Neighbours of one colour that nobody could tell apart become one."""
    found: list[LanePiece] = []
    for each in pieces:
        last = found[-1] if found else None
        is_near = last is not None and each.x - last.x - last.width < _SHORT and each.width < _SHORT
        if last is not None and is_near and last.colour == each.colour:
            found[-1] = last._replace(width=round(max(last.width, each.x + each.width - last.x), 2))
        else:
            found.append(each)
    return found


def _queue(recording: Recording, scale: _Scale) -> Lane:
    """Return how many launches wait for the device or run."""
    step = scale.step
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
    most = max(depth for _, depth in points)
    path = " ".join(f"{scale.x(at):g},{HEIGHT - depth / max(most, 1) * HEIGHT:.1f}" for at, depth in _thin(points))
    return Lane(f"queue, up to {most}", [], f"0,{HEIGHT} {path} {LENGTH},{HEIGHT}")


def _thin(points: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """So few points that the page stays small."""
    return points[:: -(-len(points) // (2 * MAX_PIECES))]
