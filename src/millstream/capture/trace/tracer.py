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
import dataclasses
import sys
import threading
from bdb import BdbQuit
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType, FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from millstream._torch.backward import backward_watched
from millstream._torch.checkpointing import RandomRecords, checkpoints_reuse_randoms
from millstream._torch.compiler.dynamo import compile_lock
from millstream._torch.devices.device_guard import keep_device_guard
from millstream._torch.hooks import OwnHook
from millstream._torch.scaler import is_idle, steps_are_masked
from millstream._torch.tensors import FakeTensor, FakeTensorMode, is_real, is_same_view, storage_id
from millstream._torch.tracing import (
    failures_unlogged,
    graph_being_traced,
    no_compiled_modules,
    plain_recurrence,
    pretend_compiling,
    scripts_as_python,
    trace_aten,
    unchecked_distributions,
)
from millstream.capture.effects.outputs import outputs_recorded
from millstream.capture.effects.program import COUNTING, Effects, Output, Write
from millstream.capture.effects.recorder import Recorder, open_structure, text_changed
from millstream.capture.effects.values import Always, Nth, holds_token
from millstream.capture.lines import caller_of, here, is_asked_by_user, is_of_call, place_of, stops_in_debugger, told
from millstream.capture.state.contents import without_cache
from millstream.capture.state.discover import Found, discover
from millstream.capture.state.executed import STARTED, CodeWatch, Ran, others_may_write, record_module_reads, stand_in
from millstream.capture.state.lift import TRACING, Lifted, become_fake, check_apart, lift
from millstream.capture.state.location import MISSING, Location
from millstream.capture.state.signature import (
    SCALARS,
    Reference,
    Structure,
    merge_same,
    put_together,
    replace_numbers,
    spread_same,
    take_apart,
)
from millstream.capture.state.snapshot import (
    Change,
    Kind,
    Snapshot,
    is_type_of_tracing,
)
from millstream.capture.step.request import (
    Disturbed,
    FirstChange,
    FoundLate,
    NumbersChanged,
    Request,
    ServesOnce,
    StateMissing,
    Traced,
)
from millstream.capture.trace.modes import ForeignTensor, FunctionWatch, OperatorWatch, fits
from millstream.capture.trace.outputs import check_returned
from millstream.capture.trace.patches.averages import averages_take_first
from millstream.capture.trace.patches.caches import CachesUnfilled
from millstream.capture.trace.patches.data_parallel import TracedSession
from millstream.capture.trace.patches.optimizers import (
    is_number,
    is_schedulers,
    narrow_counts,
    schedulers_are_recorded,
    traceable,
    widen_counts,
)
from millstream.capture.trace.patches.randomness import RandomState, other_generators_refused
from millstream.capture.trace.patches.signals import signals_wait
from millstream.capture.trace.scalars import (
    GraphScalar,
    Questions,
    as_scalar,
    give_back,
    is_scalar,
    is_tensor,
    json_takes_scalars,
    math_takes_scalars,
)
from millstream.capture.trace.sizes import TracedSizes
from millstream.capture.trace.unsupported import check_sources
from millstream.errors import CaptureError, DataParallelError
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

_LIFTED = ("modules", "optimizers", "scalers", "tensors", "cached")
"""What must be known before tracing begins."""

_NOTES = frozenset(
    """
    _opt_called _step_supports_amp_scaling _warned_capturable_if_run_uncaptured grad_scale found_inf
    """.split()
)
"""Attributes of optimizers in which PyTorch notes what does not matter to a graph."""

_OPTIMIZERS = (Kind.OPTIMIZER, Kind.GROUP, Kind.STATE)
"""Where numbers may change: a graph does it again."""

SIDE_EFFECT_REMEDY = "A captured step repeats tensor operations only: move this out of the step."

CALLBACK_REMEDY = "Move this out of the step, or let ms.callback do it, as in ms.callback(losses.append, loss)."


def trace_step(request: Request) -> Traced:
    """Record the step of ``request``; the caller is ``tracing_alone``.

    Raises:
        CaptureError: It cannot be captured.
        StateMissing: An eager call must come first.
        FoundLate: ``request`` lacks an object.
        NumbersChanged: It lacks numbers.
        ServesOnce: The graph would not serve again.
    """
    tracer = _Tracer(request)
    try:
        return tracer.trace()
    except Exception as error:
        tracer.make_readable(error)
        raise
    finally:
        questions = tracer.questions
        vars(tracer).clear()  # its methods, given to what watches, would keep the arguments until the next collection
        give_back(questions)


