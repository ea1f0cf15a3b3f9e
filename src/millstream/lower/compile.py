"""torch FX graph → programs, through TorchInductor. The only place that calls Inductor's compiler.

AOT autograd (decompositions, functionalization, the split into forward and backward), Inductor's passes, fusion and
code generation run unchanged; only the last step, the wrapper, is ours. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch._inductor
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table

from millstream import progress
from millstream._torch.compiler.symbols import is_symbolic
from millstream._torch.recurrence import plain_recurrence
from millstream._torch.seeded_randoms import draws_by_generator
from millstream._torch.tensors import without_autocast
from millstream._torch.tracing import compiled_with_loops, traces_unnoticed
from millstream._torch.workarounds import is_off, left_out
from millstream.errors import ArgumentError, CaptureError, LoweringError, MillstreamError, MisreadError, did_you_mean
from millstream.kernels import registry
from millstream.lower import workarounds
from millstream.lower.alternatives.variants import Choosing, Pointer, may_try, take_options, vary
from millstream.lower.bodies import has_control_flow
from millstream.lower.failures import other_tries
from millstream.lower.inductor import branch_fusion
from millstream.lower.inductor.checks_first import check_classes
from millstream.lower.inductor.probe import ask_early
from millstream.lower.inductor.randoms import random_decompositions
from millstream.lower.inductor.shortcuts import no_collections, values_kept
from millstream.lower.kept import FileContent, ProgramFile, open_record
from millstream.lower.lower_graph import (
    Lowered,
    LoweredForSizes,
    Phase,
    forget_attempt,
    from_disk,
    lower_graph,
    phase_of,
)
from millstream.lower.pass_list import check_names
from millstream.lower.plain import plain_forward
from millstream.lower.segmented.segments import Segments, cut, has_collectives
from millstream.lower.segmented.updates import updates_of
from millstream.lower.turns import LOOP
from millstream.passes.micro_batches import split_batch
from millstream.passes.new_values import give_new_values
from millstream.passes.pure_bodies import make_bodies_pure
from millstream.passes.rolling import TurnBody, Turns, roll_loops
from millstream.passes.seeded_bodies import seed_bodies
from millstream.signals import signals_wait

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


_log = logging.getLogger("millstream.passes")

_OWN_OPTIONS = ("own_kernels", "alternatives", "reproducible", "joint_branches")
_OF_STEPS = "micro_batches"  # which has made it an option


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
        values_kept(),
        plain_recurrence(),
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
    known = frozenset({*torch._inductor.list_options(), *_OWN_OPTIONS, _OF_STEPS})
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


def compile_graph(  # noqa: C901, PLR0913, PLR0915  all but the first four by name, each with a default
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
    begin_elsewhere: Callable[[ProgramFile], None] | None = None,
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
            ``reproducible``, ``joint_branches``; and into how many ``micro_batches`` a step is split.
        step_state: For a whole training step: positions of the inputs whose memory stays the same between calls.
        freeze: Without gradients, fold the parameters that are attributes of the graph.
        cutting: What is done with a graph that has collectives, instead of ``finish``.
        tries_now: Whether a step on disk is of use only with what came of its alternatives.
        begin_elsewhere: Called with the record of a step that is not on disk; where it raises, the step is not lowered.

    Returns:
        A callable on the flat inputs that returns the flat outputs.
    """
    options = dict(options or {})
    off, is_fixed = take_options(options)
    off += [] if options.pop("own_kernels", True) else [registry.SWITCH]
    off += [] if options.pop("joint_branches", True) else [branch_fusion.SWITCH]
    pieces = options.pop(_OF_STEPS, 1)
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
    loops: list[Turns] = []  # that nodes of the graph stand for

    @signals_wait(interrupts_wait=False)  # the backward pass is lowered when it is needed, by then outside of Dynamo
    @no_collections()
    @workarounds.without(off)
    @workarounds.lowering()
    def inner(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        phase = Phase.STEP if step_state is not None else phase_of(kwargs)
        static = frozenset(kwargs.get("static_input_idxs") or ()) if step_state is None else step_state
        if pieces > 1 and phase is Phase.STEP:
            graph = _in_pieces(graph, pieces, static, len(example_inputs) - num_inputs)
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
            lower = partial(
                _lower_with, loops, kwargs=kwargs, name=f"{name}.{phase}", phase=phase, static=static, options=settings
            )
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
        except Exception as error:  # whatever private Inductor code raises: plain Inductor is always possible
            if loops and not isinstance(error, MisreadError):
                raise LoweringError(f"It cannot be lowered with {loops[0]} as one.", construct=LOOP) from error
            return _run_otherwise(error, graph, example_inputs, kwargs, options, refuse)

    with surroundings():
        start = time.perf_counter()
        progress.phase("looking on disk")
        facts = {"step": step_state, **({"reproducible": True} if is_fixed else {})}
        facts |= {"micro_batches": pieces} if pieces > 1 else {}
        step = open_record(gm, inputs, facts, {}) if step_state is not None else None
        is_untried = tries_now and may_try(is_fixed=is_fixed) and step is not None and step.noted_choice() is None
        found = _look_up(step, begin_elsewhere, is_untried=is_untried)
        if step is not None and found is not None:
            run = finish(from_disk(found, step, f"{name}.{Phase.STEP}", start, is_fixed=is_fixed))
            return lambda *inputs: run([*found.added, *inputs])
        progress.phase("preparing the graph")
        workarounds.mend_captured(gm)
        make_bodies_pure(gm)
        if step_state is None and not draws_by_generator(options):
            seed_bodies(gm)
        table = workarounds.decompose({**select_decomp_table(), **random_decompositions()})
        original = copy.deepcopy(gm.graph)

        def trace(without: dict[str, Any]) -> Any:
            if loops:  # lowered with them in vain
                gm.graph = copy.deepcopy(original)
                loops.clear()
            if step_state is not None and pieces == 1 and not is_symbolic(inputs):
                is_another = give_new_values(gm)
                loops.extend(roll_loops(gm, options))
                if is_another and not loops:
                    gm.graph = copy.deepcopy(original)
                for body in dict.fromkeys(turns.body for turns in loops):
                    _decompose(body, table)
            flows = compiled_with_loops(inputs) if has_control_flow(gm) else contextlib.nullcontext()
            with inductor_config.patch(without), flows:
                return compile_fx(gm, list(inputs), inner, decompositions=table)  # type: ignore[arg-type]

        try:
            return _try_in_turn(trace)  # type: ignore[no-any-return]
        except Exception as error:  # of passes over the graph of forward and backward: likewise
            if isinstance(error, MillstreamError | TorchDynamoException) and not isinstance(error, LoweringError):
                raise
            refuse(error, "as plain Python")
            gm.graph = original
            return gm.forward


def _lower_with(_loops: list[Turns], *args: Any, **kwargs: Any) -> Lowered | LoweredForSizes:
    """Lower a graph, now or later, that has nodes for these loops."""
    return lower_graph(*args, **kwargs)


def _decompose(body: TurnBody, table: Any) -> None:
    """Let a turn of a loop be what AOT autograd makes of it."""
    found: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: Sequence[Any], **_: Any) -> Any:
        found.append(torch.fx.GraphModule(graph, copy.deepcopy(graph.graph)))
        return _boxed(list)

    inputs = [node.meta["val"] for node in body.graph.graph.find_nodes(op="placeholder")]
    compile_fx(body.graph, inputs, keep, decompositions=table)  # type: ignore[arg-type]
    has_more = any(graph.graph.find_nodes(op="get_attr") for graph in found)
    if has_more or [len(graph.graph.find_nodes(op="placeholder")) for graph in found] != [len(inputs)]:
        raise LoweringError("AOT autograd has changed what a turn of a loop is given.", construct=LOOP)
    body.graph = found[0]


