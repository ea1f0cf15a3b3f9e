"""The part of a page below its timelines: modules and kernels with their times, memory, plans tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from millstream.graph import Candidate, Kernel
from millstream.report.words import count, duration, percent, size

if TYPE_CHECKING:
    from millstream.report.program_report import ProgramReport
    from millstream.report.traffic import CommunicationReport

MAX_KERNELS = 500  # rows of a table: the page stays below 2 MB
MAX_MODULES = 12  # rows of the sums: as deep into the model as that allows


class Table(NamedTuple):
    """Rows under a head; the columns in ``right`` hold numbers, and ``kernels`` are those that the rows lead to."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: set[int]
    kernels: Sequence[int] = ()
    is_folded: bool = False


class Section(NamedTuple):
    """The part of a page about one program; ``picture`` is the number of its timeline."""

    title: str
    facts: Sequence[str]
    tables: Sequence[Table]
    more: Sequence[str] = ()
    picture: int = 0


def sections_of(programs: Sequence[ProgramReport], communication: Sequence[CommunicationReport]) -> Iterator[Section]:
    """One for each program, and one for each step that exchanges something with other processes."""
    picture = sum(len(each.pictures()) for each in communication)
    for program in programs:
        yield section_of(program, picture)
        picture += len(program.accounts)
    for each in communication:
        told = [f"{kind}: {sentence}." for kind, sentence in each.sentences().items()]
        told += [f"{each.waits()}."] if each.waits() else []
        table = Table("", each.columns(), each.rows(), {1, 2, 3, 4, 5})
        yield Section(f"{each.plan.graph.name}: communication", told, [table])


def section_of(program: ProgramReport, picture: int) -> Section:
    """Return what is told of a program, whose timeline has a number."""
    whose = "the engine's trace" if program.timeline is not None else "the choice of the plan"
    measured = "nothing was measured" if program.measured_ns is None else f"measured by {whose}"
    facts = [
        f"Engine {program.engine}, {count(program.streams, 'stream')}, {count(len(program.graph.kernels), 'kernel')}, "
        f"compiled in {program.compile_seconds:.1f} s.",
        f"One run: {duration(program.measured_ns)} ({measured}), {program.guess} {duration(program.predicted_ns)}.",
        f"{program.idleness()}." if program.idleness() else "",
        *(f"{note}." if not note.endswith(".") else note for note in program.notes),
    ]
    tables = [*_modules(program), _kernels(program)]
    if len(program.candidates) > 1:
        rows = [_plan_row(each) for each in program.candidates]
        tables.append(Table("Plans tried", _PLAN, rows, {1, 2, 3, 4, 5}, is_folded=True))
    memory = [(name.replace("_", " "), size(taken)) for name, taken in program.memory().items()]
    tables.append(Table("Memory", ("of", "bytes"), memory, {1}, is_folded=True))
    more = []
    hidden = len(program.graph.kernels) - MAX_KERNELS
    if hidden > 0:
        more.append(f"… and {count(hidden, 'smaller kernel')}.")
    unknown = program.measured_by_kernel.get(None, 0)
    if unknown and program.timeline is not None:
        share = percent(unknown, program.timeline.end_ns)
        more.append(f"{share} of the time ran what cannot be attributed to a kernel.")
    return Section(f"{program.graph.name}: {program.phase}", [fact for fact in facts if fact], tables, more, picture)


def _times(program: ProgramReport) -> tuple[dict[int, int], int]:
    """Return what each kernel takes, as measured or else as expected, and all of the run."""
    account = next(iter(program.accounts.values()), None)
    if account is None:
        return {}, 0
    if program.measured_by_kernel:
        return {k: time for k, time in program.measured_by_kernel.items() if k is not None}, account.timeline.end_ns
    return dict(enumerate(account.durations_ns)), account.timeline.end_ns


def _kernels(program: ProgramReport) -> Table:
    """The largest kernels, each with its share of the run."""
    times, whole = _times(program)
    shown = program.largest(MAX_KERNELS, times)
    head, right = program.kernel_columns()

    def cells(kernel: Kernel) -> tuple[str, ...]:
        first, *others = program.kernel_cells(kernel, 200)
        return (first, percent(times.get(kernel.id, 0), whole), *others) if times else (first, *others)

    if times:
        head, right = (head[0], "share", *head[1:]), {0, 1, *(i + 1 for i in right if i)}
    return Table("Kernels", head, [cells(each) for each in shown], right, [each.id for each in shown] if times else [])


def _modules(program: ProgramReport) -> Iterator[Table]:
    """Sums by module of the user's model, as deep as few rows allow."""
    times, whole = _times(program)
    paths = {kernel.id: tuple(kernel.module.split(".")) if kernel.module else () for kernel in program.graph.kernels}
    if not times or not any(paths.values()):
        return
    depth = 1
    while depth < max(map(len, paths.values())) and len({p[: depth + 1] for p in paths.values()}) <= MAX_MODULES:
        depth += 1
    sums: dict[str, tuple[int, int]] = {}
    for kernel, path in paths.items():
        name = ".".join(path[:depth]) or "outside of modules"
        number, time = sums.get(name, (0, 0))
        sums[name] = number + 1, time + times.get(kernel, 0)
    rows = [
        (name, percent(time, whole), duration(time), str(number))
        for name, (number, time) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]
    yield Table("By module", ("module", "share", "time", "kernels"), rows, {1, 2, 3})


_PLAN = ("plan", "streams", "waits", "peak memory", "predicted", "measured", "outcome")


def _plan_row(each: Candidate) -> tuple[str, ...]:
    times = duration(each.predicted_ns), duration(each.measured_ns)
    numbers = str(each.streams), str(each.waits), size(each.peak_bytes)
    return f"{each.policy}, {each.spread}", *numbers, *times, each.outcome