@contextlib.contextmanager
def tracing_alone() -> Iterator[None]:
    """While one thread traces, no other does, nor looks for what to trace; PyTorch's compilers and signals wait.

    The order of the locks is the same everywhere: a thread that waits for a tensor to be real again may be compiling.
    Handlers of signals run without the locks: they may wait for such a thread.
    """
    with contextlib.ExitStack() as end, compile_lock(), TRACING.lock:
        end.enter_context(signals_wait(interrupts_wait=True))
        keep_device_guard()
        yield


@dataclass
class _Tracer:
    request: Request
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    questions: Questions = field(default_factory=Questions)
    stepped: list[Optimizer] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    effects: Effects = field(default_factory=Effects)
    written: dict[Location, Change] = field(default_factory=dict)
    memory: set[int] = field(default_factory=set)
    moved: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    stored: dict[int, str] = field(default_factory=dict)
    replaced: dict[int, Location] = field(default_factory=dict)
    left: list[bool] = field(default_factory=list)
    structure: Structure | None = None
    failure: Exception | None = None
    ran: Ran = field(default_factory=lambda: Ran(attributes={}))
    numbers: list[Any] = field(default_factory=list)
    users_scalars: dict[int, GraphScalar] = field(default_factory=dict)
    taken: list[Location] = field(default_factory=list)
    left_alone: set[Location] = field(default_factory=set)
    looked_at: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    graded: set[int] = field(default_factory=set)
    exchanges: list[Any] = field(default_factory=list)
    sizes: TracedSizes | None = None
    kind: type[FakeTensor] = FakeTensor

    def __post_init__(self) -> None:
        self.questions.texts.style = self.request.style
        own = {id(container) for _, container in self.request.found.containers}
        self.recorder = Recorder(self.questions, own, self._note_writes)
        request = self.request
        if request.dimensions:
            tensors = (*(entry.tensor for entry in request.state), *request.arguments)
            device = next((tensor.device for tensor in tensors if not tensor.is_cpu), torch.device("cpu"))
            self.sizes = TracedSizes(
                request.arguments, request.dimensions, self.questions, len(request.numbers), device
            )
            self.mode = self.sizes.mode

    def trace(self) -> Traced:
        request = self.request
        state = [entry.tensor for entry in request.state]
        before = [gradient.before for gradient in request.gradients if gradient.before is not None]
        self.graded = {id(each) for each in request.arguments if each.is_leaf and each.grad is not None}
        random_state = self.random_state = RandomState(request.found)
        fakes = [] if self.sizes is None else [*self.sizes.fakes]
        torch.clear_autocast_cache()  # it holds on to parameters
        try:
            with (
                no_compiled_modules(),
                plain_recurrence(),
                failures_unlogged(),
                become_fake([*state, *before, *request.arguments], self.mode, request.mirrored, fakes) as self.kind,
                self.mode,
                self._numbers_replaced() as numbers,
                math_takes_scalars(),
                json_takes_scalars(),
                unchecked_distributions(),
                traceable([optimizer for _, optimizer in request.found.optimizers]),
            ):
                self.snapshot = Snapshot(request.found, self.ran)
                cached = request.found.cached
                self.caches = CachesUnfilled(cached, lambda name: self._report(StateMissing(f"{name}'s cache")))
                with (
                    record_module_reads(self._on_forward, self.ran),
                    self._optimizers_watched(),
                    self.caches if cached else contextlib.nullcontext(),
                ):
                    self.homes = self._make_homes()
                    inputs = [*state, *self.homes, *numbers, *request.arguments]
                    self.questions.before = self._before
                    try:
                        gm = self._record(inputs)
                    finally:
                        unknown = {id(change.after): change.before for change in self.snapshot.changes()}
                        self.questions.before = lambda number: unknown.get(id(number), MISSING)
                        self.snapshot.restore()
        except (
            CaptureError,
            DataParallelError,
            StateMissing,
            FoundLate,
            NumbersChanged,
            FirstChange,
            ServesOnce,
            Disturbed,
        ):
            raise
        except ForeignTensor as foreign:
            if not foreign.tensor.is_leaf:
                raise CaptureError(
                    "The step uses a tensor that was computed outside of it, with gradients.",
                    where=foreign.where,
                    remedy="Compute it inside of the step, or detach it.",
                ) from None
            raise FoundLate("a tensor", foreign.tensor, foreign.where) from None
        except Exception as error:
            if is_of_call(error) or isinstance(error, BdbQuit):
                raise
            raise self._failure(error) from error
        finally:
            used = random_state.what_changed()
            if used or sys.exc_info()[0] is not None:
                random_state.restore()
            torch.clear_autocast_cache()
        if used:
            raise CaptureError(f"The step draws from {used}, which a graph cannot repeat.", remedy=SIDE_EFFECT_REMEDY)
        try:
            return self._finish(gm)
        except (CaptureError, Disturbed):
            raise
        except Exception as error:
            raise self._failure(error) from error

    def _record(self, inputs: list[Tensor]) -> fx.GraphModule:
        randoms = RandomRecords()
        watched = {id(entry.tensor) for entry in self.request.state}

        def run_step() -> Any:
            numbers = (number.location.get() for number in self.request.numbers if number.is_argument)
            structure = replace_numbers(self.request.structure, map(Reference, numbers))
            given = put_together(structure, spread_same(structure, self.request.arguments).__next__)
            args, kwargs = given
            self.recorder.given = frozenset(_containers(given))
            cached = {without_cache(cache).__code__ for cache in self.request.found.cached}
            with CodeWatch(
                self.ran,
                self._on_code,
                self._on_impure,
                cached,
                lambda: self.request.found.opaque,  # of what is found later, too
                self._on_opaque,
                self._on_text,
                lambda frame: self._report(stops_in_debugger(f"{frame.f_code.co_filename}:{frame.f_lineno}")),
                self._take_from_others if others_may_write() else None,
            ):
                if self.ran.codes is None:
                    self._check_sources()
                result = self.request.function(*args, **kwargs)
            self._check_arguments(given, structure)
            return result

        def body() -> Sequence[Tensor]:
            functions = FunctionWatch(self._note_failure, watched, self.recorder, self.sizes, self.kind)
            with (
                OperatorWatch(self._note_failure, functions, randoms, self._write_numbers_down),
                functions,
                functions.from_numpy_refused(),
                backward_watched(functions.around_backward),
                averages_take_first(self.recorder),
                checkpoints_reuse_randoms(randoms),
                scripts_as_python(),
                steps_are_masked(),
            ):
                self.moved, self.memory = functions.moved, set(map(storage_id, self._inputs()))
                counts = widen_counts(optimizer for _, optimizer in self.request.found.optimizers)
                functions.looked_at.clear()
                functions.asked.clear()
                session = TracedSession(
                    lambda: [root for _, root in self.request.found.modules],
                    self._report,
                    self.request.replica,
                    [(gradient.name, gradient.parameter) for gradient in self.request.gradients],
                )
                self.exchanges = session.exchanges
                with self.recorder.active(), outputs_recorded(self.recorder) as self.record_files, session.active():
                    self.record_files(self.request.found.files)
                    result = run_step()
                self._raise_failure()
                self.looked_at, self.asked = {*functions.looked_at}, {*functions.asked}
                with torch.no_grad():
                    narrow_counts(counts, self.stepped)
                    self._keep_data()
                    stored = self._keep_changes()
                    self._check_left()
                    self._keep_gradients()
                    results = self._take_outputs(result, stored)
                    self._copy_back()
                    return results

        try:
            with pretend_compiling():
                return trace_aten(body, inputs)
        except Exception:
            self._raise_failure()
            raise

    def _on_code(self, frame: FrameType, functions: list[FunctionType]) -> None:
        """Before code runs that discovery has not seen look at it, too; stop before code that asks an iterator."""
        request = self.request
        known = request.found
        if self.caches.is_for_cache(frame, known.cached):  # which has no answer yet
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
                changed = [change for change in self.snapshot.changes() if _is_count(change)]
                if new := [change.location for change in changed if not is_scalar(change.before)]:
                    self._report(NumbersChanged(new))
                self._report(StateMissing(f"{frame.f_code.co_name}'s cache"))
        if not functions and frame.f_code not in known.codes:
            functions = [stand_in(frame)]
        late = [(function.__qualname__, function) for function in functions if id(function) not in known.functions]
        if late and is_asked_by_user(frame):
            found = discover([*request.roots, *late])
            if any(len(getattr(found, kind)) != len(getattr(known, kind)) for kind in _LIFTED):
                name, function = late[0]
                self._report(FoundLate(name, function, here()))
            request.roots += late
            request.found = found
            self.snapshot.add(found)
            self.record_files(found.files)
            self.random_state.add(found)
        self._check_sources()

    def _on_impure(self, frame: FrameType, what: str, is_written: bool) -> None:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if is_written:
            does = f"starts {what}" if what in STARTED else f"writes to {what}"
            self._report(
                CaptureError(
                    f"The step {does}, which a graph would not do again.",
                    where=where,
                    remedy="Let ms.callback do it, as in ms.callback(writer.writerow, [loss.item()]).",
                )
            )
        self._report(
            CaptureError(
                f"The step reads {what}, which gives something else each time.",
                where=where,
                remedy="Read it outside of the step, and pass what depends on it as an argument.",
            )
        )

    def _on_opaque(self, frame: FrameType, function: Any) -> None:
        name, owner = self.request.found.opaque[id(function.__self__)]
        what, kind = f"{name}.{function.__name__}()", type(owner).__name__
        self._report(
            CaptureError(
                f"The step calls {what}, and nobody can compare what that {kind} holds.",
                where=f"{frame.f_code.co_filename}:{frame.f_lineno}",
                remedy="Call it outside of the step, take a lock by with, or let ms.callback do it, as in "
                "ms.callback(digest.update, data).",
            )
        )

    def _on_text(self, frame: FrameType) -> None:
        if self.questions.texts.made:
            self._report(text_changed(f"{frame.f_code.co_filename}:{frame.f_lineno}"))

    def _check_sources(self) -> None:
        if self.request.found.sources:
            try:
                check_sources(discover(self.request.roots, Ran(self.ran.codes)))
            except CaptureError as error:
                self._report(error)

    def _check_arguments(self, given: Any, before: Structure) -> None:
        """Refuse changes of containers among the arguments: the function was given copies of them."""
        leaves: list[Tensor] = []
        structure = merge_same(take_apart(given, leaves), leaves)
        if structure != before or [*map(id, leaves)] != [*map(id, self.request.arguments)]:
            raise CaptureError(
                "The step changes a container among its arguments, which a graph would not do again.",
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
        has_number = self.questions.texts.readable(text, self.numbers) != text
        instead = "use the number there, and not its text" if has_number else "keep it out of the step"
        return CaptureError(
            text,
            where=place_of(error),
            remedy=f"If the line also fails without ms.step, correct it; otherwise {instead}.",
        )

    def make_readable(self, error: BaseException | None) -> None:
        """Show numbers in the text of an error, and of its cause, where the tokens are that stand for them."""

        def shown(part: Any) -> Any:
            return self.questions.texts.readable(part, self.numbers) if isinstance(part, str) else part

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

    @contextlib.contextmanager
    def _numbers_replaced(self) -> Iterator[list[Tensor]]:
        """Put graph scalars in the places of the numbers; yields the tensors that they read."""
        numbers = self.request.numbers
        tensors = [torch.empty((), dtype=torch.float64, device=number.device) for number in numbers]
        try:
            for index, (number, tensor) in enumerate(zip(numbers, tensors, strict=True)):
                scalar = GraphScalar(0, tensor, Nth(index), self.questions, is_users=number.is_users)
                if number.is_users:
                    self.users_scalars[index] = scalar
                with COUNTING.lock:
                    scalar.value = number.location.get()  # and at once, as other threads may write there
                    number.location.set(scalar)
                self.numbers.append(scalar.value)
            yield tensors
        finally:
            for number, value in zip(numbers, self.numbers, strict=False):
                with COUNTING.lock:
                    if is_scalar(number.location.get()):  # and not what another thread has put there
                        number.location.set(value)

    def _take_from_others(self) -> None:
        """Where another thread has put a number in the place of one that the step counts on, count on that one.

        Asked all the time: what the step adds to a plain number would be taken for the other thread's, too.
        """
        for index, scalar in self.users_scalars.items():
            location = self.request.numbers[index].location
            now = location.get()
            if is_scalar(now) or location in self.left_alone or not is_number(now):
                continue
            if any(change.location == location for change in self.snapshot.others()):
                with COUNTING.lock:
                    self.numbers[index] = scalar.value = location.get()
                    location.set(scalar)
                self.taken.append(location)
            else:
                self.left_alone.add(location)

    def _before(self, number: Any) -> Any:
        """What was where the step has put ``number``; asked by other threads."""
        return next((change.before for change in self.snapshot.changes() if change.after is number), MISSING)

    def _write_numbers_down(self) -> None:
        """Let the graph depend on the user's numbers as they are."""
        for scalar in self.users_scalars.values():
            scalar.plain()

    def _on_forward(self, module: nn.Module) -> None:
        """Stop at a module that the request does not have."""
        own = (*module._parameters.values(), *module._buffers.values())
        if any(tensor is not None and is_real(tensor) for tensor in own):
            self._report(FoundLate(type(module).__name__, module, ""))

    @contextlib.contextmanager
    def _optimizers_watched(self) -> Iterator[None]:
        """Note which optimizers step; stop at one that the request does not have."""
        known = {id(optimizer) for _, optimizer in self.request.found.optimizers}

        thread = threading.get_ident()

        def meet(optimizer: Optimizer) -> None:
            if id(optimizer) not in known and Optimizer.__init__.__code__ in (self.ran.codes or ()):
                self._report(
                    CaptureError(
                        f"The step makes an optimizer, {type(optimizer).__name__}, in each call.",
                        where=here(),
                        remedy="Make it once, outside of the step.",
                    )
                )
            if id(optimizer) not in known:
                self._report(FoundLate(type(optimizer).__name__, optimizer, ""))

        def on_step(optimizer: Optimizer, *_: Any) -> None:
            if threading.get_ident() != thread:
                return
            meet(optimizer)
            if optimizer not in self.stepped:
                self.stepped.append(optimizer)

        handle = register_optimizer_step_pre_hook(OwnHook(on_step))
        try:
            with (
                schedulers_are_recorded(self.recorder, self._note_failure, meet),
                other_generators_refused(self._note_failure),
            ):
                yield
        finally:
            handle.remove()

    def _report(self, error: Exception) -> NoReturn:
        self._note_failure(error)
        raise error

    def _make_homes(self) -> list[Tensor]:
        """One input for each gradient: the one there is, or memory for one that the step may leave."""
        return [
            torch.empty_like(gradient.parameter, requires_grad=False) if gradient.before is None else gradient.before
            for gradient in self.request.gradients
        ]

    def _keep_changes(self) -> list[Change]:  # noqa: C901  one line per kind of change
        """Note what becomes of optimizers' state and of Python objects; refuse what no graph can do again.

        Returns:
            Where the function stored tensors.
        """
        given = {*map(id, self.request.arguments), *(id(entry.tensor) for entry in self.request.state)}
        stored: list[Change] = []
        counted: list[Change] = []
        settled: set[Any] = set()
        for change in self._note_writes():
            before, after = change.before, change.after
            is_users = change.kind in (Kind.PLAIN, Kind.MODULE)
            if _is_count(change):
                counted.append(change)
            elif _is_write(change):
                if change.location.key != "training":
                    settled.add((change.location, _form_of(before), _form_of(after)))
            elif is_schedulers(after):
                pass  # it puts it there itself
            elif id(before) in given and not is_users and fits(after, before):
                self.copies.append((before, after))
            elif change.kind is Kind.STATE:
                raise StateMissing(str(change.location))
            elif change.kind is Kind.GROUP:
                raise CaptureError(
                    f"The step changes {change.location}.",
                    where=self.ran.where_stored(change.location),
                    remedy="Change it outside of the step.",
                )
            elif isinstance(after, FakeTensor) and change.is_entry and not is_type_of_tracing(change.location.key):
                if after.requires_grad and after.is_leaf and id(after) not in given:
                    raise _needs_gradient(str(change.location))
                stored.append(change)
            elif change.kind is not Kind.SCALER and not (
                change.kind is Kind.OPTIMIZER and change.location.key in _NOTES
            ):
                raise _side_effect(change, self.ran.where_stored(change.location))
        self._check_numbers(counted)
        if not settled <= self.request.settled:
            self.request.settled |= settled
            raise FirstChange
        return stored

    def _note_writes(self) -> list[Change]:
        """Add to the effects what has become of Python's values since it was last asked; returns all that differs."""
        changes = [replace(change, after=as_scalar(change.after)) for change in self.snapshot.changes()]
        now = {change.location: change for change in changes if _is_write(change)}
        undone = [replace(change, after=change.before) for place, change in self.written.items() if place not in now]
        for change in (*now.values(), *undone):
            location = change.location
            if location not in self.written or self.written[location].after is not change.after:
                self.written[location] = change
                self.recorder.program.append(Write(location, self._output_of(change.after)))
        return changes

    def _output_of(self, value: Any) -> Output:
        if is_scalar(value) or (isinstance(value, str) and holds_token(value)):
            return self.recorder.host_output(value)
        return Output("object", value=value)

    def _check_numbers(self, changes: list[Change]) -> None:
        """Ask for numbers that the function has changed and that are no scalars yet; see that the graph will serve."""
        if new := [change.location for change in changes if not is_scalar(change.before)]:
            raise NumbersChanged(new)
        self._check_writers(changes)
        successors: dict[int, Any] = {}
        for change in changes:
            after = change.after
            if not is_scalar(after):
                successors[change.before.of.index] = Always(after)
            elif after.is_known:
                successors[change.before.of.index] = after.of
        if successors and not self.questions.allow_again(self.numbers, successors):
            raise ServesOnce(str(self.request.numbers[min(successors)].location))

    def _check_writers(self, changes: list[Change]) -> None:
        """Trace again where another thread has written over what the step has written, or may have."""
        if self.taken:
            raise Disturbed(self.taken[0])
        for change in self.snapshot.others():
            if is_scalar(change.before) and not is_scalar(change.after):  # the step may have read that as it is
                raise Disturbed(change.location)
        plain = {change.location for change in changes if not is_scalar(change.after)}
        if mixed := self.request.plain - plain:
            raise CaptureError(
                f"The step may write to {mixed.pop()}, and so did another thread while it was captured, which is lost.",
                remedy="Let threads that write where the step writes wait for its first calls.",
            )
        if others_may_write() and (new := plain - self.request.plain):
            self.request.plain |= plain
            raise Disturbed(new.pop())

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

    def _note_replaced(self, stored: list[Change], leaves: list[Tensor]) -> None:
        """Find state that the step uses and in whose place it, or the user between calls, puts other tensors.

        Such state is read from its place in each call, like an argument: to copy the new tensor into the old one would
        change what the user may keep by another name. Where several places hold one tensor, nobody can tell by which
        it was read; then the graph is for that very tensor.
        """
        placeholders = graph_being_traced().find_nodes(op="placeholder")
        returned = {*map(id, leaves), *(id(change.after) for change in stored)}
        replaced = {id(change.before) for change in stored}
        linked = {id(link.value): link.location for link in self.request.found.links}
        for index, entry in enumerate(self.request.state):
            tensor = id(entry.tensor)
            if not placeholders[index].users and tensor not in returned:
                continue
            registered = {*entry.locations}
            location = next(iter(entry.locations), linked.get(tensor))
            if tensor in replaced:
                if entry.required_grad:
                    raise _needs_gradient(entry.name)
                if index in self.request.mirrored:
                    raise _writes_host(entry)
            elif (
                entry.required_grad
                or index in self.request.mirrored
                or location is None
                or location not in self.request.changing
            ):
                continue
            if self.request.found.references[tensor] + len(registered) == 1 and location is not None:
                self.replaced[index] = location

    def _keep_gradients(self) -> None:
        gradients = [gradient.parameter.grad for gradient in self.request.gradients]
        self.left += [now is not None for now in gradients]
        kept = [home for now, home in zip(gradients, self.homes, strict=True) if now is home]
        taken = {storage_id(tensor) for tensor in (*kept, *(entry.tensor for entry in self.request.state))}
        for gradient, now, home in zip(self.request.gradients, gradients, self.homes, strict=True):
            if now is None or now is home:
                continue
            if not fits(now, home):
                raise CaptureError(
                    f"The gradient of {gradient.name} has another shape, dtype or layout than it had.",
                    remedy="Keep gradients dense and in the parameter's dtype.",
                )
            if storage_id(now) in taken:
                raise CaptureError(
                    f"The gradient of {gradient.name} shares memory with state or with another gradient.",
                    remedy="Give it memory of its own, with clone().",
                )
            taken.add(storage_id(now))
            self.copies.append((home, now))

    def _keep_data(self) -> None:
        """Note what was assigned to the ``.data`` of inputs."""
        taken = set(self.memory)
        for tensor in self._inputs():
            before = self._memory_of(tensor)
            if is_same_view(tensor, before):
                continue
            if storage_id(tensor) in taken:
                raise CaptureError(
                    "The step assigns to .data what shares memory with state or with an argument.",
                    remedy="Assign a clone of it, or use copy_().",
                )
            taken.add(storage_id(tensor))
            self.copies.append((before, tensor))

    def _memory_of(self, tensor: Tensor) -> Tensor:
        """What has the memory that ``tensor`` had when the step began."""
        return self.moved.get(id(tensor), (tensor, tensor))[1]

    def _take_outputs(self, result: Any, stored: list[Change]) -> list[Tensor]:
        leaves: list[Tensor] = []
        structure = take_apart(result, leaves)
        parts: list[Any] = []
        self.structure = open_structure(structure, iter(leaves), parts)
        check_returned(self.structure, {id(entry.tensor) for entry in self.request.state})
        self._note_replaced(stored, leaves)
        arguments = {id(tensor): index for index, tensor in enumerate(self.request.arguments)}
        for index in self.replaced:
            arguments[id(self.request.state[index].tensor)] = len(arguments)
        objects = {id(entry.tensor) for entry in self.request.state} - {id(target) for target, _ in self.copies}
        taken = set(self.memory)
        results: list[Tensor] = []
        index_of: dict[int, int] = {}

        def take(leaf: Tensor) -> Output:
            if id(leaf) in arguments:
                return Output("argument", arguments[id(leaf)])
            if id(leaf) in objects:
                return Output("object", value=leaf)
            if not isinstance(leaf, FakeTensor):
                self._report(ForeignTensor(leaf, ""))
            if id(leaf) not in index_of:
                plain = leaf.detach()
                if storage_id(plain) in taken:
                    if storage_id(plain) in self.recorder.passed:
                        raise CaptureError(
                            "The step passes tensors that share memory across the edge of an eager_region.",
                            remedy="Pass a clone.",
                        )
                    plain = plain.clone()
                taken.add(storage_id(plain))
                index_of[id(leaf)] = len(results)
                results.append(plain)
            return Output("graph", index_of[id(leaf)])

        self.outputs += (take(part) if is_tensor(part) else self.recorder.host_output(part) for part in parts)
        program = self.recorder.program
        for change in stored:
            if self.recorder.is_part and change.after.requires_grad and not change.after.is_leaf:
                raise CaptureError(
                    f"The step stores a tensor with gradients in {change.location}, and an eager_region follows.",
                    remedy="Detach it.",
                )
            output = take(change.after)
            program.append(Write(change.location, output))
            if output.kind == "graph":
                self.stored[storage_id(change.after)] = str(change.location)
        self.effects = self.recorder.finish(self.outputs, results)
        return results

    def _copy_back(self) -> None:
        """Do all copies as if at once: what one of them overwrites, another may read."""
        values = [value.clone() if storage_id(value) in self.memory else value for _, value in self.copies]
        for (target, _), value in zip(self.copies, values, strict=True):
            self._memory_of(target).copy_(value)

    def _inputs(self) -> Iterator[Tensor]:
        yield from (entry.tensor for entry in self.request.state)
        yield from self.homes
        yield from self.request.arguments

    def _numbers_now(self, used: Found) -> list[Any]:
        """The numbers after the trace, if the graph holds for them and for everything else that there is by now."""
        if (disturbed := self.snapshot.disturbed(used)) is not None:
            raise Disturbed(disturbed)
        places = [number.location for number in self.request.numbers]
        values = [place.get() for place in places]
        changed = [place for place, now, before in zip(places, values, self.numbers, strict=True) if now != before]
        if changed and not (all(map(is_number, values)) and self.questions.allow(values)):
            raise Disturbed(changed[0])
        return values

    def _finish(self, gm: fx.GraphModule) -> Traced:
        assert self.structure is not None
        used = discover(self.request.roots, self.ran)
        check_sources(used)
        values = self._numbers_now(used)
        arguments = {*map(id, self.request.arguments)}
        for entry in lift(used):
            if id(entry.tensor) in arguments:
                raise CaptureError(
                    f"{entry.name} is passed as an argument, too.", remedy="Pass a clone, or use it by its name only."
                )
        drop_idle_nodes(gm)
        if self.questions.texts.made:
            if (where := self.questions.texts.unshown()) is not None:
                raise text_changed(where)
            self.effects.outline = self.recorder.outline, [_constants_of(node, gm) for node in gm.graph.nodes]
        subtract_powers_exactly(gm)
        move_constants(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        sizes = [len(part) for part in (self.request.state, self.homes, self.request.numbers, self.request.arguments)]
        starts = [sum(sizes[:part]) for part in range(4)]
        replaced = [placeholders[index] for index in self.replaced]
        transfers = hoist_transfers(gm, [*placeholders[starts[3] :], *replaced])
        written = written_storages(gm)
        targets = written_inputs(gm)
        state = zip(self.request.state, placeholders, strict=False)
        check_apart([(entry.name, entry.tensor) for entry, node in state if node in targets])
        let_views_copy(gm, written)
        is_written = [storage_id(node.meta["val"]) in written for node in placeholders]
        for index in self.request.mirrored:
            if is_written[index]:
                raise _writes_host(self.request.state[index])
        for node in placeholders[: starts[2]]:
            storage = storage_id(node.meta["val"])
            if storage in self.stored and storage in written:
                raise CaptureError(
                    f"The step stores in {self.stored[storage]} a view of state that it writes.",
                    remedy="Store a clone of it.",
                )
        devices = [transfers.get(node) for node in placeholders]
        kept = drop_unused_inputs(gm)
        read = [(number, index) for number, index in enumerate(self.replaced) if index in kept]
        for _, index in read:  # what calls bring comes last
            gm.graph.find_nodes(op="placeholder")[-1].append(placeholders[index])
        kept = [position for position in kept if position not in self.replaced]
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
            replaced=[*self.replaced.items()],
            written=[is_written[position] for position in kept],
            left=self.left,
            structure=self.structure,
            outputs=self.outputs,
            questions=self.questions,
            values=values,
            used=used,
            attributes=self.ran.attributes or {},
            effects=self.effects,
            looked_at=self.looked_at,
            asked=self.asked,
            variables=self.ran.variables,
            optimizers=self.stepped,
            writes_arguments=any(is_written[starts[3] :]) or any(is_written[index] for index in self.replaced),
            sizes=self.sizes,
        )


def _constants_of(node: fx.Node, gm: fx.GraphModule) -> tuple[str, ...]:
    """An operator and what it is given that no operator made."""
    if node.op == "get_attr" and isinstance(value := getattr(gm, str(node.target), None), Tensor):
        return (str(value.tolist()),)
    given = (part for part in tree_leaves((node.args, node.kwargs)) if not isinstance(part, fx.Node))
    return (str(node.target), *map(str, given))


def _is_write(change: Change) -> bool:
    """Whether a call can do the change again after the replay: a plain value or number in one place."""
    if change.kind in (Kind.STATE, Kind.GROUP) or (change.kind is Kind.OPTIMIZER and change.location.key in _NOTES):
        is_ours = is_number(change.before) and is_number(change.after)
    else:
        is_ours = change.kind is not Kind.SCALER
    after, key = change.after, change.location.key
    if is_scalar(key) or (isinstance(key, str) and holds_token(key)):
        return False
    return is_ours and change.is_entry and not is_schedulers(after) and (is_scalar(after) or isinstance(after, SCALARS))


def _is_count(change: Change) -> bool:
    """Whether a number takes the place of another."""
    return _is_write(change) and is_number(change.before) and is_number(change.after)


def _containers(value: Any) -> Iterator[int]:
    """By id, the containers within a value, and it."""
    if isinstance(value, tuple | list | dict) or dataclasses.is_dataclass(value):
        yield id(value)
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
        for part in parts:
            yield from _containers(part)


def _form_of(value: Any) -> Any:
    """What tells one plain value from another; numbers are all alike, as the next graph is given them anew."""
    return float if is_number(value) else value if isinstance(value, SCALARS) else type(value)


def _needs_gradient(name: str) -> CaptureError:
    return CaptureError(
        f"The step puts a new tensor that requires a gradient in {name}, or in the place of one.",
        remedy="Change it in place, under torch.no_grad().",
    )


def _writes_host(entry: Lifted) -> CaptureError:
    return CaptureError(
        f"The step writes {entry.name}, a number on the host, from the device.",
        remedy="Keep that tensor on the device.",
    )


def _side_effect(change: Change, where: str) -> CaptureError:
    if change.after is MISSING:
        what = f"removes {change.location}"
    elif isinstance(change.after, Tensor):
        what = f"stores a tensor in {change.location}"
    else:
        what = f"changes {change.location}"
    return CaptureError(f"The step {what}, which a graph would not do again.", where=where, remedy=CALLBACK_REMEDY)