def _in_pieces(gm: torch.fx.GraphModule, pieces: int, static: frozenset[int], added: int) -> torch.fx.GraphModule:
    """Split a step's batch; ``added`` tensors, which the step has made, are passed before its inputs."""
    if has_collectives(gm.graph):
        raise CaptureError(
            "The batch of a step that exchanges gradients with other processes is not divided.",
            remedy="Leave out micro_batches=.",
        )
    return split_batch(gm, pieces, {*range(added), *(added + place for place in static)})


def _look_up(
    step: ProgramFile | None, begin_elsewhere: Callable[[ProgramFile], None] | None, *, is_untried: bool
) -> FileContent | None:
    """The program of a step, if it is on disk."""
    if step is None:
        return None
    found = None if is_untried else step.load()
    if found is None and begin_elsewhere is not None:
        begin_elsewhere(step)
    return found


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
            forget_attempt()
            error = getattr(other, "inner_exception", other)
    refuse(error, "as plain Python")
    return _boxed(plain_forward(graph))


def _causes_of(error: BaseException) -> str:
    """What led to an error, the last cause first."""
    found = []
    while (cause := error.__cause__) is not None:
        error = cause
        found.append(f"{type(error).__name__}: {error}")
    return " From ".join(reversed(found))


def _try_in_turn(attempt: Callable[[dict[str, Any]], Any]) -> Any:
    """Compile, and where that fails once more without what failed; the first error counts."""
    try:
        return attempt({})
    except Exception as error:  # noqa: BLE001  raised again where nothing else helps
        forget_attempt()
        first = getattr(error, "inner_exception", error)
        if isinstance(first, LoweringError) and first.construct == LOOP and not is_off(roll_loops.name):
            _log.info("Iterations of loops are lowered one by one. %s %s", first, _causes_of(first))
            with workarounds.without([roll_loops.name]):
                return _try_in_turn(attempt)
        for without in other_tries(first):
            try:
                return attempt(without)
            except Exception:  # noqa: BLE001  as the first, which is told
                forget_attempt()
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
        lowered = lower_graph(segment.graph, inputs, own, f"{name}.{number}", phase, positions, options)
        forget_attempt()
        yield replace(lowered, visible=segment.results)


def _boxed(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """Mark a callable on a list of inputs as one that may empty the list, so that activations can be freed early."""

    def call(inputs: list[Any]) -> Sequence[Any]:
        return run(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
