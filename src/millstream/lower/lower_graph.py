"""One graph → one program: from disk, or through Inductor's compiler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
import torch._inductor
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.utils import should_assume_input_aligned
from torch.utils._pytree import tree_leaves

from millstream import progress
from millstream._torch.compiler.symbols import is_symbolic
from millstream.errors import LoweringError
from millstream.kernels import registry
from millstream.kernels.launches import TritonLaunch, compiling
from millstream.lower.alternatives.table import options_of, rewrite_for
from millstream.lower.alternatives.variants import Choosing, Variants, find_choice
from millstream.lower.bodies import take_control_flow
from millstream.lower.inductor.accesses import check_values, noting
from millstream.lower.inductor.branch_fusion import branches_apart
from millstream.lower.inductor.checks_first import checks_first
from millstream.lower.inductor.fx_wrapper import collect_wrappers
from millstream.lower.inductor.once.equal_kernels import equal_kernels
from millstream.lower.inductor.shortcuts import shortcuts
from millstream.lower.kept import FileContent, ProgramFile, open_record
from millstream.lower.segmented.segments import has_collectives
from millstream.lower.symbolic import SymbolicProgram
from millstream.lower.translation.translate import translate
from millstream.lower.turns import LOOP, Lower, bind_turns, lower_turns
from millstream.lower.views import check_views
from millstream.passes.rolling import roll_loops
from millstream.program import Program, Value
from millstream.schedule.improve import Tried


class Phase(StrEnum):
    """The part of a model that a program is."""

    INFERENCE = "inference"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True)
class Lowered:
    """A program and how PyTorch is going to call it.

    Attributes:
        program: What to run.
        phase: Which part of a model it is.
        visible: Positions of the outputs that reach the user; the others are saved for the backward pass.
        seconds: What lowering it took, or finding it on disk.
        record: Its place on disk, if it has one.
        keep_step: Called once it has shown that a step's inputs and results are passed on as they are, with the tensors
            that are passed before them: then it can be found by the step's own graph, before AOT autograd.
        variants: How it can be lowered otherwise, where that may be tried.
        tried: What came of alternatives in an earlier process.
        order: Of a merged program: for each kernel, which it was among those of its segments and collectives.
    """

    program: Program
    phase: Phase
    visible: frozenset[int]
    seconds: float
    record: ProgramFile | None = None
    keep_step: Callable[[list[Any]], None] | None = None
    variants: Variants[Lowered] | None = None
    tried: tuple[Tried, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def may_vary(self) -> bool:
        """Whether it may be lowered otherwise later: nobody else reads what it saves, and nothing was tried before."""
        return self.phase in (Phase.INFERENCE, Phase.STEP) and not self.tried


@dataclass(frozen=True)
class LoweredForSizes:
    """A program for many sizes and how PyTorch is going to call it: ``Lowered`` is what it comes to at some of them.

    Attributes:
        program: What to run.
        phase: Which part of a model it is.
        visible: As of ``Lowered``.
        seconds: What lowering it took, or finding it on disk.
        record: As of ``Lowered``.
        keep_step: Likewise.
    """

    program: SymbolicProgram
    phase: Phase
    visible: frozenset[int]
    seconds: float
    record: ProgramFile | None = None
    keep_step: Callable[[list[Any]], None] | None = None

    def at(self, sizes: tuple[int, ...]) -> Lowered:
        """The program for inputs that have these sizes, as ``program.sizes`` finds those of a call."""
        return Lowered(self.program.at(sizes), self.phase, self.visible, self.seconds)


MOST_ON_ONE_THREAD = 1 << 15
"""Elements of the largest tensor of a body: below, kernels that run again and again wait for threads more than they
compute."""


def lower_graph(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    name: str,
    phase: Phase,
    static: frozenset[int],
    options: dict[str, Any],
    choosing: Choosing = Choosing(),  # noqa: B008  which cannot be changed
) -> Lowered | LoweredForSizes:
    """Lower a graph, unless the program is on disk.

    Args:
        graph: Of aten operators, as AOT autograd makes it. Owned from now on.
        inputs: Example inputs.
        kwargs: Of Inductor's compiler.
        name: Of the program, for people.
        phase: Which part of a model it is.
        static: Positions of the inputs whose memory stays the same from call to call.
        options: Further Inductor options.
        choosing: How one of the alternatives is chosen.

    Raises:
        LoweringError: It has no program.
    """
    start = time.perf_counter()
    check_views(graph)
    visible = frozenset(_visible_outputs(graph) if phase is Phase.FORWARD else range(len(_outputs(graph))))
    facts = {"phase": str(phase), "static": static, "layout_opt": kwargs.get("layout_opt")}
    choice, tried, record = choosing.decide(lambda: open_record(graph, inputs, facts, options))
    symbolic, bodies = False, list[ProgramFile | None]()
    with contextlib.ExitStack() as stack:
        # Inductor may ask all ranks about collectives: none may wait for another one here.
        found = _find(record, stack, waits=not has_collectives(graph.graph))
        if found is not None:
            program = _named(found.program, name)
            _tell_strides(found.strides)
        else:
            with options_of(choice) as others:
                rewrite_for(choice, graph)
                settings = {**options, **others}
                how = partial(_lower_body, bodies, kwargs=kwargs, name=name, options=settings)
                with _told_of([] if is_symbolic(inputs) else roll_loops(graph, options)):
                    program, wrapper, symbolic = _lower_anew(graph, inputs, kwargs, name, phase, static, settings, how)
            if record is not None:
                record.save(program, wrapper, _told_strides(), bodies)
    lowered = _as_lowered(program, phase, visible, start, record, symbolic=symbolic)
    return replace(lowered, tried=tried) if isinstance(lowered, Lowered) else lowered


def from_disk(
    found: FileContent, step: ProgramFile, name: str, start: float, *, is_fixed: bool
) -> Lowered | LoweredForSizes:
    """The program that a step's own graph stands for."""
    program = _named(found.program, name)
    lowered = _as_lowered(program, Phase.STEP, frozenset(range(len(program.outputs))), start, step)
    _, tried = find_choice(step, is_fixed=is_fixed)
    return replace(lowered, tried=tried) if isinstance(lowered, Lowered) else lowered


