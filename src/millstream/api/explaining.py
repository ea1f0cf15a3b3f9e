"""``ms.explain``, and access to the executables for measurements."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from millstream._torch.compiler.dynamo import is_compiled_by_torch
from millstream.api.compiling import compiler_of
from millstream.capture.model import Compiler
from millstream.capture.step.graph import StepGraph
from millstream.capture.step.step import Step
from millstream.cost import Roofline
from millstream.engine import AgreedEngine, BySize, Engine, Improving
from millstream.engine.traced_run import trace_run, why_not_trace
from millstream.errors import ArgumentError, LoweringError
from millstream.graph import Role
from millstream.program import Program, TensorLayout
from millstream.report import Arrivals, CommunicationReport, Explanation, OneSize, ProgramReport
from millstream.report.size_report import MOST_SIZES


def explain(compiled: Any, *, measure: bool = False, size: int | None = None) -> Explanation:
    """Tell what a compiled model or step consists of.

    What bounds it, its streams and waits, why its plan was chosen, kernels and what was fused into them, memory, and
    why anything fell back, and of a step when and why it was captured. ``.save("run.html")`` draws it.

    With ``measure=True`` each program is run a few more times, and what each kernel took stands beside what it was
    predicted to take, with the time in which nothing ran: on a GPU by replays of its graph under the device's profiler,
    on a CPU kernel after kernel by the clock, on inputs of its own. Nothing of yours changes. Where a program cannot be
    run by itself, because it needs other processes, say, a note tells why. A data-parallel step that is one graph is
    measured with its collectives where all processes ask for it within ten seconds.

    A program that serves many sizes has a line for each, and is described in full at the one called most often.

    Args:
        compiled: A result of ``ms.compile`` or ``ms.step`` that has been called (a step twice), or of
            ``torch.compile(..., backend="millstream")``, or a module that compiles in place with that backend.
        measure: Whether to measure each kernel.
        size: Only programs at this value of a size that changes, such as the batch's rows. Programs for one size are
            told by the dimensions in which their inputs differ from those of others; a single one by any dimension.

    Raises:
        ArgumentError: It is something else, or no program has been called with that size.
    """
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise ArgumentError(f"size is {size!r}; it must be an integer, such as the number of rows of a batch.")
    compiled = _function_of(compiled)
    if isinstance(compiled, Step):
        notes = [f"Python between graphs, at lines {first} to {last}" for first, last in compiled.regions]
        name, fallbacks = getattr(compiled, "__name__", type(compiled).__name__), tuple(compiled.fallbacks)
        captures = tuple(compiled.history)
        made = [
            (one, (*graph.effects.notes, *notes))
            for graph in compiled.graphs
            for one in map(_present, getattr(graph.executable, "executables", ()))
        ]
    else:
        compiler = _compiler_of(compiled)
        name, fallbacks, captures = compiler.name, tuple(compiler.fallbacks), ()
        made = [(_present(one), ()) for graph in compiler.graphs for one in graph.executables]
    static = None if size is None else _at_one_size([one for one, _ in made], size)
    programs = tuple(
        replace(_report(executable, effects, measure=measure), one_size=one_size)
        for number, (one, effects) in enumerate(made)
        for executable, one_size in _at_sizes(one, number, size)
        if one_size is not None or static is None or executable in static
    )
    if size is not None and not programs:
        raise ArgumentError(f"No program of {name} has run with size={size}: call it with that size first.")
    communication = () if size is not None else _communications(compiled, measure=measure)
    return Explanation(name, programs, fallbacks, communication, captures)


def _at_sizes(one: Any, number: int, size: int | None) -> Iterator[tuple[Engine, OneSize | None]]:
    """The executables of a program, at all sizes or at those with a given value, and what is known of each."""
    if not isinstance(one, BySize):
        yield one, None
        return
    with one.lock:  # a call of another thread must not come between: its size would be in neither, or in both
        known, waiting = one.calls(), one.open_calls()
    waiting = [(values, calls) for values, calls in waiting if size is None or size in values]
    told = waiting[: max(MOST_SIZES - len(known), 0)]
    num_untold = len(waiting) - len(told)
    for values, calls, executable in known:
        own_bytes = 0 if executable.shares_memory else executable.peak_bytes
        held = one.arena.num_bytes, own_bytes, executable.object_bytes
        if size is None or size in values:
            yield executable, OneSize(number, values, calls, *held, num_untold=num_untold)
    for values, calls in told:
        of_size = OneSize(number, values, calls, one.arena.num_bytes, is_planned=False, num_untold=num_untold)
        yield one.open_at(values), of_size
    if not known and not waiting and size is None:
        yield from ((executable, None) for executable in one)


def _at_one_size(made: Sequence[Any], size: int) -> list[Engine]:
    """Programs for one size that have it where their inputs and those of others differ."""
    alike: dict[Any, list[tuple[tuple[int, ...], Engine | None]]] = {}
    for number, one in enumerate(made):
        for executable, one_size in _at_sizes(one, number, None):
            shapes = [layout.size for layout in _input_layouts(executable.lowered.program)]
            key = executable.lowered.phase, *map(len, shapes)
            static = executable if one_size is None and one is executable else None
            alike.setdefault(key, []).append((tuple(itertools.chain(*shapes)), static))
    found = []
    for group in alike.values():
        dimensions = [*zip(*(sizes for sizes, _ in group), strict=True)]
        changing = [len({*values}) > 1 or len(group) == 1 for values in dimensions]
        found += [static for sizes, static in group if static and size in itertools.compress(sizes, changing)]
    return found


def _report(executable: Engine, effects: Sequence[str] = (), *, measure: bool = False) -> ProgramReport:
    costs, notes = executable.costs, (*executable.lowered.program.loops, *executable.notes, *effects)
    is_calculated = costs is None
    timeline = None
    if measure:
        obstacle = why_not_trace(executable)
        timeline = None if obstacle else trace_run(executable)
        notes = (*notes, f"not measured: {obstacle}") if obstacle else notes
        if timeline is not None and timeline.num_streams < executable.num_streams:
            notes = (*notes, "kernels were measured one after another, not on the streams of the plan")
    if costs is None:
        costs = Roofline().estimate(executable.plan.graph)
        if timeline is None:
            notes = (*notes, "times are calculated from bytes and operations: no kernel was measured")
    return ProgramReport(
        executable.plan,
        phase=str(executable.lowered.phase),
        engine=executable.name,
        peak_bytes=executable.peak_bytes,
        compile_seconds=executable.compile_seconds,
        notes=notes,
        costs=costs,
        is_calculated=is_calculated,
        timeline=timeline,
        candidates=executable.candidates,
        alternatives=executable.tried,
        num_in_place=executable.num_in_place,
        inputs=tuple(_describe_inputs(executable.lowered.program)),
    )


def _communications(compiled: Any, *, measure: bool) -> tuple[CommunicationReport, ...]:
    """Return what each graph of a step exchanges; nothing of one that makes no single program to tell of."""
    reports = []
    for engine in _agreed(compiled):
        with contextlib.suppress(LoweringError):
            reports.append(_communication(engine, measure=measure))
    return tuple(reports)


def _communication(engine: AgreedEngine, *, measure: bool) -> CommunicationReport:
    found = engine.describe()
    timeline, obstacle = engine.measure() if measure else (None, "")
    return CommunicationReport(
        found.plan,
        found.costs,
        found.num_processes,
        is_one_graph=found.is_one_graph,
        source=found.source,
        is_calculated=found.is_calculated,
        arrivals=Arrivals.of(found.arrivals_ns),
        timeline=timeline,
        obstacle=obstacle,
    )


def _describe_inputs(program: Program) -> Iterator[str]:
    for layout in _input_layouts(program):
        yield f"{str(layout.dtype).removeprefix('torch.')} {list(layout.size)}"


def _input_layouts(program: Program) -> Iterator[TensorLayout]:
    for name in program.inputs:
        if name is None or program.graph.buffer_of[name].role is not Role.INPUT:
            continue
        if (layout := program.layout(name)) is not None:
            yield layout


def executables(compiled: Any) -> list[Engine]:
    """The executables behind a compiled model or step, in the order they were compiled.

    Raises:
        ArgumentError: It is neither.
    """
    compiled = _function_of(compiled)
    if isinstance(compiled, Step):
        return [executable for graph in compiled.graphs for executable in _behind(graph)]
    return _flat(executable for graph in _compiler_of(compiled).graphs for executable in graph.executables)


def exchanges(step: Any) -> list[Any]:
    """Return what a step exchanges between processes, in the order in which that begins.

    Empty where it exchanges nothing.
    """
    return [each for engine in _agreed(step) for each in engine.segmented.exchanges]


def _agreed(step: Any) -> list[AgreedEngine]:
    function = _function_of(step)
    if not isinstance(function, Step):
        return []
    runners = (getattr(graph.executable, "runner", None) for graph in function.graphs)
    return [runner for runner in runners if isinstance(runner, AgreedEngine)]


def is_compiled(value: Any) -> bool:
    """Return whether ``explain`` takes it: what ``ms.compile`` or ``ms.step`` returned, or torch.compile with us."""
    function = _function_of(value)
    return isinstance(function, Step) or compiler_of(function) is not None


def _behind(graph: StepGraph) -> Sequence[Engine]:
    return _flat(getattr(graph.executable, "executables", ()))


def _flat(made: Iterable[Engine | BySize | Improving]) -> list[Engine]:
    """Return those of programs for many sizes, too."""
    present = map(_present, made)
    return [one for executable in present for one in (executable if isinstance(executable, BySize) else [executable])]


def _present(made: Any) -> Any:
    """Return what runs at present where alternatives are tried."""
    return made.current if isinstance(made, Improving) else made


def _function_of(compiled: Any) -> Any:
    """Return what stands behind a bound method."""
    return compiled.__func__ if isinstance(compiled, types.MethodType) else compiled


def _compiler_of(compiled: Any) -> Compiler:
    if (compiler := compiler_of(compiled)) is None:
        raise ArgumentError(
            "Expected what ms.compile or ms.step returned, or torch.compile with our backend, "
            f"got {_kind_of(compiled)}."
        )
    return compiler


def _kind_of(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind}, which another backend compiles" if is_compiled_by_torch(value) else kind
