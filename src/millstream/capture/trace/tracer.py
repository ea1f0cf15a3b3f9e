"""Run the user's step once on fake tensors and record it as one flat graph of aten operators.

**Contract**
- The user's tensors, optimizers, modules, ``.grad``, random state and every other Python object found are afterwards
  exactly as before, whether tracing succeeds or fails.
- The graph writes state, numbers and gradients through its inputs and returns the tensors of the result; its results
  share no memory with its inputs or with each other.
- What the graph could not repeat on every call is refused with a ``CaptureError``.

**Steps**
1. Make all state, gradients and arguments fake; put scalars for the numbers.
2. Run the function; detach its results and what it stored; add copies for optimizer state it replaced, for gradients it
   left, and for what it assigned to ``.data``.
3. Clean the graph and drop the inputs it does not use.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from bdb import BdbQuit
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import IOBase
from threading import get_ident
from types import BuiltinFunctionType, FrameType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from millstream._torch.backward_hooks import backward_watched
from millstream._torch.checkpointing import RandomRecords, checkpoints_reuse_randoms
from millstream._torch.compiler.dynamo import compile_lock
from millstream._torch.devices.device_guard import keep_device_guard
from millstream._torch.distributed.fully_sharded import any_sharded
from millstream._torch.hooks import optimizer_steps_seen
from millstream._torch.recurrence import plain_recurrence
from millstream._torch.scaler import is_idle, steps_are_masked
from millstream._torch.tensors import FakeTensor, FakeTensorMode, storage_id
from millstream._torch.tracing import (
    NewInputs,
    fakes_unlogged,
    no_compiled_modules,
    pretend_compiling,
    scripts_as_python,
    trace_aten,
    unchecked_distributions,
)
from millstream._torch.unseen import exchanged
from millstream._torch.workarounds import is_off
from millstream.capture.effects.effect_recorder import EffectRecorder as EffectsRecorder
from millstream.capture.effects.effect_recorder import text_changed
from millstream.capture.effects.printed import outputs_recorded
from millstream.capture.lines import (
    caller_of,
    here,
    is_of_call,
    place_of,
    told,
)
from millstream.capture.record.instructions import why_not
from millstream.capture.record.location import MISSING, Location
from millstream.capture.record.natives import owner_of
from millstream.capture.record.paths import items_of, location_of, path_of
from millstream.capture.record.reads import Kind, Read, Write, is_a
from millstream.capture.record.recorded_code import make_recorder, until_operators
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.contents import is_container, without_cache
from millstream.capture.state.discover import is_unknown, lacks_cache
from millstream.capture.state.executed import CodeWatch, others_may_write
from millstream.capture.state.host_generators import GENERATORS
from millstream.capture.state.impure import ImpureCalls
from millstream.capture.state.lift import (
    check_apart,
    device_of,
    find_unlifted,
    why_not_lifted,
)
from millstream.capture.state.others import stand_for, stand_in_for
from millstream.capture.state.relevant import counts
from millstream.capture.state.snapshot import StateSnapshot, is_type_of_tracing
from millstream.capture.trace.changes import Changes
from millstream.capture.trace.clocks import Clocks
from millstream.capture.trace.draws import Draws
from millstream.capture.trace.flags import StateFlag, StateFlags
from millstream.capture.trace.merged_ways import merge
from millstream.capture.trace.modes import (
    READ_REMEDY,
    VALUE_READERS,
    ForeignTensor,
    FunctionWatch,
    OperatorWatch,
)
from millstream.capture.trace.numbers import scalar_methods  # noqa: F401  by which scalars have operators
from millstream.capture.trace.numbers.known_arrays import writes_array
from millstream.capture.trace.numbers.scalars import GraphScalar, Questions, give_back, is_scalar
from millstream.capture.trace.numbers.sizes import TracedSizes
from millstream.capture.trace.patches.averages import averages_take_first
from millstream.capture.trace.patches.caches import CachesUnfilled
from millstream.capture.trace.patches.ddp import TracedSession, reads_of_wrappers
from millstream.capture.trace.patches.finalizers import finalizers_apart
from millstream.capture.trace.patches.number_conversions import Conversions, can_be_seen
from millstream.capture.trace.patches.numbers import json_takes_scalars, math_takes_scalars
from millstream.capture.trace.patches.optimizers import (
    SparedGradients,
    narrow_counts,
    schedulers_are_recorded,
    traceable,
    widen_counts,
)
from millstream.capture.trace.patches.randomness import RandomState, draws_recorded
from millstream.capture.trace.refused_code import RefusedCode
from millstream.capture.trace.request import (
    Converted,
    Disturbed,
    FirstChange,
    FoundLate,
    NoGraph,
    NotNow,
    NumbersChanged,
    OneShot,
    OtherFlags,
    Request,
    StateMissing,
    Traced,
    TypesCompared,
)
from millstream.capture.trace.stand_ins import StandIns
from millstream.capture.trace.traced_switches import SwitchWatch
from millstream.capture.trace.traced_tensors import Leaving, writes_host
from millstream.capture.trace.twins import Twins, fake_of, real_of
from millstream.capture.trace.unsupported import find_unsupported
from millstream.capture.trace.users_numbers import UsersNumbers
from millstream.capture.trace.value_branches import Ways
from millstream.errors import CaptureError, DataParallelError, without_frames
from millstream.locks import TRACING, unknown_before
from millstream.passes.cleanup import (
    drop_idle_nodes,
    drop_unused_inputs,
    hoist_transfers,
    let_views_copy,
    move_constants,
    subtract_powers_exactly,
    written_inputs,
    written_storages,
)
from millstream.passes.pure_bodies import make_bodies_pure
from millstream.passes.selecting import DifferentWays, results_of
from millstream.room import with_room
from millstream.signals import signals_wait
from millstream.tree.containers import containers_in
from millstream.tree.flatten import tree_flatten
from millstream.tree.spec import (
    PlainValue,
    Reference,
    Structure,
    replace_numbers,
    tree_unflatten,
    walk,
    without_order,
)

_WANTED = (*GENERATORS, IOBase, Optimizer, GradScaler, BuiltinFunctionType, MethodType)
"""Classes of objects that are looked at before the step uses them, and of what may be their methods, or clocks."""

SIDE_EFFECT_REMEDY = "A captured step repeats tensor operations only: move this out of the step."


def trace_step(request: Request) -> Traced:
    """Record the step of ``request``; the caller is ``tracing_alone``.

    Raises:
        CaptureError: It cannot be captured.
        NoGraph: There is no graph for ``request`` now; its class says why.
    """
    tracer = _Tracer(request)
    try:
        traced: Traced = with_room(tracer.trace)
        tracer.check_conversions()
        return traced
    except Exception as error:
        if isinstance(error, CaptureError | OneShot | Disturbed):  # a plain number seems to be another thread's
            tracer.check_conversions(error)
        tracer.make_readable(error)
        raise
    finally:
        for each in tracer.with_others():
            questions = each.questions
            # Their methods, given to what watches, would keep the arguments until the next collection.
            for part in (each.code, each.numbers, each):
                vars(part).clear()
            give_back(questions)


@contextlib.contextmanager
def tracing_alone() -> Iterator[None]:
    """While one thread traces, no other does, nor looks for what to trace; PyTorch's compilers and signals wait.

    The order of the locks is the same everywhere. Handlers of signals run without them: they may wait for a thread that
    waits for one.
    """
    with contextlib.ExitStack() as end, compile_lock(), TRACING.lock:
        end.enter_context(signals_wait(interrupts_wait=True))
        keep_device_guard()
        yield


@dataclass(repr=False)  # which would show all that the trace holds, and is asked after that is gone
class _Tracer:
    request: Request
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    questions: Questions = field(init=False)
    stepped: list[Optimizer] = field(default_factory=list)
    failure: Exception | None = None
    unsupported: dict[int, CaptureError] = field(init=False)  # by id, what was found and must not be used
    numbers: UsersNumbers = field(init=False)
    code: RefusedCode = field(init=False)
    looked_at: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    graded: set[int] = field(default_factory=set)
    exchanges: list[Any] = field(default_factory=list)
    sizes: TracedSizes | None = None
    kind: type[FakeTensor] = field(default_factory=lambda: stand_in_for(get_ident()))
    unlifted: dict[int, tuple[str, Tensor]] = field(init=False)
    record: Recorder = field(init=False)  # of what is read and written
    new_inputs: NewInputs = field(init=False)
    num_results: int = 0  # of the graph; values of branches come after them
    twins: Twins = field(init=False)
    unsettled: Exception | None = None
    conversions: Conversions = field(default_factory=Conversions)
    draws: Draws = field(init=False)
    clocks: Clocks = field(init=False)
    stand_ins: StandIns = field(init=False)
    wrapper_reads: dict[tuple[int, str], nn.Module] = field(default_factory=dict)
    modules: set[int] = field(init=False)  # by id, those that the request has
    has_others: bool = False  # whether other threads may write
    is_asked: bool = False  # whether to look at each instruction, see ``happens``
    watch: CodeWatch = field(init=False)
    has_text: bool = False  # whether other ways have text with values in it
    others: list[_Tracer] = field(default_factory=list)  # that have traced the other ways of branches

    def __post_init__(self) -> None:
        self.unsupported = {id(each): error for each, error in find_unsupported(self.request.found)}
        self.unlifted = find_unlifted(self.request.found)
        self.questions = Questions(self._new_input, self._new_array)
        self.questions.texts.style = self.request.style
        self.numbers = UsersNumbers(self.request, self.questions)
        self.recorder = EffectsRecorder(self.questions, self._is_users, self._note_writes)
        self.questions.check, self.questions.branch = self.recorder.check, self.recorder.branch
        request = self.request
        self.modules = {id(module) for _, root in request.found.modules for module in root.modules()}
        is_alone = request.replica is None and not any_sharded()  # as branches that communicate are not merged
        is_on = not request.dimensions and is_alone and not is_off("branches")
        self.ways = Ways(request.ways, is_on=is_on)
        self.ways.count_effects = lambda: len(self.recorder.program)
        self.flags = StateFlags(request.state, request.unsteady, request.waits_for_flags)
        self.recorder.choose = self._choose
        self.record = make_recorder(request.function, request.arguments, _WANTED)
        self.record.watch = self
        code = self.code = RefusedCode(request, self.record, self.questions, self._report)
        self.watch = CodeWatch(
            self._on_code,
            ImpureCalls(self.record.is_new, code.on_impure, code.on_debugger, lambda _: self.switches.note_set(here())),
            code.has_found,
            code.on_opaque,
            code.on_text,
            code.on_extension,
        )
        self.switches = SwitchWatch(request.settings)
        device = device_of([*(entry.tensor for entry in request.state), *request.arguments])
        self.questions.num_before = len(request.numbers)
        if request.dimensions:
            self.sizes = TracedSizes(
                request.arguments, request.dimensions, self.questions, len(request.numbers), device
            )
            self.mode = self.sizes.mode
            self.questions.num_before += sum(map(len, self.sizes.shapes))
        seems_before = self.record.seems_before
        self.draws = Draws(self.questions, self.recorder, device, request.drawn, self._note_failure, seems_before)
        self.clocks = Clocks(self.recorder, code.on_impure)
        self.stand_ins = StandIns(self.draws.stand_in, self.clocks.stand_in)

    def trace(self) -> Traced:
        try:
            tracer, gm = self._trace_ways()
            traced = self._finished(tracer, gm)
            traced.flags = self._settle_flags(traced)
            return traced
        except CaptureError as error:
            met = [flag for each in self.with_others() for flag in each.flags.met]
            if not self.request.waits_for_flags and any(flag.waits for flag in met):
                raise OtherFlags(needs_waiting=True) from None
            self._run_first(met, error)
            raise

    def _finished(self, tracer: _Tracer, gm: fx.GraphModule) -> Traced:
        try:
            return tracer._finish(gm)
        except (CaptureError, NoGraph):
            raise
        except Exception as error:
            raise self._failure(error) from error

    def _choose(self, value: Tensor) -> bool | None:
        """The outcome of a branch with which the trace goes on; ``None`` where it cannot."""
        outcome = None if is_off("flags") else self.flags.outcome(value)
        return self.ways.take(value) if outcome is None else outcome

    def _settle_flags(self, traced: Traced) -> list[StateFlag]:
        """The flags for whose values the trace holds; stop where it writes one."""
        flags = [flag for each in self.with_others() for flag in each.flags.asked]
        state = zip(traced.state, traced.written, strict=False)
        written = {storage_id(self.request.state[index].tensor) for index, is_written in state if is_written}
        if changed := [flag for flag in flags if flag.storages & written]:
            self._run_first(
                changed, CaptureError(VALUE_READERS["__bool__"], where=changed[0].where, remedy=READ_REMEDY)
            )
            raise OtherFlags(frozenset().union(*(flag.storages for flag in changed)))
        lines = {flag.where for flag in flags if flag.waits}
        traced.effects.waits = sorted({*traced.effects.waits, *lines})
        return flags

    def _run_first(self, flags: Iterable[StateFlag], error: CaptureError) -> None:
        """Have the step run as plain Python first where that may be the last time that flags are what they are."""
        settled = {flag.key for flag in flags}
        if not settled <= self.request.settled:
            self.request.settled |= settled
            raise FirstChange(error) from None

    def with_others(self) -> list[_Tracer]:
        """It, and those that have traced other ways."""
        return [self, *(each for other in self.others for each in other.with_others())]

    def _trace_ways(self) -> tuple[_Tracer, fx.GraphModule]:
        """Record the step, and once more for each branch that it meets, with the other outcome."""
        try:
            gm = self._trace_way()
        except CaptureError as error:
            if not self.ways.lines:
                raise
            raise self.ways.refuse_trace(error) from error
        self.num_results = len(results_of(gm)) - len(self.ways.values)
        tracer, first = self, len(self.request.ways)
        for number in reversed(range(first, len(self.ways.taken))):
            ways = (*self.ways.taken[:number], not self.ways.taken[number])
            other = _Tracer(replace(self.request, ways=ways))
            self.others.append(other)
            try:
                tracer, gm = merge(tracer, gm, *other._trace_ways(), number)
            except DifferentWays as different:
                raise self.ways.refusal(number, str(different)) from None
        return tracer, gm

    def _trace_way(self) -> fx.GraphModule:
        request = self.request
        state = [entry.tensor for entry in request.state]
        before = [gradient.before for gradient in request.gradients if gradient.before is not None]
        self.graded = {id(each) for each in request.arguments if each.is_leaf and each.grad is not None}
        random_state = self.random_state = RandomState()
        fakes = [] if self.sizes is None else [*self.sizes.fakes]
        torch.clear_autocast_cache()  # it holds on to parameters
        try:
            with (
                no_compiled_modules(),
                plain_recurrence(),
                fakes_unlogged(),
                finalizers_apart(self.recorder),
                Twins(
                    [*state, *before, *request.arguments], self.mode, request.host_scalars, fakes, self.kind
                ).active() as own,
                self.mode,
                self.numbers.replaced(),
                self.stand_ins.active(),
                math_takes_scalars(),
                json_takes_scalars(),
                unchecked_distributions(),
                traceable([optimizer for _, optimizer in request.found.optimizers]) as spared,
            ):
                self.snapshot = StateSnapshot(request.found, self.record)
                for number in request.numbers:
                    if number.is_users:
                        self.snapshot.note_number(number.location)
                self.changes = Changes(request, self.questions, self.recorder, self.snapshot, self.record, self.numbers)
                self.leaving = Leaving(request, self.recorder, self.record, self._report)
                cached = request.found.cached
                self.caches = CachesUnfilled(cached, lambda name: self._report(StateMissing(f"{name}'s cache", here())))
                with (
                    reads_of_wrappers(self.wrapper_reads),
                    self._optimizers_watched(spared),
                    self.caches if cached else contextlib.nullcontext(),
                ):
                    inputs = [*state, *self.leaving.grad_buffers, *request.arguments]
                    self.twins = own
                    self.questions.before = TRACING.before = self._before
                    with TRACING.undoing(self._undo):
                        gm = self._record([*map(fake_of, inputs)])
        except (CaptureError, DataParallelError, NoGraph):
            raise
        except ForeignTensor as foreign:
            if not foreign.tensor.is_leaf:
                raise CaptureError(
                    "The step uses a tensor that was computed outside of it, with gradients.",
                    where=foreign.where,
                    remedy="Compute it inside of the step, or detach it.",
                ) from None
            if (refusal := self._refusal_of(foreign.tensor, foreign.where)) is not None:
                raise refusal from None
            raise FoundLate("a tensor", foreign.tensor, foreign.where) from None
        except Exception as error:
            if is_of_call(error) or isinstance(error, BdbQuit):
                raise
            raise self._failure(error) from error
        finally:
            self.unsettled = self.switches.settle()
            used = random_state.what_changed()
            if used or sys.exc_info()[0] is not None:
                random_state.restore()
            torch.clear_autocast_cache()
        if used:
            raise CaptureError(f"The step draws from {used}, which a graph cannot repeat.", remedy=SIDE_EFFECT_REMEDY)
        return gm

    def _undo(self) -> None:
        """Put back what was there before the step; who has come by what it made gets that, too."""
        unknown = {}
        for change in self.snapshot.changes():
            unknown[id(change.after)] = change.before
            stand_for(change.after, change.before)
        self.questions.before = lambda number: unknown.get(id(number), MISSING)
        self.snapshot.restore()
        TRACING.before = unknown_before

    def _record(self, inputs: list[Tensor]) -> fx.GraphModule:
        randoms = RandomRecords()

        def run_step() -> Any:
            numbers = (number.location.get() for number in self.request.numbers if number.is_argument)
            places = (Reference(each) if is_scalar(each) else PlainValue(type(each), each) for each in numbers)
            structure = replace_numbers(self.request.structure, places)
            given = tree_unflatten(structure, self.request.arguments)
            args, kwargs = given
            self.recorder.given = frozenset(containers_in(given, self.request.opened)) - self._held().keys()
            self.record.given = self.recorder.given
            self.record.again.update(without_cache(cache).__code__ for cache in self.request.found.cached)
            self.has_others = others_may_write()
            self.is_asked = self.has_others or bool(self.unsupported)
            converting = self.conversions.seen(self.kind) if self.request.converts else contextlib.nullcontext()
            with self.clocks.recorded(), converting, self.record.recording():
                if self.record.failure:  # nothing could be undone
                    raise _not_recorded(self.record.failure)
                result = self.request.function(*args, **kwargs)
            self.questions.return_borrowed()
            if self.record.failure:
                raise _not_recorded(self.record.failure)
            self.changes.note_unread()
            self._check_arguments(given, structure)
            return result

        def body() -> Sequence[Tensor]:
            self.new_inputs = NewInputs(self.mode, len(inputs) - len(self.request.arguments))
            functions = FunctionWatch(
                self._note_failure,
                self.twins,
                {id(entry.tensor) for entry in self.request.state},
                self.recorder,
                self.sizes,
                self.kind,
                self.unlifted,
                self._on_unlifted,
            )
            functions.branches = self.ways.lines
            with (
                OperatorWatch(
                    self._note_failure,
                    self.twins,
                    functions,
                    randoms,
                    self.numbers.write_down,
                    self.switches.check,
                    self._choose,
                ),
                functions,
                functions.unseen_refused(),
                exchanged(fake_of, real_of, functions, functions.on),
                backward_watched(functions.on),
                until_operators(self.record, FunctionWatch, OperatorWatch),
                averages_take_first(self.recorder),
                checkpoints_reuse_randoms(randoms),
                scripts_as_python(),
                steps_are_masked(),
            ):
                self.leaving.begin(functions.moved)
                functions.looked_at.clear()
                functions.asked.clear()
                session = TracedSession(
                    functions,
                    lambda: [root for _, root in self.request.found.modules],
                    self._report,
                    self.request.replica,
                    [(gradient.name, gradient.parameter) for gradient in self.request.gradients],
                )
                self.exchanges = session.exchanges
                with self.recorder.active(), outputs_recorded(self.recorder) as self.record_output, session.active():
                    result = run_step()
                self._raise_failure()
                self.looked_at, self.asked = {*functions.looked_at}, {*functions.asked}
                with torch.no_grad():
                    self.leaving.check_attributes()
                    self.leaving.keep_data()
                    stored = self.changes.keep(self.leaving.copies)
                    self._check_left()
                    functions.arrays.check_unchanged()
                    self.leaving.keep_gradients()
                    results = self.leaving.take_outputs(result, stored)
                    self.leaving.copy_back()
                    return [*results, *self.ways.values]

        try:
            with pretend_compiling():
                return trace_aten(body, inputs)
        except Exception:
            self._raise_failure()
            raise

    def happens(self, operands: tuple[Any, ...]) -> None:
        """Refuse what must not be used, and see whether another thread has written meanwhile where the step counts."""
        for each in operands if self.unsupported else ():
            if id(each) in self.unsupported:
                self._report(self.unsupported[id(each)])
        if self.has_others:
            self.numbers.take_from_others(self.snapshot)

    def begins(self, frame: FrameType) -> None:
        """Code is about to run."""
        self.watch.begins(frame)

    def calls(self, frame: FrameType, function: Any, arguments: tuple[Any, ...]) -> None:
        """A function is about to be called."""
        for each in (owner_of(function), *arguments):
            if is_a(each, (*GENERATORS, IOBase)) and self.record.seems_before(each):
                self._note_state(each, type(each).__name__)
        self.watch.calls(frame, function, arguments)

    def writes(self, write: Write) -> None:
        """Note what is there before the step writes."""
        self.snapshot.add_written(write)

    def exposes(self, read: Read) -> None:
        """Note what is there before something in C may write; stop at a cache that the request does not have."""
        cache = read.holder
        if isinstance(cache, functools._lru_cache_wrapper) and lacks_cache(cache, self.request.found):
            self._report(FoundLate(f"{cache.__name__}()", cache, here()))
        self.snapshot.add_exposed(read)

    def meets(self, read: Read) -> None:
        """Have things stand in for others before the step finds these; stop at what the request does not have."""
        name = path_of(read, self.record)
        for each in read.held():
            if each is print:
                self.record_output(print)
        if not self.record.was_before(read):
            return
        if read.kind is Kind.TYPE:
            self._note_state(read.holder, name)
        elif not counts(read, self.record):
            return
        elif read.kind is Kind.CONTENTS and isinstance(read.holder, dict | list):
            holder = read.holder
            for key, value in [*(dict.items(holder) if isinstance(holder, dict) else enumerate(holder))]:
                self.stand_ins.make(Location(items_of(holder), key, f"{name}[{key!r}]"), value)
        elif (place := location_of(read, self.record)) is not None:
            self.stand_ins.make(place, read.value)

    def _note_state(self, value: Any, name: str) -> None:
        """Something of the user's is about to be used whose state has to be noted, or which the request must have."""
        if isinstance(value, GENERATORS):
            self.random_state.add(name, value)
        elif isinstance(value, IOBase):
            self.record_output(value)
        elif is_unknown(value, self.request.found):
            self._report(FoundLate(name, value, here()))

    def _is_users(self, container: Any) -> bool:
        """Return whether a container is the user's, and not a copy that the function was given."""
        is_given = id(container) in self.record.given
        return is_container(container) and not is_given and self.record.seems_before(container)

    def asks(self, source: Any, read: Read | None) -> None:
        """Refuse a step that asks an iterator, which would give each item once."""
        self.code.asks(source, read)

    def _on_code(self, frame: FrameType) -> None:
        """Stop before code of the user's that a trace cannot follow."""
        if self.caches.is_for_cache(frame, self.request.found.cached):  # which has no answer yet
            asked = frame.f_locals.values()
            if any(map(is_scalar, asked)):
                self._report(
                    CaptureError(
                        f"The step calls {frame.f_code.co_name}, which has a cache, with a number that changes.",
                        where=here(num_left_out=1),
                        remedy="Call the function without its cache, as in function.__wrapped__(number).",
                    )
                )
            if not any(map(is_type_of_tracing, asked)):  # for which an eager call would bring no answer
                if new := self.changes.numbers_missing():
                    self._report(NumbersChanged(new))
                self._report(StateMissing(f"{frame.f_code.co_name}'s cache", here(num_left_out=1)))
        if (error := self.code.compared_types(frame)) is not None:
            if self.sizes or (self.numbers.scalars and not self.request.is_plain):
                self._report(TypesCompared(error))
            self.draws.forbid(error)
        self.code.check_leaves(frame)

    def _held(self) -> dict[int, Reference]:
        """By id, what stands as it is among the arguments."""
        parts = (part for _, part in walk(self.request.structure, ""))
        return {id(part.target): part for part in parts if isinstance(part, Reference)}

    def _check_arguments(self, given: Any, before: Structure) -> None:
        """Refuse changes of containers among the arguments: the function was given copies of them."""
        structure, leaves = tree_flatten(given, opened=self.request.opened, held=self._held())
        is_same = structure == before or without_order(structure) == without_order(before)
        if not is_same or [*map(id, leaves)] != [*map(id, self.request.arguments)]:
            raise CaptureError(
                "The step changes a container or an object among its arguments, which a graph would not do again.",
                remedy="Return what it would put there.",
            )

    def _failure(self, error: Exception) -> CaptureError:
        if (launched := caller_of(error, "triton")) is not None:
            return CaptureError(
                "The step launches a Triton kernel of its own, which needs tensors with memory.",
                where=launched,
                remedy="Put the launch into a torch.library.custom_op with a register_fake, which is captured.",
            )
        text = f"Tracing failed: {told(error)}"
        has_number = self.questions.readable(text, self.numbers.values) != text
        instead = "use the number there, and not its text" if has_number else "keep it out of the step"
        return CaptureError(
            text,
            where=place_of(error),
            remedy=f"If the line also fails without ms.step, correct it; otherwise {instead}.",
        )

    def check_conversions(self, error: Exception | None = None) -> None:
        """Trace again where numbers of the graph would be better than the plain ones that conversions have given."""
        if self.request.converts is None and self.questions.num_converted and can_be_seen():
            if error is not None:  # whose frames would keep functions that the step has made, with its arguments
                without_frames(error)
            raise Converted from None

    def make_readable(self, error: BaseException | None) -> None:
        """Show numbers in the text of an error, and of its cause, where the tokens are that stand for them."""

        def shown(part: Any) -> Any:
            return self.questions.readable(part, self.numbers.values) if isinstance(part, str) else part

        while error is not None:
            error.args = tuple(map(shown, error.args))
            if isinstance(error, CaptureError):
                error.reason = shown(error.reason)
            error = error.__cause__

    def _note_failure(self, error: Exception) -> None:
        self.failure = self.failure or error

    def _raise_failure(self) -> None:
        """The first refusal counts, also when the user's function caught it and went on."""
        if self.failure is not None:
            raise self.failure
        if self.questions.refused:
            raise self.questions.refused[0]

    def _new_input(self, number: GraphScalar, dtype: torch.dtype) -> Tensor:
        return self.new_inputs.add(dtype, number.device)

    def _new_array(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.new_inputs.add(dtype, device, shape)

    def _before(self, number: Any) -> Any:
        """Return what was where the step has put ``number``; asked by other threads."""
        return next((change.before for change in self.snapshot.changes() if change.after is number), MISSING)

    def _on_unlifted(self, tensor: Tensor) -> NoReturn:
        """Stop at a tensor that was found and cannot be lifted: the step does use it."""
        self._report(ForeignTensor(tensor, here()))

    def _refusal_of(self, tensor: Tensor, where: str) -> Exception | None:
        """Return what is to be raised where the step uses a tensor that cannot be lifted; ``None`` for others."""
        name, _ = self.unlifted.get(id(tensor), ("a tensor", tensor))
        return StateMissing(name) if is_lazy(tensor) else why_not_lifted(name, tensor, where)

    def forwards(self, module: nn.Module) -> None:
        """Stop at a module that the request does not have; refuse any where all have what cannot be captured."""
        if id(None) in self.unsupported:
            self._report(self.unsupported[id(None)])
        if id(module) not in self.modules and not self.record.is_new(module):
            self._report(FoundLate(type(module).__name__, module, ""))

    @contextlib.contextmanager
    def _optimizers_watched(self, spared: list[Tensor]) -> Iterator[None]:
        """Note which optimizers step, with counts in double precision; stop at one that the request does not have.

        Args:
            spared: Parameters whose gradients they leave as they are.
        """
        known = {id(optimizer) for _, optimizer in self.request.found.optimizers}
        ending: dict[int, list[Callable[[], object]]] = {}

        def meet(optimizer: Optimizer) -> None:
            if id(optimizer) not in known and Optimizer.__init__.__code__ in self.record.codes:
                self._report(
                    CaptureError(
                        f"The step makes an optimizer, {type(optimizer).__name__}, in each call.",
                        where=here(),
                        remedy="Make it once, outside of the step.",
                    )
                )
            if id(optimizer) not in known:
                self._report(FoundLate(type(optimizer).__name__, optimizer, ""))

        def on_step(optimizer: Optimizer) -> None:
            meet(optimizer)
            if optimizer not in self.stepped:
                self.stepped.append(optimizer)
            with torch.no_grad():
                counts = widen_counts(optimizer)
            ending[id(optimizer)] = [functools.partial(narrow_counts, counts)]

        @torch.no_grad()
        def on_update(optimizer: Optimizer) -> None:
            own = {id(each) for group in optimizer.param_groups for each in group["params"]}
            gradients = SparedGradients(each for each in spared if id(each) in own)
            ending.setdefault(id(optimizer), []).append(gradients.put_back)

        @torch.no_grad()
        def on_done(optimizer: Optimizer) -> None:
            for end in ending.pop(id(optimizer), ()):
                end()

        with (
            optimizer_steps_seen(on_step, on_update, on_done),
            schedulers_are_recorded(self.recorder, self._note_failure, meet),
            draws_recorded(self.draws, self._note_failure),
        ):
            yield

    def _report(self, error: Exception) -> NoReturn:
        self._note_failure(error)
        raise error

    def _note_writes(self) -> None:
        self.changes.note_writes()

    def _check_left(self) -> None:
        """Refuse what a call would leave unfinished or changed without a graph noticing."""
        for name, scaler in self.request.found.scalers:
            if not is_idle(scaler):
                raise CaptureError(f"The step ends without {name}.update().", remedy="Call it in the same step.")
        for entry in self.request.state:
            if entry.tensor.requires_grad != entry.required_grad:
                raise CaptureError(f"The step leaves {entry.name}.requires_grad changed.", remedy=SIDE_EFFECT_REMEDY)
        if not self.graded.isdisjoint(self.asked):  # which is not there while it is traced
            raise CaptureError(
                "The step reads the gradient of one of its arguments.", remedy="Pass the gradient as an argument, too."
            )
        for argument in self.request.arguments:
            if argument.requires_grad and argument.is_leaf and argument.grad is not None:
                raise CaptureError(
                    "The step leaves a gradient on one of its arguments.",
                    remedy="Use torch.autograd.grad and return the gradient.",
                )

    def _take_arrays(self, gm: fx.GraphModule, numbers: Sequence[fx.Node]) -> None:
        """Have NumPy's arrays where the graph wants them; refuse to write there."""
        inputs = self.questions.inputs
        arrays = {node: index for index, node in enumerate(numbers) if inputs[index].tensor.dim()}
        if any(storage_id(node.meta["val"]) in written_storages(gm) for node in arrays):
            raise writes_array()
        for node in hoist_transfers(gm, [*arrays]):
            inputs[arrays[node]] = replace(inputs[arrays[node]], tensor=node.meta["val"])

    def _finish(self, gm: fx.GraphModule) -> Traced:
        leaving = self.leaving
        assert leaving.structure is not None
        if self.unsettled is not None:
            raise self.unsettled
        values = self.changes.numbers_now()
        arguments = {*map(id, self.request.arguments)}
        for read in self.record.reads:
            is_given = not self.record.given.isdisjoint((id(read.holder), id(read.owner)))
            if not is_given and any(id(each) in arguments for each in read.held()):
                raise CaptureError(
                    f"{path_of(read, self.record)} is passed as an argument, too.",
                    remedy="Pass a clone, or use it by its name only.",
                )
        make_bodies_pure(gm)
        drop_idle_nodes(gm)
        leaving.effects.said = self.recorder.outline, [_constants_of(node, gm) for node in gm.graph.nodes]
        if self.questions.texts.made or self.has_text:
            if (where := self.questions.texts.unshown()) is not None:
                raise text_changed(where)
            leaving.effects.outline = leaving.effects.said
        subtract_powers_exactly(gm)
        move_constants(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        parts = (self.request.state, leaving.grad_buffers, self.questions.inputs, self.request.arguments)
        sizes = [len(part) for part in parts]
        starts = [sum(sizes[:part]) for part in range(4)]
        replaced = [placeholders[index] for index in leaving.replaced]
        transfers = hoist_transfers(gm, [*placeholders[starts[3] :], *replaced])
        self._take_arrays(gm, placeholders[starts[2] : starts[3]])
        written = written_storages(gm)
        targets = written_inputs(gm)
        state = zip(self.request.state, placeholders, strict=False)
        check_apart([(entry.name, entry.tensor) for entry, node in state if node in targets])
        let_views_copy(gm, written)
        is_written = [storage_id(node.meta["val"]) in written for node in placeholders]
        for index in self.request.host_scalars:
            if is_written[index]:
                raise writes_host(self.request.state[index])
        for node in placeholders[: starts[2]]:
            storage = storage_id(node.meta["val"])
            if storage in leaving.stored and storage in written:
                raise CaptureError(
                    f"The step stores in {leaving.stored[storage]} a view of state that it writes.",
                    remedy="Store a clone of it.",
                )
        devices = [transfers.get(node) for node in placeholders]
        kept = drop_unused_inputs(gm)
        read = [(number, index) for number, index in enumerate(leaving.replaced) if index in kept]
        for _, index in read:  # what calls bring comes last
            gm.graph.find_nodes(op="placeholder")[-1].append(placeholders[index])
        kept = [position for position in kept if position not in leaving.replaced]
        gm.recompile()
        gm.meta["exchanges"] = self.exchanges  # which the graph knows by number only
        state, gradients, numbers, arguments = (
            [position - start for position in kept if start <= position < start + size]
            for start, size in zip(starts, sizes, strict=True)
        )
        return Traced(
            gm=gm,
            state=state,
            gradients=gradients,
            numbers=numbers,
            arguments=[
                *((index, devices[starts[3] + index]) for index in arguments),
                *((len(self.request.arguments) + number, devices[index]) for number, index in read),
            ],
            replaced=[*leaving.replaced.items()],
            written=[is_written[position] for position in kept],
            left=leaving.left,
            kept=leaving.kept,
            structure=leaving.structure,
            outputs=leaving.outputs,
            questions=self.questions,
            values=values,
            effects=leaving.effects,
            wrapper_reads=self.wrapper_reads,
            looked_at=self.looked_at,
            asked=self.asked,
            optimizers=self.stepped,
            writes_arguments=any(is_written[starts[3] :]) or any(is_written[index] for index in leaving.replaced),
            sizes=self.sizes,
            num_converted=self.conversions.num_seen,
            record=self.record,
        )


def _not_recorded(why: str) -> Exception:
    """Return what is raised where nobody knows what a step reads.

    For good, or because of what goes on around the call.
    """
    error = CaptureError(
        f"What the step reads could not be recorded: {why}.",
        remedy="Have a C++ compiler and Python's headers (python3-dev) installed, and set no tracer within the step.",
    )
    return error if why_not() else NotNow(error)


def _constants_of(node: fx.Node, gm: fx.GraphModule) -> tuple[str, ...]:
    """An operator and what it is given that no operator made."""
    if node.op == "get_attr" and isinstance(value := getattr(gm, str(node.target), None), Tensor):
        return (str(value.tolist()),)
    given = (part for part in tree_leaves((node.args, node.kwargs)) if not isinstance(part, fx.Node))
    return (str(node.target), *map(str, given))
