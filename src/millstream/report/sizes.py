"""A program that serves many sizes: a line for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from millstream.report.words import count, duration, shorten, size, table

if TYPE_CHECKING:
    from millstream.report.program import ProgramReport

MOST_SIZES = 20  # sizes of which a line is shown


@dataclass(frozen=True)
class OneSize:
    """One of the sizes that a program serves.

    Attributes:
        program: Number of the program.
        values: Of its symbols.
        calls: How many calls had this size.
        shared_bytes: The memory that sizes of the program have in turn.
        own_bytes: What this one holds beside that.
        object_bytes: About what its CUDA graph takes.
        is_planned: It has a plan of its own, as a size has that was called some times.
        num_untold: How many sizes of the program have no report, being called more rarely.
    """

    program: int
    values: tuple[int, ...]
    calls: int
    shared_bytes: int = 0
    own_bytes: int = 0
    object_bytes: int = 0
    is_planned: bool = True
    num_untold: int = 0


def by_program(programs: Sequence[ProgramReport]) -> Iterator[list[ProgramReport]]:
    """Reports in their order, those of one program together, the size called most often first."""
    for program, group in groupby(programs, lambda each: None if each.one_size is None else each.one_size.program):
        if program is None:
            yield from ([each] for each in group)
        else:
            yield sorted(group, key=lambda each: -calls_of(each))


def calls_of(report: ProgramReport) -> int:
    """How many calls its size had."""
    return 0 if report.one_size is None else report.one_size.calls


def summary(reports: Sequence[ProgramReport]) -> list[str]:
    """A line for each size of one program, and what all of them hold."""
    first = reports[0]
    rows = []
    for each in reports[:MOST_SIZES]:
        time_ns = each.measured_ns if each.measured_ns is not None else each.predicted_ns
        kind = "measured" if each.measured_ns is not None else each.guess
        is_planned = each.one_size is None or each.one_size.is_planned
        plan = f"{each.engine}, {count(each.streams, 'stream')}" if is_planned else "none yet"
        told = f"{duration(time_ns)} {kind}" if time_ns is not None else "–"
        kernels = str(len(each.graph.kernels))
        name, calls = shorten(", ".join(each.inputs), 60), str(calls_of(each))
        rows.append((name, calls, kernels, plan, size(each.peak_bytes), told))
    head = ("size", "calls", "kernels", "plan", "peak memory", "time")
    sizes = [each.one_size for each in reports if each.one_size is not None]
    num_untold = max(each.num_untold for each in sizes)
    number = len(reports) + num_untold
    lines = [f"{first.graph.name}: one program for {count(number, 'size')}"]
    lines += table(head, rows, right={1, 2, 4})
    if number > len(rows):
        elsewhere = "" if num_untold else "; .to_dict() has everything"
        lines.append(f"  … and {count(number - len(rows), 'size')} called more rarely{elsewhere}")
    shared, own = max(each.shared_bytes for each in sizes), sum(each.own_bytes for each in sizes)
    objects = sum(each.object_bytes for each in sizes)
    held = [f"{size(shared)} that they have in turn", f"{size(own)} that they hold for themselves"]
    held += [f"CUDA graphs about {size(objects)}"] if objects else []
    return [*lines, f"  memory of all: {', '.join(held)}"]
