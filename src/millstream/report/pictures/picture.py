"""A timeline as something to draw: bars on streams, arrows for waits. The writers turn it into SVG, HTML or a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.graph import Kernel, Launch, Plan, Record, Timeline, Wait
from millstream.report.words import duration, operations, size

COLOURS = {
    "fused": "#4e79a7",
    "gemm": "#f28e2b",
    "conv": "#59a14f",
    "copy": "#9c9c9c",
    "collective": "#b07aa1",
    "control": "#edc948",
    "library": "#76b7b2",
    "other": "#bab0ac",
}
"""By kind of kernel; these can be told apart on white and on black, and black text can be read on them."""

CRITICAL = "#e15759"
"""Of the critical path."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One piece of work on a stream.

    Attributes:
        label: What it does, in a few words.
        stream: Where it ran.
        start_ns: When it began, since the begin of the run.
        end_ns: When it was over.
        kernel: What ran; ``None`` for a copy, and for what no plan knows.
        is_critical: Whether the kernel is on the critical path.
    """

    label: str
    stream: int
    start_ns: int
    end_ns: int
    kernel: Kernel | None
    is_critical: bool

    @property
    def kind(self) -> str:
        """A key of ``COLOURS``."""
        return str(self.kernel.kind) if self.kernel else "other"


@dataclass(frozen=True, slots=True)
class Arrow:
    """A wait.

    Attributes:
        source: Number of the bar that is waited for.
        target: Number of the bar that waits; ``None`` where the end of the run does, on stream 0.
    """

    source: int
    target: int | None


@dataclass(frozen=True)
class Picture:
    """The contents of a picture.

    Attributes:
        title: One line.
        caption: Sentences below it.
        bars: One for each span of the timeline, in its order.
        arrows: One for each wait that orders two bars on different streams.
        num_streams: Streams are numbered from 0.
        end_ns: End of the run.
        lanes: Names of the streams, where they have others than their numbers.
    """

    title: str
    caption: tuple[str, ...]
    bars: tuple[Bar, ...]
    arrows: tuple[Arrow, ...]
    num_streams: int
    end_ns: int
    lanes: tuple[str, ...] = ()

    def lane(self, stream: int) -> str:
        """Name of a stream."""
        return self.lanes[stream] if self.lanes else f"stream {stream}"

    @property
    def kinds(self) -> list[str]:
        """The kinds that occur, for the legend."""
        present = {bar.kind for bar in self.bars}
        return [kind for kind in COLOURS if kind in present]

    def busy_ns(self, stream: int) -> int:
        """Return how long a stream had work running."""
        return sum(bar.end_ns - bar.start_ns for bar in self.bars if bar.stream == stream)


def draw_timeline(
    plan: Plan, timeline: Timeline, *, critical: Sequence[int] = (), title: str = "", caption: Sequence[str] = ()
) -> Picture:
    """Make the picture of a run of a plan.

    Args:
        plan: What ran.
        timeline: How it ran, predicted or traced.
        critical: Kernels to highlight, by id.
        title: One line.
        caption: Sentences below it.
    """
    marked = set(critical)
    bars = []
    for span in timeline.spans:
        kernel = None if span.kernel is None else plan.graph.kernels[span.kernel]
        label = ", ".join(kernel.ops) if kernel else ""
        label += f" ({kernel.module})" if kernel and label and kernel.module else ""
        bars.append(Bar(label or span.name, span.stream, span.start_ns, span.end_ns, kernel, span.kernel in marked))
    num_streams = max([timeline.num_streams, *(bar.stream + 1 for bar in bars)])
    arrows = _find_arrows(plan, bars)
    return Picture(title, tuple(caption), tuple(bars), arrows, num_streams, timeline.end_ns)


def describe(bar: Bar) -> list[str]:
    """Return what is shown when a bar is pointed at, line by line."""
    lines = [f"{duration(bar.end_ns - bar.start_ns)}, from {duration(bar.start_ns)} to {duration(bar.end_ns)}"]
    kernel = bar.kernel
    if kernel is None:
        return [bar.label, *lines]
    lines.insert(0, f"{kernel.id}  {kernel.name}  ({kernel.kind})")
    if kernel.ops:
        lines.append(f"made of {', '.join(kernel.ops)}")
    lines.append(f"{size(kernel.num_bytes)} moved, {operations(kernel.flops)} operations")
    if bar.is_critical:
        lines.append("on the critical path")
    if kernel.module:
        lines.append(f"in {kernel.module}")
    return [*lines, kernel.source] if kernel.source else lines


def _find_arrows(plan: Plan, bars: Sequence[Bar]) -> tuple[Arrow, ...]:
    """Join each wait's two ends: the last bar before the event was recorded, and the first one after the wait."""
    bars_of: dict[int, list[int]] = {}
    for number, bar in enumerate(bars):
        if bar.kernel is not None:
            bars_of.setdefault(bar.kernel.id, []).append(number)  # an operator may launch several times
    last_on: dict[int, int] = {}
    recorded: dict[int, tuple[int, int]] = {}  # by event: the stream, and the last bar on it
    waiting: dict[int, list[int]] = {}  # by stream: bars that the next launch waits for
    arrows: dict[Arrow, None] = {}
    for step in plan.steps:
        if isinstance(step, Record) and step.stream in last_on:
            recorded[step.event] = (step.stream, last_on[step.stream])
        elif isinstance(step, Wait) and step.event in recorded:
            stream, source = recorded[step.event]
            if stream != step.stream:
                waiting.setdefault(step.stream, []).append(source)
        elif isinstance(step, Launch) and step.kernel in bars_of:
            for source in waiting.pop(step.stream, ()):
                arrows[Arrow(source, bars_of[step.kernel][0])] = None
            last_on[step.stream] = bars_of[step.kernel][-1]
    for source in waiting.get(0, ()):
        arrows[Arrow(source, None)] = None
    return tuple(arrows)
