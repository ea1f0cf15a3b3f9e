"""Account for the time of a run, and what bounds it: in numbers, and in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from millstream.cost import Costs
from millstream.errors import ArgumentError
from millstream.graph import KernelGraph, KernelKind, Role, Timeline
from millstream.report.words import count, duration, percent
from millstream.schedule import critical_path

_BOUND = 0.85  # of the run: a lower bound that explains so much of it is what bounds it
_WORTH_SAYING = 0.05  # of the run


@dataclass(frozen=True)
class Account:
    """The time of one run of a graph by what it was spent on, and how short it could have been.

    Attributes:
        graph: What ran.
        timeline: The run, predicted or traced.
        costs: What its kernels take alone; ``None`` takes their times from the timeline.
        tried: What came of plans with more streams, in words, where some were tried and none was chosen.

    Raises:
        ArgumentError: Timeline or costs are those of another graph.
    """

    graph: KernelGraph
    timeline: Timeline
    costs: Costs | None = None
    tried: str = ""

    def __post_init__(self) -> None:
        num_kernels = len(self.graph.kernels)
        unknown = [span for span in self.timeline.spans if span.kernel is not None and span.kernel >= num_kernels]
        if unknown:
            message = f"the timeline has kernel {unknown[0].kernel}, graph {self.graph.name!r} only {num_kernels}"
            raise ArgumentError(f"{message}: take a timeline of this graph")
        if self.costs is not None and len(self.costs.kernels) != num_kernels:
            message = (
                f"there are costs of {len(self.costs.kernels)} kernels, graph {self.graph.name!r} has {num_kernels}"
            )
            raise ArgumentError(f"{message}: estimate them for this graph")

    @cached_property
    def durations_ns(self) -> tuple[int, ...]:
        """What each kernel takes, by id; 0 where nobody knows."""
        if self.costs is not None:
            return tuple(cost.duration_ns for cost in self.costs.kernels)
        durations = [0] * len(self.graph.kernels)
        for span in self.timeline.spans:
            if span.kernel is not None:
                durations[span.kernel] += span.end_ns - span.start_ns
        return tuple(durations)

    @property
    def serial_ns(self) -> int:
        """How long the kernels take one after another."""
        return sum(self.durations_ns)

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """The longest chain of dependent kernels, by id; the first in the program where several are equally long."""
        return critical_path(self.graph, self.durations_ns)

    @property
    def critical_path_ns(self) -> int:
        """Time of that chain: no number of streams makes the run shorter."""
        return sum(self.durations_ns[kernel] for kernel in self.critical_path)

    @cached_property
    def compute_ns(self) -> int:
        """Time that the arithmetic would take at the device's full rate; 0 without costs."""
        return round(sum(cost.duration_ns * cost.compute_share for cost in self.costs.kernels)) if self.costs else 0

    @cached_property
    def memory_ns(self) -> int:
        """Time that the memory traffic would take at the device's full rate; 0 without costs."""
        return round(sum(cost.duration_ns * cost.memory_share for cost in self.costs.kernels)) if self.costs else 0

    @property
    def roofline_ns(self) -> int | None:
        """Time that bytes and flops alone would take; ``None`` without costs."""
        return None if self.costs is None else max(self.compute_ns, self.memory_ns)

    @property
    def bound_ns(self) -> int:
        """No plan for these kernels is quicker than that."""
        return max(self.critical_path_ns, self.roofline_ns or 0)

    @cached_property
    def preparing(self) -> tuple[int, ...]:
        """Kernels that read parameters and nothing else, by id: they bring them into another layout or type."""
        known = {buffer.id for buffer in self.graph.buffers if buffer.role is Role.STATE}
        found = []
        for kernel in self.graph.kernels:
            reads, writes = self.graph.touched_by[kernel.id]
            if reads and known.issuperset(reads) and known.isdisjoint(writes):
                known.update(writes)
                found.append(kernel.id)
        return tuple(found)

    @property
    def preparing_ns(self) -> int:
        """Time of these."""
        return sum(self.durations_ns[kernel] for kernel in self.preparing)

    def preparation(self) -> str:
        """Say in words what parameters cost that are prepared again in each run; empty where that is little."""
        if self.preparing_ns < _WORTH_SAYING * max(self.serial_ns, 1):
            return ""
        kernels = count(len(self.preparing), "kernel")
        return f"{kernels}, {percent(self.preparing_ns, self.serial_ns)} of the time of all, only prepare parameters"

    @property
    def prepares_for_convolutions(self) -> bool:
        """Whether a convolution reads what they write."""
        written = {buffer for kernel in self.preparing for buffer in self.graph.touched_by[kernel][1]}
        return any(
            kernel.kind is KernelKind.CONV and not written.isdisjoint(self.graph.touched_by[kernel.id][0])
            for kernel in self.graph.kernels
        )

    @cached_property
    def busy_ns(self) -> tuple[int, ...]:
        """How long each stream had work running."""
        return tuple(self.timeline.busy_ns(stream) for stream in range(self.timeline.num_streams))

    @cached_property
    def alone_ns(self) -> int:
        """How long a kernel of the critical path ran and nothing else did, on any stream."""
        spans, critical = self.timeline.spans, set(self.critical_path)
        starts = [(span.start_ns, 1, number) for number, span in enumerate(spans) if span.end_ns > span.start_ns]
        changes = sorted(starts + [(spans[number].end_ns, 0, number) for _, _, number in starts])
        running: set[int] = set()
        alone = 0
        for (now, is_start, number), (then, _, _) in pairwise(changes):
            (running.add if is_start else running.remove)(number)
            if len(running) == 1 and spans[next(iter(running))].kernel in critical:
                alone += then - now
        return alone

    @cached_property
    def gaps(self) -> tuple[tuple[int, int | None], ...]:
        """The times at which nothing ran: how long, and the kernel after it."""
        gaps, latest = [], 0
        for span in self.timeline.spans:
            if span.start_ns > latest:
                gaps.append((span.start_ns - latest, span.kernel))
            latest = max(latest, span.end_ns)
        if self.timeline.end_ns > latest:
            gaps.append((self.timeline.end_ns - latest, None))
        return tuple(gaps)

    @property
    def idle_ns(self) -> int:
        """How long nothing ran."""
        return self.timeline.idle_ns

    @property
    def pauses_ns(self) -> int:
        """How long nothing ran on the only stream there is: more streams would not take that away."""
        return self.idle_ns if self.timeline.num_streams == 1 else 0

    def bound(self) -> str:
        """Say in words what bounds the run, and what would make it quicker."""
        end_ns = self.timeline.end_ns
        if not self.timeline.spans or not end_ns:
            return "nothing runs"
        if (self.roofline_ns or 0) >= _BOUND * end_ns:
            unit, what = (
                ("arithmetic", "fewer operations") if self.compute_ns >= self.memory_ns else ("memory", "less traffic")
            )
            full = percent(min(self.roofline_ns or 0, end_ns), end_ns)
            reason = f"the device is full: its {unit} is busy {full} of the time; only {what} would be quicker"
        elif self.critical_path and self.critical_path_ns >= _BOUND * (end_ns - self.pauses_ns):
            reason = self._chain()
        elif self.timeline.num_streams == 1:
            reason = "one stream runs one kernel after another"
            if not self.tried:
                reason += (
                    f"; the longest chain of dependent kernels takes only {duration(self.critical_path_ns)}, so more "
                    f"streams could make it up to {end_ns / max(self.bound_ns + self.pauses_ns, 1):.1f} times as quick"
                )
        else:
            reason = self._between()
        return "; ".join(part for part in (reason, self.tried, self._idleness()) if part)

    def _chain(self) -> str:
        path = [self.graph.kernels[kernel] for kernel in self.critical_path]
        times = Counter[str]()
        for kernel in path:
            times[str(kernel.kind)] += self.durations_ns[kernel.id]
        kinds = ", ".join(f"{percent(time, self.critical_path_ns)} {kind}" for kind, time in times.most_common(3))
        chain, needs = f"one chain of {len(path)} kernels", ", each in need of the one before"
        if len(path) == 1:
            chain, needs = "one kernel", ""
        if self.timeline.num_streams > 1:
            chain = f"{percent(self.alone_ns, self.timeline.end_ns)} of the time all other streams wait for {chain}"
        longest = max(path, key=lambda kernel: self.durations_ns[kernel.id])
        gain_ns = self.timeline.end_ns - self.pauses_ns - self.bound_ns
        gain = f"at most {percent(gain_ns, self.timeline.end_ns)}"
        if gain_ns < _WORTH_SAYING * self.timeline.end_ns:
            gain = "nothing"
        link = "" if len(path) == 1 else f"its longest link takes {duration(self.durations_ns[longest.id])}: "
        shorter = f"a shorter {'chain' if needs else 'kernel'} would"
        advice = f"only {shorter} be quicker" if self.tried else f"more streams gain {gain}, {shorter}"
        return (
            f"{chain}{needs}, which takes {duration(self.critical_path_ns)} ({kinds}); {advice}; {link}{longest.label}"
        )

    def _between(self) -> str:
        end_ns = self.timeline.end_ns
        limit = "the longest chain of kernels" if self.bound_ns == self.critical_path_ns else "the device, kept full,"
        parts = [f"{limit} would allow {duration(self.bound_ns)} instead of {duration(end_ns)}"]
        slowdown = sum(self.busy_ns) / max(self.serial_ns, 1)
        if slowdown > 1 + _WORTH_SAYING:
            parts.append(f"kernels that run side by side take {slowdown:.2f} times as long as alone")
        parts.append(f"on average {sum(self.busy_ns) / end_ns:.1f} of {self.timeline.num_streams} streams work")
        return "; ".join(parts)

    def _idleness(self) -> str:
        if self.idle_ns < _WORTH_SAYING * self.timeline.end_ns:
            return ""
        longest, kernel = max(self.gaps, key=lambda gap: gap[0])
        where = "at the end" if kernel is None else f"before {self.graph.kernels[kernel].label}"
        share, gaps = percent(self.idle_ns, self.timeline.end_ns), count(len(self.gaps), "gap")
        return f"{share} of the time nothing runs, in {gaps}; the longest, {duration(longest)}, is {where}"
