"""torch FX graph → programs, through TorchInductor. The only place that calls Inductor's compiler.

AOT autograd (decompositions, functionalization, the split into forward and backward), Inductor's passes, fusion and
code generation run unchanged; only the last step, the wrapper, is ours. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
import torch._inductor
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import should_assume_input_aligned
from torch.utils._pytree import tree_leaves

from millstream import progress
from millstream._torch.compiler.symbols import is_symbolic
from millstream._torch.tensors import without_autocast
from millstream._torch.tracing import compiled_with_loops, traces_unnoticed
from millstream._torch.workarounds import left_out
from millstream.errors import ArgumentError, LoweringError, MillstreamError, MisreadError, did_you_mean
from millstream.kernels import registry
from millstream.kernels.launches import TritonLaunch, compiling
from millstream.lower import workarounds
from millstream.lower.alternatives.table import options_of, rewrite_for
from millstream.lower.alternatives.variants import Choosing, Pointer, Variants, find_choice, may_try, take_options, vary
from millstream.lower.bodies import has_control_flow, take_control_flow
from millstream.lower.failures import other_tries
from millstream.lower.inductor.accesses import check_values, noting
from millstream.lower.inductor.checks_first import check_classes, checks_first
from millstream.lower.inductor.equal_kernels import equal_kernels
from millstream.lower.inductor.fx_wrapper import collect_wrappers
from millstream.lower.inductor.probe import ask_early
from millstream.lower.inductor.randoms import random_decompositions
from millstream.lower.inductor.shortcuts import no_collections, shortcuts
from millstream.lower.kept import FileContent, ProgramFile, open_record
from millstream.lower.pass_list import check_names
from millstream.lower.plain import plain_forward
from millstream.lower.segments import Segments, cut, has_collectives
from millstream.lower.symbolic import SymbolicProgram
from millstream.lower.translate import translate
from millstream.lower.updates import updates_of
from millstream.lower.views import check_views
from millstream.passes.pure_bodies import make_bodies_pure
from millstream.program import Program, Value
from millstream.schedule.improve import Tried
from millstream.signals import signals_wait


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

#: Turns a lowered program into what PyTorch calls with the list of inputs.
Finish = Callable[[Lowered | LoweredForSizes], Callable[[list[Any]], Sequence[Any]]]


@dataclass(frozen=True)
class Cutting:
    """The treatment of a graph that has collectives.

    Attributes:
        finish: Turns its segments and their programs, none for a segment without kernels, into what PyTorch calls.
        max_cuts: After so many segments, at most, gradients are sent off.
        names: Of the inputs whose memory stays the same.
    """

    finish: Callable[[Segments, Sequence[Lowered | LoweredForSizes | None]], Callable[[list[Any]], Sequence[Any]]]
    max_cuts: int
    names: Sequence[str] = ()


_OWN_OPTIONS = ("own_kernels", "alternatives", "reproducible")


@contextlib.contextmanager
def _surroundings(options: dict[str, Any], off: Sequence[str], *, is_step: bool) -> Iterator[None]:
    """What a graph is lowered in, now or later."""
    with (
        compile_lock,  # in torch 2.11 options are those of all threads
        no_collections(),
        workarounds.without(off),
        traces_unnoticed(),
        torch.no_grad() if is_step else contextlib.nullcontext(),
        # A step's graph has its casts: its operators are not to be cast by what the caller is in.
        without_autocast() if is_step else contextlib.nullcontext(),
        inductor_config.patch(options),
        workarounds.tracing(),
        # A cached AOT artefact would skip the lowering, which is all we are here for.
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


#: Told why a graph could not be lowered, and how it runs instead.
Refuse = Callable[[Exception, str], None]


def check_options(options: dict[str, Any]) -> None:
    """Refuse options that neither Inductor has nor we among them.

    Raises:
        ArgumentError: One is unknown, or has no meaning.
    """
    known = frozenset({*torch._inductor.list_options(), *_OWN_OPTIONS})
    for name in _OWN_OPTIONS:
        if not isinstance(own := options.get(name, True), bool):
            raise ArgumentError(f"The option {name}={own!r} is neither True nor False.")
    for name in options:
        if name not in known:
            raise ArgumentError(
                f"TorchInductor has no option {name!r}; torch._inductor.list_options() lists those it has."
                f"{did_you_mean(name, known)} Options of Millstream, such as streams=2, are arguments of ms.compile "
                'and ms.step; in torch.compile(..., backend="millstream") they stand in options=, too.'
            )


def compile_graph(  # noqa: PLR0913, PLR0915  all but the first four by name, each with a default
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    finish: Finish,
    refuse: Refuse,
    *,
    name: str = "model",
    options: dict[str, Any] | None = None,
    step_state: frozenset[int] | None = None,
    freeze: bool = False,
    cutting: Cutting | None = None,
    tries_now: bool = False,
) -> Callable[..., Any]:
    """Compile a graph, for inference or for forward and backward as autograd demands, into programs.

    Args:
        gm: Graph of torch or aten operators, as Dynamo or make_fx give it. Owned from now on.
        inputs: Example inputs, real or fake, in the order of its placeholders.
        finish: Called once a program, possibly later (the backward pass is lowered when first needed).
        refuse: Called with the reason when a program cannot be had; returning means: continue with plain Inductor, and
            called again where that fails too, with plain Python.
        name: Name of the graph, for people.
        options: Further Inductor options, such as autotuning, and ours: ``own_kernels``, ``alternatives``,
            ``reproducible``.
        step_state: For a whole training step: positions of the inputs whose memory stays the same between calls.
        freeze: Without gradients, fold the parameters that are attributes of the graph.
        cutting: What is done with a graph that has collectives, instead of ``finish``.
        tries_now: Whether a step on disk is of use only with what came of its alternatives.

    Returns:
        A callable on the flat inputs that returns the flat outputs.
    """
    options = dict(options or {})
    off, is_fixed = take_options(options)
    off += [] if options.pop("own_kernels", True) else [registry.SWITCH]
    check_names(left_out())
    num_inputs = len(inputs)  # not they themselves, for later: they are a batch
    ask_early(inputs)

    chosen = {
        "freezing": step_state is None and (freeze or inductor_config.freezing),
        **check_classes(gm.graph, inputs),
        **options,
        "joint_custom_post_pass": workarounds.JointPasses(_user_pass(options)),
    }
    surroundings = partial(_surroundings, chosen, off, is_step=step_state is not None)

    @signals_wait(interrupts_wait=False)  # the backward pass is lowered when it is needed, by then outside of Dynamo
    @no_collections()
    @workarounds.without(off)
    @workarounds.lowering()
    def inner(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        phase = Phase.STEP if step_state is not None else _phase(kwargs)
        static = frozenset(kwargs.get("static_input_idxs") or ()) if step_state is None else step_state
        if step_state is None and not any(node.op.startswith("call") for node in graph.graph.nodes):
            return _boxed(lambda inputs: graph.forward(*inputs))

        def attempt(without: dict[str, Any]) -> Any:
            # Inductor's passes rewrite the graph they are given; another attempt needs it as it was.
            fresh = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
            settings = {**options, **without}
            if cutting is not None and has_collectives(fresh.graph):
                updates = updates_of(fresh, cutting.names, num_inputs - len(static))
                segments = replace(cut(fresh, cutting.max_cuts), updates=updates)
                programs = list(_lower_segments(segments, kwargs, f"{name}.{phase}", phase, static, settings))
                return _boxed(cutting.finish(segments, programs))
            lower = partial(_lower, kwargs=kwargs, name=f"{name}.{phase}", phase=phase, static=static, options=settings)
            lowered = lower(fresh, example_inputs, choosing=Choosing(is_fixed=is_fixed))
            pointer = None
            if step is not None and not without and lowered.record is not None:
                pointer = Pointer(step, lowered.record)
                lowered = replace(lowered, keep_step=pointer.keep_step)
            if may_try(is_fixed=is_fixed) and isinstance(lowered, Lowered) and lowered.may_vary:
                again = vary(graph, lowered.record, lower, surroundings, pointer, is_step=step_state is not None)
                lowered = replace(lowered, variants=again)
            return _boxed(finish(lowered))

        try:
            return _try_in_turn(attempt)
        except Exception as error:  # noqa: BLE001  whatever private Inductor code raises: plain Inductor is always possible
            return _run_otherwise(error, graph, example_inputs, kwargs, options, refuse)

    with surroundings():
        start = time.perf_counter()
        progress.phase("looking on disk")
        facts = {"step": step_state, **({"reproducible": True} if is_fixed else {})}
        step = open_record(gm, inputs, facts, {}) if step_state is not None else None
        is_untried = tries_now and may_try(is_fixed=is_fixed) and step is not None and step.noted_choice() is None
        if step is not None and not is_untried and (found := step.load()) is not None:
            run = finish(_from_disk(found, step, f"{name}.{Phase.STEP}", start, is_fixed=is_fixed))
            return lambda *inputs: run([*found.added, *inputs])
        progress.phase("preparing the graph")
        workarounds.mend_captured(gm)
        make_bodies_pure(gm)
        table = workarounds.decompose({**select_decomp_table(), **random_decompositions()})
        original = copy.deepcopy(gm.graph)

        def trace(without: dict[str, Any]) -> Any:
            loops = compiled_with_loops(inputs) if has_control_flow(gm) else contextlib.nullcontext()
            with inductor_config.patch(without), loops:
                return compile_fx(gm, list(inputs), inner, decompositions=table)  # type: ignore[arg-type]

        try:
            return _try_in_turn(trace)  # type: ignore[no-any-return]
        except Exception as error:  # of passes over the graph of forward and backward: likewise
            if isinstance(error, MillstreamError | TorchDynamoException) and not isinstance(error, LoweringError):
                raise
            refuse(error, "as plain Python")
            gm.graph = original
            return gm.forward


def _run_otherwise(
    error: Exception,
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    options: dict[str, Any],
    refuse: Refuse,
) -> Any:
    """Return what runs a graph that could not be lowered: plain Inductor, or where that fails plain Python."""
    if not isinstance(error, MisreadError):  # plain Inductor would make the same program, and say nothing
        refuse(error, "on plain torch.compile")
        fresh = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
        try:
            with inductor_config.patch({**workarounds.options(), **options}):
                return compile_fx_inner(fresh, inputs, **kwargs)
        except Exception as other:  # noqa: BLE001  as above: plain Python is always possible
            _forget_attempt()
            error = getattr(other, "inner_exception", other)
    refuse(error, "as plain Python")
    return _boxed(plain_forward(graph))


def _try_in_turn(attempt: Callable[[dict[str, Any]], Any]) -> Any:
    """Compile, and where that fails once more without what failed; the first error counts."""
    try:
        return attempt({})
    except Exception as error:  # noqa: BLE001  raised again where nothing else helps
        _forget_attempt()
        first = getattr(error, "inner_exception", error)
        for without in other_tries(first):
            try:
                return attempt(without)
            except Exception:  # noqa: BLE001  as the first, which is told
                _forget_attempt()
        raise first from None


def _user_pass(options: Mapping[str, Any]) -> Any:
    return options.get("joint_custom_post_pass", inductor_config.joint_custom_post_pass)


def _lower_segments(
    segments: Segments,
    kwargs: dict[str, Any],
    name: str,
    phase: Phase,
    static: frozenset[int],
    options: dict[str, Any],
) -> Iterator[Lowered | LoweredForSizes | None]:
    """The program of each segment; the memory of collectives stays where it is, like parameters."""
    num_fixed = segments.num_inputs + segments.num_views
    for number, segment in enumerate(segments.segments):
        if segment.graph is None:
            yield None
            continue
        inputs = [node.meta["val"] for node in segment.graph.graph.find_nodes(op="placeholder")]
        fixed = (place in static or segments.num_inputs <= place < num_fixed for place in segment.inputs)
        positions = frozenset(position for position, is_fixed in enumerate(fixed) if is_fixed)
        own = {**kwargs, "static_input_idxs": sorted(positions)}
        lowered = _lower(segment.graph, inputs, own, f"{name}.{number}", phase, positions, options)
        _forget_attempt()
        yield replace(lowered, visible=segment.results)


def _lower(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    name: str,
    phase: Phase,
    static: frozenset[int],
    options: dict[str, Any],
    choosing: Choosing = Choosing(),  # noqa: B008  which cannot be changed
) -> Lowered | LoweredForSizes:
    start = time.perf_counter()
    check_views(graph)
    visible = frozenset(_visible_outputs(graph) if phase is Phase.FORWARD else range(len(_outputs(graph))))
    facts = {"phase": str(phase), "static": static, "layout_opt": kwargs.get("layout_opt")}
    choice, tried, record = choosing.decide(lambda: open_record(graph, inputs, facts, options))
    symbolic = False
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
                program, wrapper, symbolic = _lower_anew(graph, inputs, kwargs, name, phase, static, settings)
            if record is not None:
                record.save(program, wrapper, _told_strides())
    lowered = _as_lowered(program, phase, visible, start, record, symbolic=symbolic)
    return replace(lowered, tried=tried) if isinstance(lowered, Lowered) else lowered


def _from_disk(
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


def _lower_anew(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    name: str,
    phase: Phase,
    static: frozenset[int],
    options: dict[str, Any],
) -> tuple[Program, torch.fx.GraphModule, bool]:
    """The program of a graph, the wrapper that it was translated from, and whether it is for many sizes."""
    symbolic = is_symbolic(inputs)
    num_outputs = len(_outputs(graph))
    launches: Iterable[TritonLaunch] = ()
    bodies = partial(_lower_body, kwargs=kwargs, name=name, options=options)
    controls = take_control_flow(graph, bodies, is_backward=phase is Phase.BACKWARD)
    if phase is Phase.INFERENCE and not symbolic:  # own kernels are chosen by size
        if registry.rewrite(graph):
            kwargs = {**kwargs, "layout_opt": True}
        launches = registry.find_launches(graph.graph)
    with (
        compiling(launches),
        collect_wrappers(options) as wrappers,
        noting() as notes,
        shortcuts(),
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
    program = translate(wrappers[-1], name=name, static=static, aligned=aligned, symbolic=symbolic)
    del controls  # which the program holds
    if len(program.outputs) != num_outputs:
        raise LoweringError(
            f"The wrapper returns {len(program.outputs)} values instead of {num_outputs}.", construct=name
        )
    return program, wrappers[-1], symbolic


def _lower_body(
    body: torch.fx.GraphModule, inputs: list[Any], *, kwargs: dict[str, Any], name: str, options: dict[str, Any]
) -> Program:
    """The program of a function that an operator of control flow is given."""
    # A context of its own: that of the whole graph knows which of the graph's inputs a backward pass may write over, by
    # their positions, and is told the strides of its results.
    with torch._guards.tracing(torch._guards.TracingContext(detect_fake_mode(inputs))):
        own = {**kwargs, "static_input_idxs": []}
        sizes = [node.meta["val"].numel() for node in body.graph.nodes if hasattr(node.meta.get("val"), "numel")]
        if max(sizes, default=0) <= MOST_ON_ONE_THREAD:
            options = {"cpp.threads": 1, **options}
        lowered = _lower(body, inputs, own, f"{name}.body", Phase.STEP, frozenset(), options)
    if isinstance(lowered, LoweredForSizes):
        raise LoweringError("Control flow inside a graph has no kernel graph where sizes change.", construct=name)
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


def _forget_attempt() -> None:
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


def _phase(kwargs: dict[str, Any]) -> Phase:
    if kwargs.get("is_backward"):
        return Phase.BACKWARD
    return Phase.INFERENCE if kwargs.get("is_inference") else Phase.FORWARD


def _outputs(graph: torch.fx.GraphModule) -> Sequence[Any]:
    return next(iter(reversed(graph.graph.nodes))).args[0]  # type: ignore[return-value]


def _visible_outputs(graph: torch.fx.GraphModule) -> Sequence[int]:
    """Positions of the outputs that reach the user, as AOT autograd notes them; without the note, all."""
    node = next(iter(reversed(graph.graph.nodes)))
    return node.meta.get("user_visible_output_idxs") or range(len(node.args[0]))  # type: ignore[arg-type]


def _boxed(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """Mark a callable on a list of inputs as one that may empty the list, so that activations can be freed early."""

    def call(inputs: list[Any]) -> Sequence[Any]:
        return run(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
