"""The traffic of a step with other processes: how long it travels, what hides it, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from textwrap import wrap
from typing import Any

from millstream.cost import Costs
from millstream.graph import KernelKind, Plan, Timeline
from millstream.report.pictures.picture import Bar, Picture, draw_timeline
from millstream.report.words import count, duration, percent, shorten, size, table
from millstream.simulate import CollectiveTransfer, bucket_bytes, find_transfers, find_updates, simulate

_WIDTH = 118  # characters of a line
_LANES = ("backward", "buckets", "optimizer")  # what comes before the update is the forward pass, too
_LATE = 0.05  # of a step: waiting for others that is worth a line
_OFTEN = 0.5  # of the steps: a rank that is last in so many is the straggler


@dataclass(frozen=True)
class Arrivals:
    """The times at which processes came to begin their steps, as far as they are known.

    Attributes:
        num_steps: That were looked at.
        last: For each rank, in how many steps it was the last.
        waited_ns: For each rank, how long it waited for the last one in a step, on average.
    """

    num_steps: int
    last: tuple[int, ...]
    waited_ns: tuple[float, ...]

    @staticmethod
    def of(times_ns: Sequence[Sequence[int]]) -> Arrivals:
        """Count what comes of the times of each step, in the order of ranks."""
        size = len(times_ns[0]) if times_ns else 0
        last = [0] * size
        for times in times_ns:
            last[times.index(max(times))] += 1
        waited = (sum(max(times) - times[rank] for times in times_ns) / len(times_ns) for rank in range(size))
        return Arrivals(len(times_ns), tuple(last), tuple(waited))

    def text(self, step_ns: int | None = None) -> str:
        """Return who waits for whom, in words; empty where nothing is known.

        Args:
            step_ns: Length of a step: a wait that is little of it is reported as such.
        """
        if not self.num_steps:
            return ""
        worst = max(range(len(self.last)), key=self.last.__getitem__)
        waited_ns = sum(self.waited_ns) / max(len(self.waited_ns) - 1, 1)
        steps = f"the last {count(self.num_steps, 'step')}"
        if step_ns and waited_ns < _LATE * step_ns:
            return f"processes come to {steps} together: one waits {duration(waited_ns)} for the last, on average"
        if self.last[worst] < _OFTEN * self.num_steps:
            return f"in {steps} one waits {duration(waited_ns)} for the last, on average; which is last changes"
        return (
            f"rank {worst} is the last to begin {percent(self.last[worst], self.num_steps)} of {steps}: "
            f"the others wait {duration(waited_ns)} a step for it, on average, by the hosts' clock"
        )


@dataclass(frozen=True)
class CommunicationReport:
    """The exchanges of one program.

    Attributes:
        plan: Of its kernels and collectives.
        costs: Of both.
        num_processes: That exchange.
        is_one_graph: Whether collectives are among its kernels; otherwise the host issues them between segments.
        source: Where the times of collectives are from; empty where they were measured.
        is_calculated: No kernel was measured.
        arrivals: Who waits for whom.
        timeline: A run, measured.
        obstacle: Why there is none, where it was asked for.
    """

    plan: Plan
    costs: Costs
    num_processes: int
    is_one_graph: bool = True
    source: str = ""
    is_calculated: bool = False
    arrivals: Arrivals = Arrivals(0, (), ())
    timeline: Timeline | None = None
    obstacle: str = ""

    @cached_property
    def runs(self) -> dict[str, Timeline]:
        """Its run: ``measured`` when there is a trace, and from costs, ``predicted`` or ``calculated``."""
        guess = "calculated" if self.is_calculated else "predicted"
        measured = {} if self.timeline is None else {"measured": self.timeline}
        return {**measured, guess: simulate(self.plan, self.costs)}

    @cached_property
    def transfers(self) -> dict[str, tuple[CollectiveTransfer, ...]]:
        """Its collectives, by the run."""
        return {kind: find_transfers(self.plan.graph, run) for kind, run in self.runs.items()}

    @property
    def num_bytes(self) -> int:
        """Of all buckets."""
        graph = self.plan.graph
        collectives = (kernel for kernel in graph.kernels if kernel.kind is KernelKind.COLLECTIVE)
        return sum(bucket_bytes(graph, kernel) for kernel in collectives)

    def text(self) -> list[str]:
        """Lines for a terminal."""
        graph = self.plan.graph
        number = sum(kernel.kind is KernelKind.COLLECTIVE for kernel in graph.kernels)
        how = "in one graph with its kernels" if self.is_one_graph else "issued between segments"
        lines = [
            f"{graph.name} exchanges {size(self.num_bytes)} between {_processes(self.num_processes)}, "
            f"in {count(number, 'collective')}, {how}"
        ]
        lines += [f"  {kind}: {sentence}" for kind, sentence in self.sentences().items()]
        lines += table(self.columns(), [*self.rows()], right={1, 2, 3, 4, 5})
        told = [f"times of collectives are calculated, {self.source}"] if self.source else []
        told += [f"not measured: {self.obstacle}"] if self.obstacle else []
        told += [self.waits()] if self.waits() else []
        for sentence in told:
            lines += wrap(sentence, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        return lines

    def waits(self) -> str:
        """Return who waits for whom, in words."""
        return self.arrivals.text(next(iter(self.runs.values())).end_ns)

    def sentences(self) -> dict[str, str]:
        """Return how much communication there is and how much of it is hidden, by the run."""
        found = {}
        for kind, transfers in self.transfers.items():
            took_ns, exposed_ns = sum(t.took_ns for t in transfers), sum(t.exposed_ns for t in transfers)
            end_ns = self.runs[kind].end_ns
            found[kind] = (
                f"communication takes {duration(took_ns)} of a step of {duration(end_ns)}: {duration(exposed_ns)} "
                f"exposed ({percent(exposed_ns, end_ns)} of the step), {duration(took_ns - exposed_ns)} hidden"
            )
        return found

    def columns(self) -> tuple[str, ...]:
        """Heads of ``rows``."""
        return ("bucket", "bytes", "ready at", "sent at", "done at", "exposed", "run")

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each collective in each run."""
        return [
            (
                shorten(f"{each.operation} {each.label}", 56),
                size(each.num_bytes),
                *map(duration, (each.ready_ns, each.sent_ns, each.done_ns, each.exposed_ns)),
                kind,
            )
            for kind, transfers in self.transfers.items()
            for each in transfers
        ]

    def pictures(self) -> list[Picture]:
        """Its runs to draw: what comes before the collectives, they, and what comes after, side by side."""
        sentences = self.sentences()
        title = f"{self.plan.graph.name} with {_processes(self.num_processes)}"
        source = f"Times of collectives are calculated, {self.source}." if self.source else ""
        return [
            _in_lanes(
                draw_timeline(
                    self.plan,
                    run,
                    title=f"{title}: {kind} {duration(run.end_ns)}",
                    caption=[each for each in (f"{sentences[kind]}.".capitalize(), source, self.waits()) if each],
                ),
                find_updates(self.plan.graph),
            )
            for kind, run in self.runs.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data; sizes in bytes, times in nanoseconds."""
        return {
            "name": self.plan.graph.name,
            "processes": self.num_processes,
            "one_graph": self.is_one_graph,
            "bytes": self.num_bytes,
            "source": self.source,
            "step_ns": {kind: run.end_ns for kind, run in self.runs.items()},
            "collectives": {kind: [asdict(each) for each in found] for kind, found in self.transfers.items()},
            "arrivals": asdict(self.arrivals),
        }


def _in_lanes(picture: Picture, updates: frozenset[int]) -> Picture:
    """The picture with a lane for what comes before collectives, one for them, and one for what comes after.

    What runs side by side, on several streams, has a lane for each stream.
    """

    def lane_of(bar: Bar) -> tuple[int, int]:
        if bar.kind == "collective":
            return 1, bar.stream
        is_update = bar.kernel is not None and bar.kernel.id in updates
        return (2 if is_update else 0), bar.stream

    lanes = sorted({lane_of(bar) for bar in picture.bars})
    several = [role for role in range(len(_LANES)) if sum(each[0] == role for each in lanes) > 1]
    names = tuple(_LANES[role] + (f" {stream}" if role in several else "") for role, stream in lanes)
    number = {lane: position for position, lane in enumerate(lanes)}
    bars = tuple(
        Bar(_label(bar), number[lane_of(bar)], bar.start_ns, bar.end_ns, bar.kernel, bar.is_critical)
        for bar in picture.bars
    )
    arrows = tuple(arrow for arrow in picture.arrows if arrow.target is not None)
    return Picture(picture.title, picture.caption, bars, arrows, len(lanes), picture.end_ns, names)


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def _label(bar: Bar) -> str:
    return bar.kernel.name.removeprefix("exchange ") if bar.kernel and bar.kind == "collective" else bar.label