def _find(record: ProgramFile | None, stack: contextlib.ExitStack, *, waits: bool) -> FileContent | None:
    """The program on disk. Where it is not there yet, other processes wait until ``stack`` is closed."""
    if record is None:
        return None
    found = record.load()
    if found is None and waits and stack.enter_context(record.lock()):
        found = record.load()
        if found is None:  # the other process could not keep it: those that waited lower it at once
            stack.close()
    return found


@contextlib.contextmanager
def _told_of(loops: Sequence[Any]) -> Iterator[None]:
    """Let errors of lowering a graph say that it has these loops, without which it can be lowered again."""
    try:
        yield
    except Exception as error:
        if loops:
            raise LoweringError(f"It cannot be lowered with {loops[0]} as one.", construct=LOOP) from error
        raise


def _lower_anew(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    name: str,
    phase: Phase,
    static: frozenset[int],
    options: dict[str, Any],
    lower_body: Lower,
) -> tuple[Program, torch.fx.GraphModule, bool]:
    """The program of a graph, the wrapper that it was translated from, and whether it is for many sizes.

    Args:
        graph: As of ``lower_graph``, like the others; its loops are nodes.
        inputs: Likewise.
        kwargs: Likewise.
        name: Likewise.
        phase: Likewise.
        static: Likewise.
        options: Likewise.
        lower_body: Lowers what is lowered apart: a turn of a loop, or a function of control flow.
    """
    symbolic = is_symbolic(inputs)
    num_outputs = len(_outputs(graph))
    launches: Iterable[TritonLaunch] = ()
    turns = lower_turns(graph, lower_body)
    controls = take_control_flow(graph, lower_body, is_backward=phase is Phase.BACKWARD)
    if phase is Phase.INFERENCE and not symbolic:  # own kernels are chosen by size
        if registry.rewrite(graph):
            kwargs = {**kwargs, "layout_opt": True}
        launches = registry.find_launches(graph.graph)
    with (
        compiling(launches),
        collect_wrappers(options) as wrappers,
        noting() as notes,
        shortcuts(),
        branches_apart(),
        registry.known_to_inductor(),
        equal_kernels(),
        checks_first(),
    ):
        arguments: Any = {**kwargs, "fx_wrapper": True}
        progress.phase("writing kernels")
        compile_fx_inner(graph, inputs, **arguments)
        progress.phase("planning")
        aligned = aligned_inputs(inputs)
    check_values(notes)
    if not wrappers:
        raise LoweringError("The graph has no kernels.", construct=name)
    symbolic = symbolic or is_symbolic(tree_leaves([(node.args, node.kwargs) for node in wrappers[-1].graph.nodes]))
    program = translate(wrappers[-1], name=name, static=static, aligned=aligned, symbolic=symbolic, turns=turns)
    program = bind_turns(program)
    del controls  # which the program holds
    if len(program.outputs) != num_outputs:
        raise LoweringError(
            f"The wrapper returns {len(program.outputs)} values instead of {num_outputs}.", construct=name
        )
    return program, wrappers[-1], symbolic


