"""Run the user's step once on fake tensors, and record it.

**Steps**
1. Make all state, gradients and arguments fake; put scalars for the numbers.
2. Run the function; detach its results and what it stored; add copies for optimizer state it replaced, for gradients it
   left, and for what it assigned to ``.data``.
"""

from __future__ import annotations

import contextlib
import sys
from bdb import BdbQuit
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from millstream._torch.autograd.backward_hooks import backward_watched
from millstream._torch.autograd.checkpointing import RandomRecords, checkpoints_reuse_randoms
from millstream._torch.distributed.fully_sharded import any_sharded
from millstream._torch.recurrence import plain_recurrence
from millstream._torch.scaler import steps_are_masked
from millstream._torch.tensors import FakeTensor, FakeTensorMode
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
from millstream.capture.effects.expressions import Expression
from millstream.capture.lines import (
    here,
    is_of_call,
)
from millstream.capture.record.location import MISSING
from millstream.capture.record.recorded_code import make_recorder, until_operators
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.contents import is_container, without_cache
from millstream.capture.state.lift import (
    device_of,
    find_unlifted,
    why_not_lifted,
)
from millstream.capture.state.others import stand_for, stand_in_for
from millstream.capture.state.snapshot import StateSnapshot
from millstream.capture.trace.branches.flags import StateFlags
from millstream.capture.trace.branches.value_branches import Ways
from millstream.capture.trace.numbers import scalar_methods  # noqa: F401  by which scalars have operators
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.numbers.scalars import is_scalar
from millstream.capture.trace.numbers.sizes import TracedSizes
from millstream.capture.trace.numbers.users_numbers import UsersNumbers, give_back
from millstream.capture.trace.outcome.changes import Changes
from millstream.capture.trace.outcome.traced_tensors import SIDE_EFFECT_REMEDY, Leaving, check_left
from millstream.capture.trace.patches.averages import averages_take_first
from millstream.capture.trace.patches.caches import CachesUnfilled
from millstream.capture.trace.patches.ddp import TracedSession, reads_of_wrappers
from millstream.capture.trace.patches.finalizers import finalizers_apart
from millstream.capture.trace.patches.number_conversions import Conversions, can_be_seen
from millstream.capture.trace.patches.numbers import json_takes_scalars, math_takes_scalars
from millstream.capture.trace.patches.optimizer_steps import optimizers_watched
from millstream.capture.trace.patches.optimizers import (
    schedulers_are_recorded,
    traceable,
)
from millstream.capture.trace.patches.randomness import RandomState, draws_recorded
from millstream.capture.trace.per_call.clocks import Clocks
from millstream.capture.trace.per_call.draws import Draws
from millstream.capture.trace.per_call.stand_ins import StandIns
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder as EffectsRecorder
from millstream.capture.trace.recorded_effects.printed import outputs_recorded
from millstream.capture.trace.refusing.refused_code import RefusedCode
from millstream.capture.trace.refusing.step_failures import StepFailures, not_recorded
from millstream.capture.trace.request import (
    Converted,
    FoundLate,
    NoGraph,
    Request,
    StateMissing,
)
from millstream.capture.trace.twins import Twins, fake_of, real_of
from millstream.capture.trace.watches.function_watch import FunctionWatch
from millstream.capture.trace.watches.given_tensors import ForeignTensor
from millstream.capture.trace.watches.operator_watch import OperatorWatch
from millstream.capture.trace.watches.step_events import WANTED, StepEvents
from millstream.capture.trace.watches.traced_switches import SwitchWatch
from millstream.errors import CaptureError, DataParallelError, without_frames
from millstream.locks import TRACING, unknown_before
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


