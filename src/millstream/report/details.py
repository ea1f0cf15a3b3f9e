"""What stands below the timelines of a page: kernels with their times, memory, plans tried, what fell back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from millstream.graph import Candidate
from millstream.report.words import count, duration, percent, size

if TYPE_CHECKING:
    from millstream.report.explanation import Explanation
    from millstream.report.program import ProgramReport

MAX_KERNELS = 500  # rows of a table: the page stays below 2 MB


def details_of(explanation: Explanation) -> str:
    """HTML, without scripts."""
    parts = []
    for program in explanation.programs:
        parts += ["<section>", f"<h2>{_clean(program.graph.name)}: {_clean(program.phase)}</h2>", *_of(program)]
        parts.append("</section>")
    for each in explanation.communication:
        told = [f"{kind}: {sentence}." for kind, sentence in each.sentences().items()]
        told += [f"{each.waits()}."] if each.waits() else []
        parts += [f"<section><h2>{_clean(each.plan.graph.name)}: communication</h2>"]
        parts += [f"<p>{_clean(sentence)}</p>" for sentence in told]
        parts += [_table(each.columns(), each.rows(), {1, 2, 3, 4, 5}), "</section>"]
    fallbacks = "".join(f"<li>{_clean(reason)}</li>" for reason in explanation.fallbacks)
    told = f"<ul>{fallbacks}</ul>" if fallbacks else "<p>Nothing: every operator is captured.</p>"
    return "\n".join([*parts, "<section>", "<h2>What fell back</h2>", told, "</section>"])


def _of(program: ProgramReport) -> Iterator[str]:
    memory = program.memory()
    whose = "the engine's trace" if program.timeline is not None else "the choice of the plan"
    measured = "nothing was measured" if program.measured_ns is None else f"measured by {whose}"
    facts = [
        f"Engine {program.engine}, {count(program.streams, 'stream')}, {count(len(program.graph.kernels), 'kernel')}, "
        f"compiled in {program.compile_seconds:.1f} s.",
        f"One run: {duration(program.measured_ns)} ({measured}), {program.guess} {duration(program.predicted_ns)}.",
        f"{program.idleness()}." if program.idleness() else "",
        *(f"{note}." if not note.endswith(".") else note for note in program.notes),
    ]
    yield "".join(f"<p>{_clean(fact)}</p>" for fact in facts if fact)
    rows = [(name.replace("_", " "), size(taken)) for name, taken in memory.items()]
    yield "<h2>Memory</h2>" + _table(("of", "bytes"), rows, {1})
    if len(program.candidates) > 1:
        yield "<h2>Plans tried</h2>" + _table(_PLAN, [_plan_row(each) for each in program.candidates], {1, 2, 3, 4, 5})
    shown = program.largest(MAX_KERNELS)
    head, right = program.kernel_columns()
    yield "<h2>Kernels</h2>" + _table(head, [program.kernel_cells(kernel, 200) for kernel in shown], right)
    if len(shown) < len(program.graph.kernels):
        yield f"<p>… and {count(len(program.graph.kernels) - len(shown), 'smaller kernel')}.</p>"
    unknown = program.measured_by_kernel.get(None, 0)
    if unknown and program.timeline is not None:
        share = percent(unknown, program.timeline.end_ns)
        yield f"<p>{share} of the time ran what cannot be attributed to a kernel.</p>"


_PLAN = ("plan", "streams", "waits", "peak memory", "predicted", "measured", "outcome")


def _plan_row(each: Candidate) -> tuple[str, ...]:
    times = duration(each.predicted_ns), duration(each.measured_ns)
    numbers = str(each.streams), str(each.waits), size(each.peak_bytes)
    return f"{each.policy}, {each.spread}", *numbers, *times, each.outcome


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        parts = (f"<{tag}{' class=n' if i in right else ''}>{_clean(each)}</{tag}>" for i, each in enumerate(cells))
        return f"<tr>{''.join(parts)}</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _clean(text: str) -> str:
    """Text that is nothing but text, in any encoding of the page."""
    return escape(text).encode("ascii", "xmlcharrefreplace").decode()