def _lower_body(
    records: list[ProgramFile | None],
    body: torch.fx.GraphModule,
    inputs: list[Any],
    *,
    kwargs: dict[str, Any],
    name: str,
    options: dict[str, Any],
) -> Program:
    """The program of what is lowered apart, whose record is noted."""
    # A context of its own: that of the whole graph knows which of the graph's inputs a backward pass may write over, by
    # their positions, and is told the strides of its results.
    with torch._guards.tracing(torch._guards.TracingContext(detect_fake_mode(inputs))):
        own = {**kwargs, "static_input_idxs": []}
        sizes = [node.meta["val"].numel() for node in body.graph.nodes if hasattr(node.meta.get("val"), "numel")]
        if max(sizes, default=0) <= MOST_ON_ONE_THREAD:
            options = {"cpp.threads": 1, **options}
        lowered = lower_graph(body, inputs, own, f"{name}.body", Phase.STEP, frozenset(), options)
    if isinstance(lowered, LoweredForSizes):
        raise LoweringError("Control flow inside a graph has no kernel graph where sizes change.", construct=name)
    records.append(lowered.record)
    return lowered.program


def _as_lowered(
    program: Program,
    phase: Phase,
    visible: frozenset[int],
    start: float,
    record: ProgramFile | None,
    *,
    symbolic: bool = False,
) -> Lowered | LoweredForSizes:
    """A program, just lowered or as it was kept; kept ones are as before kernels of our own are joined."""
    if phase is Phase.FORWARD:
        program = _track_saved(program, visible)
    if symbolic or (record is not None and record.symbols):
        return LoweredForSizes(SymbolicProgram(program), phase, visible, time.perf_counter() - start, record)
    program = registry.fuse(program)
    return Lowered(program, phase, visible, time.perf_counter() - start, record)


def _track_saved(program: Program, visible: frozenset[int]) -> Program:
    """Let autograd see whether inputs that are saved as views, as a batch of rows, change before the backward pass."""
    saved = {value.name for at, value in enumerate(program.outputs) if at not in visible and isinstance(value, Value)}
    unchanged = {*program.inputs} - program.mutated  # within the call
    views = {
        name: replace(view, is_tracked=name in saved and view.base in unchanged) for name, view in program.views.items()
    }
    return replace(program, views=views)


def _named(program: Program, name: str) -> Program:
    return replace(program, graph=replace(program.graph, name=name))


def aligned_inputs(inputs: Sequence[Any]) -> frozenset[int]:
    """Positions of the inputs that Inductor's kernels take to be aligned, because these examples are.

    Nothing makes later calls pass such inputs. Inductor's own wrapper copies those that are not; so must ours.
    """
    return frozenset(
        position
        for position, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and should_assume_input_aligned(value)
    )


def forget_attempt() -> None:
    """Let Inductor compile a graph again: it notes the strides of the results with Dynamo, once."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides.clear()


def _told_strides() -> list[Any]:
    """The strides of the results that Inductor has told AOT autograd."""
    context = torch._guards.TracingContext.try_get()
    return list(context.output_strides or ()) if context is not None else []


def _tell_strides(strides: Iterable[Any]) -> None:
    """Tell them in its stead."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides.extend(strides)


def phase_of(kwargs: dict[str, Any]) -> Phase:
    """Return what part of a model Inductor is asked to compile."""
    if kwargs.get("is_backward"):
        return Phase.BACKWARD
    return Phase.INFERENCE if kwargs.get("is_inference") else Phase.FORWARD


def _outputs(graph: torch.fx.GraphModule) -> Sequence[Any]:
    return next(iter(reversed(graph.graph.nodes))).args[0]  # type: ignore[return-value]


def _visible_outputs(graph: torch.fx.GraphModule) -> Sequence[int]:
    """Positions of the outputs that reach the user, as AOT autograd notes them; without the note, all."""
    node = next(iter(reversed(graph.graph.nodes)))
    return node.meta.get("user_visible_output_idxs") or range(len(node.args[0]))  # type: ignore[arg-type]