@dataclass(repr=False)  # which would show all that the trace holds, and is asked after that is gone
class OneWay:
    """A trace of one way through the step; where it branches on a tensor's value there are others.

    The members that are for others are described by ``TracedWay``.
    """

    request: Request
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    questions: Questions = field(init=False)
    stepped: list[Optimizer] = field(default_factory=list)
    numbers: UsersNumbers = field(init=False)
    code: RefusedCode = field(init=False)
    looked_at: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    graded: set[int] = field(default_factory=set)
    exchanges: list[Any] = field(default_factory=list)
    sizes: TracedSizes | None = None
    failures: StepFailures = field(init=False)
    events: StepEvents = field(init=False)
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
    has_text: bool = False  # whether other ways have text with values in it
    others: list[OneWay] = field(default_factory=list)  # that have traced the other ways of branches

    def __post_init__(self) -> None:
        self.unlifted = find_unlifted(self.request.found)
        self.questions = Questions(self._new_input, self._new_array)
        self.questions.texts.style = self.request.style
        self.numbers = UsersNumbers(self.request, self.questions)
        self.failures = StepFailures(self.questions, self.numbers)
        self.recorder = EffectsRecorder(self.questions, self._is_users, self._note_writes)
        self.questions.check, self.questions.branch = self.recorder.check, self.recorder.branch
        request = self.request
        is_alone = request.replica is None and not any_sharded()  # as branches that communicate are not merged
        is_on = not request.dimensions and is_alone and not is_off("branches")
        self.ways = Ways(request.ways, is_on=is_on)
        self.ways.count_effects = lambda: len(self.recorder.program)
        self.flags = StateFlags(request.state, request.unsteady, request.waits_for_flags)
        self.recorder.choose = self._choose
        self.record = make_recorder(request.function, request.arguments, WANTED)
        code = self.code = RefusedCode(request, self.record, self.questions, self.failures.report)
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
        self.draws = Draws(self.questions, self.recorder, device, request.drawn, self.failures.note, seems_before)
        self.clocks = Clocks(self.recorder, code.on_impure)
        self.stand_ins = StandIns(self.draws.stand_in, self.clocks.stand_in)
        self.events = self.record.watch = StepEvents(
            request, self.record, self.numbers, code, self.stand_ins, self.switches, self.failures
        )

    def trace(self) -> fx.GraphModule:
        """Run the step and return its graph; what it read, left and asked is in the members.

        Raises:
            CaptureError: It cannot be captured.
            NoGraph: There is no graph for the request now.
        """
        request = self.request
        state = [entry.tensor for entry in request.state]
        before = [gradient.before for gradient in request.gradients if gradient.before is not None]
        self.graded = {id(each) for each in request.arguments if each.is_leaf and each.grad is not None}
        random_state = self.events.random_state = RandomState()
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
                self.snapshot = self.events.snapshot = StateSnapshot(request.found, self.record)
                for number in request.numbers:
                    if number.is_users:
                        self.snapshot.note_number(number.location)
                self.changes = self.events.changes = Changes(
                    request, self.questions, self.recorder, self.snapshot, self.record, self.numbers
                )
                self.leaving = Leaving(request, self.recorder, self.record, self.failures.report)
                cached = request.found.cached
                caches = self.events.caches = CachesUnfilled(
                    cached, lambda name: self.failures.report(StateMissing(f"{name}'s cache", here()))
                )
                with (
                    reads_of_wrappers(self.wrapper_reads),
                    optimizers_watched(
                        request.found, self.record, self.stepped, spared, self.failures.report
                    ) as meet_optimizer,
                    schedulers_are_recorded(self.recorder, self.failures.note, meet_optimizer),
                    draws_recorded(self.draws, self.failures.note),
                    caches if cached else contextlib.nullcontext(),
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
            raise self.failures.of(error) from error
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
            self.recorder.given = self.record.given = frozenset(containers_in(given, self.request.opened)).difference(
                self._held()
            )
            self.record.again.update(without_cache(cache).__code__ for cache in self.request.found.cached)
            self.events.begin()
            converting = self.conversions.seen(self.kind) if self.request.converts else contextlib.nullcontext()
            with self.clocks.recorded(), converting, self.record.recording():
                if self.record.failure:  # nothing could be undone
                    raise not_recorded(self.record.failure)
                result = self.request.function(*args, **kwargs)
            self.record.look_into(containers_in([result], self.request.opened))
            self.questions.return_borrowed()
            if self.record.failure:
                raise not_recorded(self.record.failure)
            self.changes.note_unread()
            self._check_arguments(given, structure)
            return result

        def body() -> Sequence[Tensor]:
            self.new_inputs = NewInputs(self.mode, len(inputs) - len(self.request.arguments))
            functions = FunctionWatch(
                self.failures.note,
                self.twins,
                {id(entry.tensor) for entry in self.request.state},
                self.recorder,
                self.sizes,
                self.kind,
                self.unlifted,
                self._on_unlifted,
            )
            functions.asked_values.branches = self.ways.lines
            functions.flows.draws_by_generator = self.request.draws_by_generator
            with (
                OperatorWatch(
                    self.failures.note,
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
                    self.failures.report,
                    self.request.replica,
                    [(gradient.name, gradient.parameter) for gradient in self.request.gradients],
                )
                self.exchanges = session.exchanges
                with (
                    self.recorder.active(),
                    outputs_recorded(self.recorder) as self.events.record_output,
                    session.active(),
                ):
                    result = run_step()
                self.failures.raise_first()
                self.looked_at, self.asked = {*functions.looked_at}, {*functions.asked}
                with torch.no_grad():
                    self.leaving.check_attributes()
                    self.leaving.keep_data()
                    stored = self.changes.keep(self.leaving.copies)
                    # its gradient is not there while it is traced
                    check_left(self.request, reads_gradient=not self.graded.isdisjoint(self.asked))
                    functions.arrays.check_unchanged()
                    self.leaving.keep_gradients()
                    results = self.leaving.take_outputs(result, stored)
                    self.leaving.copy_back()
                    return [*results, *self.ways.values]

        try:
            with pretend_compiling():
                return trace_aten(body, inputs)
        except Exception:
            self.failures.raise_first()
            raise

    def with_others(self) -> list[OneWay]:
        """It, and those that have traced other ways."""
        return [self, *(each for other in self.others for each in other.with_others())]

    def forget(self) -> None:
        """Drop all it has: methods given to what watches would keep the arguments until the next collection."""
        questions = self.questions
        for part in (self.code, self.numbers, self.events, self.failures, self):
            vars(part).clear()
        give_back(questions)

    def _choose(self, value: Tensor) -> bool | None:
        """The outcome of a branch with which the trace goes on; ``None`` where it cannot."""
        outcome = None if is_off("flags") else self.flags.outcome(value)
        return self.ways.take(value) if outcome is None else outcome

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

    def check_conversions(self, error: Exception | None = None) -> None:
        """Trace again where numbers of the graph would be better than the plain ones that conversions have given."""
        if self.request.converts is None and self.questions.num_converted and can_be_seen():
            if error is not None:  # whose frames would keep functions that the step has made, with its arguments
                without_frames(error)
            raise Converted from None

    def _new_input(self, _: Expression, device: torch.device, dtype: torch.dtype) -> Tensor:
        return self.new_inputs.add(dtype, device)

    def _new_array(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.new_inputs.add(dtype, device, shape)

    def _before(self, number: Any) -> Any:
        """Return what was where the step has put ``number``; asked by other threads."""
        return next((change.before for change in self.snapshot.changes() if change.after is number), MISSING)

    def _on_unlifted(self, tensor: Tensor) -> NoReturn:
        """Stop at a tensor that was found and cannot be lifted: the step does use it."""
        self.failures.report(ForeignTensor(tensor, here()))

    def _refusal_of(self, tensor: Tensor, where: str) -> Exception | None:
        """Return what is to be raised where the step uses a tensor that cannot be lifted; ``None`` for others."""
        name, _ = self.unlifted.get(id(tensor), ("a tensor", tensor))
        return StateMissing(name) if is_lazy(tensor) else why_not_lifted(name, tensor, where)

    def _note_writes(self) -> None:
        self.changes.note_writes()

    def _is_users(self, container: Any) -> bool:
        """Return whether a container is the user's, and not a copy that the function was given."""
        is_given = id(container) in self.record.given
        return is_container(container) and not is_given and self.record.seems_before(container)
