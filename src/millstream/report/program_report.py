"""One program of a compiled model or step: its kernels, plan, times and memory, as text and as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from textwrap import wrap
from typing import Any

from millstream.cost import Costs, Roofline
from millstream.graph import Candidate, Kernel, KernelGraph, KernelKind, Plan, Role, Timeline, Wait
from millstream.insight.profiler.replays import idle_in_graph, time_of_kernels
from millstream.report.account import Account
from millstream.report.pictures.picture import Picture, draw_timeline
from millstream.report.pictures.terminal import sketch_streams
from millstream.report.placement_report import device_data, device_lines
from millstream.report.size_report import OneSize
from millstream.report.tried_report import alternative_lines, candidate_lines
from millstream.report.words import count, duration, operations, percent, shorten, size, table
from millstream.schedule.improve import Tried
from millstream.simulate import simulate

_WIDTH = 118  # characters of a line
_UNTOLD = 0.05  # of a traced run: with more of it nothing is concluded from what kernels took
_FAR = 1.5  # times the prediction: what that says need not be so
_TOO_LONG = 3  # times what a run takes: so long a prediction is of kernels measured beside other work of the machine
_SLOWEST, _SLOWEST_NS = 50, 100_000  # times what bytes and operations need, and at least: no CPU's kernel takes longer
_IMPLAUSIBLE = "kernels seem to have been measured while the machine did other things"
_INPUTS = 6  # kinds of inputs that are listed


@dataclass(frozen=True)
class ProgramReport:
    """One program: a forward pass, a backward pass, an inference graph or a whole step.

    Attributes:
        plan: How it is issued.
        phase: Which part of a model it is.
        engine: What runs it.
        peak_bytes: Most memory that its temporaries and outputs take at once, by the plan.
        compile_seconds: What lowering it took.
        notes: Why it does not run as asked for.
        costs: What its kernels cost, where that is known; needed for a prediction.
        is_calculated: The costs are calculated from bytes and operations, and no kernel was measured: then what comes
            of them is called so, and nothing is said of what bounds the run.
        timeline: A run of it, traced on the device.
        candidates: The plans that this one was chosen from.
        alternatives: What came of other ways to compute some of its kernels.
        num_in_place: Graphs that read inputs where callers have them, beside the one that copies them.
        inputs: Type and shape of each input that is no parameter or other state, as far as they are known: they tell
            programs of one function apart.
        one_size: Where it is one of the sizes of a program that serves many.
    """

    plan: Plan
    phase: str
    engine: str
    peak_bytes: int
    compile_seconds: float
    notes: tuple[str, ...] = ()
    costs: Costs | None = None
    is_calculated: bool = False
    timeline: Timeline | None = None
    candidates: tuple[Candidate, ...] = ()
    alternatives: tuple[Tried, ...] = ()
    num_in_place: int = 0
    inputs: tuple[str, ...] = ()
    one_size: OneSize | None = None

    @property
    def graph(self) -> KernelGraph:
        """Its kernels and buffers."""
        return self.plan.graph

    @property
    def streams(self) -> int:
        """Streams of its plan."""
        return self.plan.num_streams

    @property
    def waits(self) -> int:
        """Waits between them."""
        return sum(isinstance(step, Wait) for step in self.plan.steps)

    @cached_property
    def accounts(self) -> dict[str, Account]:
        """Where the time goes: ``measured`` when there is a trace, else from costs: ``predicted`` or ``calculated``."""
        accounts = {}
        if self.timeline is not None:
            # What a CPU could do at best is not known: of a run there, only what was measured is told.
            costs = None if self.is_calculated or self.is_implausible else self.costs
            accounts["measured"] = Account(self.graph, self.timeline, costs, self._tried())
        if self.costs is not None and self._predicted is not None:
            accounts[self.guess] = Account(self.graph, self._predicted, self.costs, self._tried())
        return accounts

    def _tried(self) -> str:
        """Return what came of plans with more streams than the one that was chosen."""
        tried = [each for each in self.candidates if each.streams > 1 and self.streams == 1]
        measured = [each for each in tried if each.measured_ns is not None]
        how = "was quicker when measured" if measured else "was predicted to be quicker"
        return f"of {count(len(measured or tried), 'plan')} with more streams, none {how}" if tried else ""

    @cached_property
    def _predicted(self) -> Timeline | None:
        return None if self.costs is None else simulate(self.plan, self.costs)

    @cached_property
    def is_implausible(self) -> bool:
        """Whether its kernels were measured to take far longer than a run, or where none was measured, than they can.

        On a busy machine, a kernel of a microsecond may seem to take milliseconds.
        """
        if self.costs is None or self.is_calculated or self.predicted_ns is None:
            return False
        if self.measured_ns is not None:
            return self.predicted_ns > _TOO_LONG * self.measured_ns
        if any(device.partition(":")[0] != "cpu" for device in self.graph.devices):
            return False
        needed = Roofline().estimate(self.graph).kernels
        most_ns = sum(max(_SLOWEST * cost.duration_ns, _SLOWEST_NS) for cost in needed)
        return sum(cost.duration_ns for cost in self.costs.kernels) > most_ns

    @property
    def guess(self) -> str:
        """What a time is called that nobody has measured."""
        return "calculated" if self.is_calculated else "predicted"

    @property
    def predicted_ns(self) -> int | None:
        """Time of one run by the simulator; ``None`` without costs."""
        return self._predicted.end_ns if self._predicted is not None else None

    @property
    def measured_ns(self) -> int | None:
        """Time of one run on the device: as the choice measured it, or else traced; ``None`` when neither was done."""
        measured = [candidate.measured_ns for candidate in self.candidates if candidate.is_chosen]
        traced = self.timeline.end_ns if self.timeline is not None else None
        return next((time for time in measured if time is not None), traced)

    @cached_property
    def measured_by_kernel(self) -> dict[int | None, int]:
        """Time of each kernel in the traced run; ``None`` for what no plan knows. Empty without a trace."""
        return {} if self.timeline is None else time_of_kernels(self.timeline)

    def expected_ns(self, kernel: int) -> int | None:
        """Return what a kernel was predicted, or calculated, to take; ``None`` without costs."""
        return None if self.costs is None else self.costs.kernels[kernel].duration_ns

    @property
    def untold_share(self) -> float:
        """Of the traced run: what ran that cannot be attributed to a kernel."""
        if self.timeline is None or not self.timeline.end_ns:
            return 0.0
        return self.measured_by_kernel.get(None, 0) / self.timeline.end_ns

    @property
    def _is_untold(self) -> bool:
        """Whether too little is known of kernels to say what bounds a run."""
        return self.is_calculated and self.untold_share >= _UNTOLD

    @property
    def idle_by_cause(self) -> dict[str, int]:
        """Time of the traced run in which nothing ran, by what came next. Empty without a trace."""
        return {} if self.timeline is None else idle_in_graph(self.timeline, self.plan)

    def bound(self) -> str:
        """Say in words what bounds its time; empty when nothing was measured that tells."""
        accounts = self.accounts
        if self._is_untold or (self.is_implausible and "measured" not in accounts):
            return ""
        bound = next((account.bound() for kind, account in accounts.items() if kind != "calculated"), "")
        measured_ns, predicted_ns = self.measured_ns, self.predicted_ns
        if bound and "measured" not in self.accounts and measured_ns and predicted_ns:
            longer = measured_ns / predicted_ns
            bound += f"; but that is predicted, and measured it takes {longer:.1f} times as long" * (longer >= _FAR)
        return bound

    def pictures(self) -> list[Picture]:
        """Its runs as something to draw: the traced one first."""
        on = f"policy {self.plan.policy} on {count(self.streams, 'stream')}"
        name = " ".join([self.graph.name, *self._inputs()])
        return [
            draw_timeline(
                self.plan,
                account.timeline,
                critical=account.critical_path,
                title=f"{name}: {on}, {kind} {duration(account.timeline.end_ns)}",
                caption=(self._caption(kind, account), *self._times()[-1 if kind == "calculated" else 1 :]),
            )
            for kind, account in self.accounts.items()
        ]

    def _caption(self, kind: str, account: Account) -> str:
        """Return what is said first of a picture."""
        if kind == "calculated":
            return "Calculated from bytes and operations: no kernel was measured, and lengths say little."
        if kind == "predicted" and self.is_implausible:
            return f"Not to be relied on: {_IMPLAUSIBLE}."
        return f"{self.bound() or 'What bounds it is not known'}." if self._is_untold else f"{account.bound()}."

    def by_kind(self) -> dict[KernelKind, tuple[int, int, int]]:
        """Number of kernels, bytes moved and operations of each kind that occurs, largest traffic first."""
        totals: dict[KernelKind, tuple[int, int, int]] = {}
        for kernel in self.graph.kernels:
            number, moved, flops = totals.get(kernel.kind, (0, 0, 0))
            totals[kernel.kind] = (number + 1, moved + kernel.num_bytes, flops + kernel.flops)
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))

    def memory(self) -> dict[str, int]:
        """Bytes by role, the plan's peak, and what the same would take if nothing were reused."""
        owned = [buffer for buffer in self.graph.buffers if buffer.alias_of is None]
        roles = {role: sum(buffer.num_bytes for buffer in owned if buffer.role is role) for role in Role}
        return {
            "inputs": roles[Role.INPUT],
            "state": roles[Role.STATE],
            "constants": roles[Role.CONSTANT],
            "peak": self.peak_bytes,
            "without_reuse": roles[Role.TEMPORARY] + roles[Role.OUTPUT],
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, fit for JSON; sizes in bytes, times in nanoseconds unless their names differ."""
        account = next(iter(self.accounts.values()), None)
        return {
            "name": self.graph.name,
            "phase": self.phase,
            "inputs": list(self.inputs),
            "engine": self.engine,
            "policy": self.plan.policy,
            "streams": self.streams,
            "waits": self.waits,
            "graphs_in_place": self.num_in_place,
            "compile_seconds": self.compile_seconds,
            "bound": self.bound(),
            "times_ns": None if account is None else self._times_ns(account),
            "critical_path": [] if account is None else list(account.critical_path),
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "alternatives": [asdict(each) for each in self.alternatives],
            "timelines": {kind: _timeline_data(account.timeline) for kind, account in self.accounts.items()},
            "idle_ns_by_cause": self.idle_by_cause,
            "memory_bytes": self.memory(),
            "placement": device_data(self.plan, self.costs),
            "by_kind": {
                str(kind): {"kernels": number, "bytes": moved, "flops": flops}
                for kind, (number, moved, flops) in self.by_kind().items()
            },
            "kernels": [
                {
                    **_kernel_data(kernel),
                    "measured_ns": self.measured_by_kernel.get(kernel.id),
                    f"{self.guess}_ns": self.expected_ns(kernel.id),
                }
                for kernel in self.graph.kernels
            ],
            "notes": list(self.notes),
            "one_size": None if self.one_size is None else asdict(self.one_size),
        }

    def text(self, limit: int) -> list[str]:
        """Lines for a terminal; at most ``limit`` kernels, those that move most memory first."""
        devices = sorted({kernel.device for kernel in self.graph.kernels})
        waits = f", {count(self.waits, 'wait')}, policy {self.plan.policy}" if self.streams > 1 else ""
        lines = [
            f"{self.graph.name}: {count(len(self.graph.kernels), 'kernel')} on {', '.join(devices) or 'no device'}, "
            f"engine {self.engine}, {count(self.streams, 'stream')}{waits}; compiled in {self.compile_seconds:.1f} s",
        ]
        for line in [*self._inputs(), *self._times(), *filter(None, [self.idleness()])]:
            lines += wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        for account in list(self.accounts.values())[:1]:
            lines += [f"  {line}" for line in sketch_streams(account.timeline)] if self.streams > 1 else []
        lines += candidate_lines(self.candidates)
        lines += alternative_lines(self.alternatives)
        rows = [
            (str(kind), str(number), size(moved), operations(flops))
            for kind, (number, moved, flops) in self.by_kind().items()
        ]
        lines += table(("kind", "kernels", "memory moved", "operations"), rows, right={1, 2, 3})
        lines += device_lines(self.plan, self.costs)
        memory = self.memory()
        lines.append(
            f"  memory: inputs {size(memory['inputs'])}, state {size(memory['state'])}, "
            f"constants {size(memory['constants'])}; temporaries and outputs peak at {size(memory['peak'])} "
            f"({size(memory['without_reuse'])} without reuse)"
        )
        if self.num_in_place:
            lines.append(f"  inputs are read where they lie, by {count(self.num_in_place, 'more graph')}")
        largest = self.largest(limit)
        head, right = self.kernel_columns()
        lines += table(head, [self.kernel_cells(kernel) for kernel in largest], right=right)
        hidden = len(self.graph.kernels) - len(largest)
        if hidden > 0:
            lines.append(
                f"  … and {count(hidden, 'smaller kernel')}; .text(limit=None) shows them, .to_dict() has everything"
            )
        lines += [f"  note: {note}" for note in self.notes]
        return lines

    def largest(self, limit: int, times: Mapping[Any, int] | None = None) -> list[Kernel]:
        """The kernels that take longest by ``times``, or as measured; where neither is known, move most memory."""
        known: Mapping[Any, int] = times or self.measured_by_kernel

        def weight(kernel: Kernel) -> tuple[int, int]:
            return -(known.get(kernel.id, 0) if known else kernel.num_bytes), kernel.id

        return sorted(self.graph.kernels, key=weight)[:limit]

    def kernel_columns(self) -> tuple[tuple[str, ...], set[int]]:
        """Heads of the columns of ``kernel_cells``, and which of them hold numbers."""
        if not self.measured_by_kernel:
            return ("kernel", "kind", "memory moved", "operations", "made of", "from"), {0, 2, 3}
        head = ("kernel", "kind", "measured", self.guess, "memory moved", "operations", "made of", "from")
        return head, {0, 2, 3, 4, 5}

    def kernel_cells(self, kernel: Kernel, width: int = 56) -> tuple[str, ...]:
        """One kernel in the table."""
        times: tuple[str, ...] = ()
        if self.measured_by_kernel:
            times = duration(self.measured_by_kernel.get(kernel.id)), duration(self.expected_ns(kernel.id))
        ops = shorten(", ".join(kernel.ops) or kernel.name, width)
        source = ", ".join(filter(None, (kernel.module, kernel.source)))
        return str(kernel.id), str(kernel.kind), *times, size(kernel.num_bytes), operations(kernel.flops), ops, source

    def idleness(self) -> str:
        """Say in words how long nothing ran in the traced run, and before what; empty where it is nothing."""
        causes = self.idle_by_cause
        if self.timeline is None or not causes:
            return ""
        whole = percent(sum(causes.values()), self.timeline.end_ns)
        return f"nothing ran {whole} of the time: " + ", ".join(f"{why} {duration(t)}" for why, t in causes.items())

    def _inputs(self) -> list[str]:
        """Return what the program was compiled for; those alike are listed once."""
        found = [each if number == 1 else f"{number} x {each}" for each, number in Counter(self.inputs).items()]
        more = [f"{len(found) - _INPUTS} more kinds"] if len(found) > _INPUTS + 1 else []
        return [f"for {', '.join(found[:_INPUTS] + more if more else found)}"] if found else []

    def _times(self) -> list[str]:
        """Return what bounds a run, and how long it takes beside what it could."""
        times = {"measured": self.measured_ns, self.guess: self.predicted_ns}
        known = ", ".join(f"{kind} {duration(time_ns)}" for kind, time_ns in times.items() if time_ns is not None)
        account = next(iter(self.accounts.values()), None)
        if account is None or self._is_untold:
            untold = ""
            if self._is_untold:
                untold = f"; {percent(self.untold_share, 1)} of it cannot be attributed to a kernel"
            return [f"time: {known}{untold}"] if known else []
        if self.is_implausible and "measured" not in self.accounts:
            return [
                f"time: {known}; nothing is concluded from that: {_IMPLAUSIBLE}; ms.explain(…, measure=True) tells more"
            ]
        roofline = "" if account.roofline_ns is None else f", roofline {duration(account.roofline_ns)}"
        parts = f"kernels one after another {duration(account.serial_ns)}, critical path "
        parts += f"{duration(account.critical_path_ns)}{roofline}"
        if "calculated" in self.accounts and "measured" not in self.accounts:
            lines = [f"time: {known}; calculated as well: {parts}"]
        else:
            lines = [f"bound: {self.bound()}", f"time: {known}; {parts}"]
        if self.phase == "inference" and (preparation := account.preparation()):
            lines.append(
                f"parameters: {preparation} (another layout or type), in every call; where they stay as they are, "
                "freeze=True does it once"
                + "; for convolutions on a GPU, model.to(memory_format=torch.channels_last) spares it, too"
                * account.prepares_for_convolutions
            )
        return lines

    def _times_ns(self, account: Account) -> dict[str, Any]:
        return {
            "measured": self.measured_ns,
            self.guess: self.predicted_ns,
            "serial": account.serial_ns,
            "critical_path": account.critical_path_ns,
            "roofline": account.roofline_ns,
            "idle": account.idle_ns,
            "busy": list(account.busy_ns),
        }


def _kernel_data(kernel: Kernel) -> dict[str, Any]:
    return {
        "id": kernel.id,
        "name": kernel.name,
        "kind": str(kernel.kind),
        "device": kernel.device,
        "bytes": kernel.num_bytes,
        "flops": kernel.flops,
        "ops": list(kernel.ops),
        "source": kernel.source,
        "module": kernel.module,
        "reads": list(kernel.reads),
        "writes": list(kernel.writes),
    }


def _timeline_data(timeline: Timeline) -> dict[str, Any]:
    return {"end_ns": timeline.end_ns, "streams": timeline.num_streams, "spans": [asdict(s) for s in timeline.spans]}
