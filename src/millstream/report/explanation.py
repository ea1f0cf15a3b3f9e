"""Explain what a compiled model or step consists of and where its time goes: text for people, data for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from millstream.errors import ArgumentError, check_folder
from millstream.report.details import sections_of
from millstream.report.pictures.html import to_html
from millstream.report.pictures.perfetto import to_perfetto
from millstream.report.pictures.picture import Picture
from millstream.report.pictures.svg import to_svg
from millstream.report.program_report import ProgramReport
from millstream.report.saved import saved_steps
from millstream.report.size_report import MOST_SIZES
from millstream.report.traffic import CommunicationReport
from millstream.report.words import count, duration, shorten, size, table

_WRITERS: dict[str, Callable[[Sequence[Picture]], str]] = {".html": to_html, ".svg": to_svg, ".json": to_perfetto}


@dataclass(frozen=True)
class Explanation:
    """The result of ``ms.explain``; ``str()`` is the text.

    Attributes:
        name: What was explained.
        programs: Its programs, in the order they were compiled.
        fallbacks: Why parts run on plain torch.compile or eagerly; empty when everything was captured.
        communication: What its steps exchange with other processes.
        captures: When a step was captured, in order, and why each time.
    """

    name: str
    programs: tuple[ProgramReport, ...]
    fallbacks: tuple[str, ...] = ()
    communication: tuple[CommunicationReport, ...] = ()
    captures: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, fit for JSON."""
        return {
            "name": self.name,
            "programs": [program.to_dict() for program in self.programs],
            "fallbacks": list(self.fallbacks),
            "communication": [each.to_dict() for each in self.communication],
            "captures": list(self.captures),
        }

    def text(self, limit: int | None = 12) -> str:
        """The explanation for a terminal.

        Of a program that serves many sizes, it has a line for each size, and the whole of the one called most often;
        ``ms.explain(x, size=n)`` has another.

        Args:
            limit: Bounds the kernels listed for each program, and the captures, of which the last ones are listed;
                ``None`` lists all.
        """
        if not self.programs and not self.fallbacks:
            how = "call it once (a training step twice) and ask again, unless there is nothing in it to compute"
            return f"{self.name}: nothing is compiled; {how}."
        lines: list[str] = []
        for program, *others in _by_program(self.programs):
            lines += [*_sizes_of([program, *others]), ""] if others else []
            lines += [*program.text(limit if limit is not None else len(program.graph.kernels)), ""]
        for each in self.communication:
            lines += [*each.text(), ""]
        if len(self.captures) > 1:
            lines += ["captures:", *self._last_captures(limit), ""]
        lines += [f"fell back: {reason}" for reason in self.fallbacks] or [
            "nothing fell back: every operator is captured"
        ]
        return "\n".join(lines)

    def _last_captures(self, limit: int | None) -> list[str]:
        start = 0 if limit is None else max(len(self.captures) - limit, 0)
        told = [f"  {number}. {text}" for number, text in enumerate(self.captures, 1) if number > start]
        return [f"  … {start} before; .text(limit=None) lists all", *told] if start else told

    def __str__(self) -> str:
        return self.text()

    def save(self, path: str | Path) -> None:
        """Draw the kernels of every program on their streams, and write the picture to a file.

        Args:
            path: Its suffix chooses the form: ``.html`` (one file to look into, opens anywhere without network),
                ``.svg`` (for pages and papers), or ``.json`` (a trace for ui.perfetto.dev, from which ``millstream
                simulate`` reads what a data-parallel step would take on other numbers of devices).

        Raises:
            ArgumentError: The suffix is another one, the folder is not there, or there is no run to draw: nothing is
                compiled, or neither costs nor a trace of it are known.
        """
        path = Path(path)
        write = writer_for(path)
        check_folder(path)
        pictures = [picture for each in (*self.communication, *self.programs) for picture in each.pictures()]
        if not pictures:
            why = "its kernels' times are not known" if self.programs else "nothing of it is compiled: call it first"
            if self.fallbacks and not self.programs:
                why = f"nothing of it is compiled: {self.fallbacks[0]}"
            raise ArgumentError(f"there is no timeline of {self.name} to draw: {why}")
        if write is to_html:
            sections = list(sections_of(self.programs, self.communication))
            path.write_text(to_html(pictures, self.name, sections, self.fallbacks), encoding="utf-8")
        elif write is to_perfetto:
            path.write_text(to_perfetto(pictures, saved_steps(self.communication)), encoding="utf-8")
        else:
            path.write_text(write(pictures), encoding="utf-8")


def _by_program(programs: Sequence[ProgramReport]) -> Iterator[list[ProgramReport]]:
    """Reports in their order, those of one program together, the size called most often first."""
    for program, group in groupby(programs, lambda each: None if each.one_size is None else each.one_size.program):
        if program is None:
            yield from ([each] for each in group)
        else:
            yield sorted(group, key=lambda each: -_calls_of(each))


def _calls_of(report: ProgramReport) -> int:
    """Return how many calls its size had."""
    return 0 if report.one_size is None else report.one_size.calls


def _sizes_of(reports: Sequence[ProgramReport]) -> list[str]:
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
        name, calls = shorten(", ".join(each.inputs), 60), str(_calls_of(each))
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


def writer_for(path: Path) -> Callable[[Sequence[Picture]], str]:
    """Return what draws into such a file.

    Raises:
        ArgumentError: Nothing does.
    """
    write = _WRITERS.get(path.suffix.lower())
    if write is None:
        choice = ", ".join(_WRITERS)
        raise ArgumentError(f"cannot draw into {str(path)!r}: choose a name that ends with one of {choice}")
    return write
