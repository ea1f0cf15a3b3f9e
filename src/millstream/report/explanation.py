"""What a compiled model or step consists of, as text for people and as plain data for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.graph import Kernel, KernelGraph, KernelKind, Plan, Role, Wait


@dataclass(frozen=True)
class ProgramReport:
    """One program: a forward pass, a backward pass, an inference graph or a whole step.

    Attributes:
        graph: Its kernels and buffers.
        phase: Which part of a model it is.
        engine: What runs it.
        streams: Streams of its plan.
        waits: Waits between them.
        peak_bytes: Most memory that its temporaries and outputs take at once, by the plan.
        compile_seconds: What lowering it took.
        notes: Why it does not run as asked for.
    """

    graph: KernelGraph
    phase: str
    engine: str
    streams: int
    waits: int
    peak_bytes: int
    compile_seconds: float
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, plan: Plan, *, phase: str, engine: str, peak_bytes: int, compile_seconds: float, notes: Iterable[str]
    ) -> ProgramReport:
        """Describe a plan and the engine that runs it."""
        waits = sum(isinstance(step, Wait) for step in plan.steps)
        return cls(plan.graph, phase, engine, plan.num_streams, waits, peak_bytes, compile_seconds, tuple(notes))

    def by_kind(self) -> dict[KernelKind, tuple[int, int, int]]:
        """Number of kernels, bytes moved and operations of each kind that occurs, largest traffic first."""
        totals: dict[KernelKind, tuple[int, int, int]] = {}
        for kernel in self.graph.kernels:
            count, moved, flops = totals.get(kernel.kind, (0, 0, 0))
            totals[kernel.kind] = (count + 1, moved + kernel.num_bytes, flops + kernel.flops)
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
        """Everything as plain data, fit for JSON; all sizes in bytes."""
        return {
            "name": self.graph.name,
            "phase": self.phase,
            "engine": self.engine,
            "streams": self.streams,
            "waits": self.waits,
            "compile_seconds": self.compile_seconds,
            "memory_bytes": self.memory(),
            "by_kind": {
                str(kind): {"kernels": count, "bytes": moved, "flops": flops}
                for kind, (count, moved, flops) in self.by_kind().items()
            },
            "kernels": [
                {
                    "id": kernel.id,
                    "name": kernel.name,
                    "kind": str(kernel.kind),
                    "device": kernel.device,
                    "bytes": kernel.num_bytes,
                    "flops": kernel.flops,
                    "ops": list(kernel.ops),
                    "source": kernel.source,
                    "reads": list(kernel.reads),
                    "writes": list(kernel.writes),
                }
                for kernel in self.graph.kernels
            ],
            "notes": list(self.notes),
        }

    def text(self, limit: int) -> list[str]:
        """Lines for a terminal; at most ``limit`` kernels, those that move most memory first."""
        devices = sorted({kernel.device for kernel in self.graph.kernels})
        streams = f"{self.streams} stream{'s' if self.streams != 1 else ''}"
        waits = f", {self.waits} waits" if self.streams > 1 else ""
        lines = [
            f"{self.graph.name}: {len(self.graph.kernels)} kernels on {', '.join(devices) or 'no device'}, "
            f"engine {self.engine}, {streams}{waits}; compiled in {self.compile_seconds:.1f} s"
        ]
        rows = [
            (str(kind), str(count), size(moved), operations(flops))
            for kind, (count, moved, flops) in self.by_kind().items()
        ]
        lines += table(("kind", "kernels", "memory moved", "operations"), rows, right={1, 2, 3})
        memory = self.memory()
        lines.append(
            f"  memory: inputs {size(memory['inputs'])}, state {size(memory['state'])}, "
            f"constants {size(memory['constants'])}; temporaries and outputs peak at {size(memory['peak'])} "
            f"({size(memory['without_reuse'])} without reuse)"
        )
        largest = sorted(self.graph.kernels, key=lambda kernel: (-kernel.num_bytes, kernel.id))[:limit]
        rows = [kernel_row(kernel) for kernel in largest]
        lines += table(("kernel", "kind", "memory moved", "operations", "made of", "from"), rows, right={0, 2, 3})
        hidden = len(self.graph.kernels) - len(largest)
        if hidden > 0:
            lines.append(f"  … and {hidden} smaller kernels; .text(limit=None) shows them, .to_dict() has everything")
        lines += [f"  note: {note}" for note in self.notes]
        return lines


@dataclass(frozen=True)
class Explanation:
    """What ``ms.explain`` returns; ``str()`` is the text.

    Attributes:
        name: What was explained.
        programs: Its programs, in the order they were compiled.
        fallbacks: Why parts run on plain torch.compile or eagerly; empty when everything was captured.
    """

    name: str
    programs: tuple[ProgramReport, ...]
    fallbacks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, fit for JSON."""
        return {
            "name": self.name,
            "programs": [program.to_dict() for program in self.programs],
            "fallbacks": list(self.fallbacks),
        }

    def text(self, limit: int | None = 12) -> str:
        """The explanation for a terminal; ``limit`` bounds the kernels listed for each program, ``None`` lists all."""
        if not self.programs and not self.fallbacks:
            return f"{self.name}: nothing is compiled yet; call it once (a training step twice) and ask again."
        lines: list[str] = []
        for program in self.programs:
            lines += [*program.text(limit if limit is not None else len(program.graph.kernels)), ""]
        lines += [f"fell back: {reason}" for reason in self.fallbacks] or [
            "nothing fell back: every operator is captured"
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def kernel_row(kernel: Kernel) -> tuple[str, ...]:
    """Cells of one kernel in the table."""
    ops = ", ".join(kernel.ops) or kernel.name
    return (
        str(kernel.id),
        str(kernel.kind),
        size(kernel.num_bytes),
        operations(kernel.flops),
        shorten(ops, 56),
        kernel.source,
    )


def size(num_bytes: int) -> str:
    """Bytes in the unit that suits them."""
    return _scaled(num_bytes, ("B", "kB", "MB", "GB", "TB"))


def operations(flops: int) -> str:
    """Operations in the unit that suits them; a dash for none."""
    return _scaled(flops, ("", "k", "M", "G", "T", "P")) if flops else "–"


def _scaled(value: float, units: Sequence[str]) -> str:
    for unit in units:
        if value < 1000 or unit == units[-1]:
            break
        value /= 1000
    return f"{value:.3g} {unit}".rstrip()


def shorten(text: str, width: int) -> str:
    """Cut a text to ``width`` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """Lay out rows under a head; the columns in ``right`` are set flush right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        (
            "  "
            + "  ".join(
                c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
        ).rstrip()
        for row in (head, *rows)
    ]
