"""``ms.step``: a function that does a whole training step, captured once and replayed.

A call goes one of three ways. *Replay*: a graph was captured for arguments like these, and everything it took for
granted still holds. *Capture*: none fits, so that one is traced, built and kept. *Eager*: the function cannot be
captured, or the optimizer must first create its state; then the user's function runs as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from millstream._torch.active_modes import ambient
from millstream._torch.compiler.dynamo import is_compiling
from millstream._torch.dispatcher import FORWARD_AD, innermost_transform
from millstream._torch.distributed.fully_sharded import LEFT_WHOLE, any_sharded, reshard_left
from millstream._torch.distributed.wrappers import is_distributed_run, watch_wrapping
from millstream._torch.hooks import OwnHook
from millstream._torch.switches import present
from millstream.capture.effects.drawn import undrawn
from millstream.capture.effects.effect_recorder import text_changed
from millstream.capture.guards.recheck import compare, listing_of
from millstream.capture.kept.elsewhere import Job, at_once
from millstream.capture.kept.traces import Shelf, open_shelf
from millstream.capture.lines import COMES_TO, claim, in_library, library_in
from millstream.capture.record.instructions import begin_early
from millstream.capture.record.location import Location
from millstream.capture.state.discover import Found, discover
from millstream.capture.state.signature import has_same, key_of, key_of_tensors, settings_of
from millstream.capture.step.bind import StepState
from millstream.capture.step.calls import Calls, StepCall, specs_of, split_leaves
from millstream.capture.step.first_run import build_and_run
from millstream.capture.step.graph import Build, GraphCache, StepGraph
from millstream.capture.step.plain_results import OwnTensors, detached
from millstream.capture.step.recapture import History, cause_of
from millstream.capture.step.refused import Refused
from millstream.capture.step.split import lines_for_a_region
from millstream.capture.step.symbolic_sizes import ChangingSizes, NoSymbols, SizesFixed, check_symbols
from millstream.capture.trace.changes import CALLBACK_REMEDY
from millstream.capture.trace.numbers.scalars import is_number
from millstream.capture.trace.patches.optimizers import CountsOnDevice, move_counts_to_host, numbers_of, pretended_state
from millstream.capture.trace.request import (
    Converted,
    Disturbed,
    EagerFirst,
    FirstChange,
    FoundLate,
    NoGraph,
    NotNow,
    NotYet,
    NumbersChanged,
    OneShot,
    OtherFlags,
    Request,
    StateMissing,
    Traced,
    TypesCompared,
)
from millstream.capture.trace.tracer import trace_step, tracing_alone
from millstream.capture.trace.unsupported import (
    check_function,
    check_modes,
    check_used,
    find_unsupported,
    within_transform,
)
from millstream.data_parallel.reduced_run import ReducedRun, adopt_sharded
from millstream.data_parallel.reducer import Reducer
from millstream.data_parallel.replica import replicate
from millstream.device.compiled_switches import install_later
from millstream.errors import (
    CaptureError,
    FailingStepCaptureError,
    warn_user,
    why_disabled,
    without_frames,
)
from millstream.locks import ForkSafeLock, releasable
from millstream.lower import ask_early
from millstream.progress import phase, showing
from millstream.signals import undisturbed

MAX_LATE = 32
"""Objects that discovery may miss; each costs one more trace."""

MAX_DISTURBED = 3
"""Traces of one call that may be in vain as another thread has written meanwhile to what the step uses."""

MAX_ONE_SHOT = 4
"""Graphs that would serve one call only: so many calls run eagerly, such as the first steps of a warm-up."""

MAX_FIRST = 8
"""Calls that may run eagerly because the step sets a flag or the like for the first time, maybe the only time."""

MAX_UNREADY = 20
"""Calls that may run eagerly while an optimizer has no state: a GradScaler skips steps until it finds its scale."""

MAX_MISSED = 3
"""Calls alike that may run eagerly because a cache has no answer: a step may ask it in the other way of a branch."""

QUICKEN_EVERY = 32
"""Runs of a graph on the host after which it is asked whether compiled code can check it by now."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why calls of one kind run as plain Python."""

    signature: dict[str, str]  # tensors of the arguments by name, with dtype and shape
    error: CaptureError  # reason, line and remedy

    def __post_init__(self) -> None:
        without_frames(self.error)


P = ParamSpec("P")
R = TypeVar("R")


class Step(Generic[P, R]):
    """A training step that is captured whole, with its optimizers, and replayed.

    A graph repeats what the function does to tensors. What it prints, logs and counts, and schedulers' steps, are a
    list of effects, done after the graph in each call. Random numbers of Python and NumPy are drawn before it. Other
    changes of Python objects, values that decide: what of this can be noticed is refused. What cannot (the time of day)
    happens when the step is traced and not again. While it is traced its tensors have no values: other threads must not
    use them.

    Args:
        function: Does forward, backward and optimizer step on objects that it finds in its closure, globals, bound
            object or arguments.
        build: Makes an executable of a traced graph.
        strict: Raise ``CaptureError`` where otherwise a ``FallbackWarning`` is given and the function runs eagerly.
        max_graphs: So many graphs are kept; the one unused for longest goes first.
        check: Every so many calls of a graph, capture again and compare; 0 for never.
        data_parallel: Whether to replicate what it trains and to reduce its gradients, or the processes that do.
        shard_optimizer: Whether those divide the work and the state of its optimizers.
        shard_parameters: Whether those divide its models, and its optimizers with them.
        dynamic: Whether sizes of arguments are symbols of a graph: those that were seen to change, all, or none.

    Attributes:
        function: The user's function.
        refusals: What runs eagerly, and why.
    """

    def __init__(  # noqa: PLR0913  all but the first by name, each with a default
        self,
        function: Callable[P, R],
        *,
        build: Build,
        strict: bool = False,
        max_graphs: int = 8,
        check: int = 0,
        data_parallel: Any = False,
        shard_optimizer: bool = False,
        shard_parameters: bool = False,
        dynamic: bool | None = None,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        claim(function)
        self.function = function
        self.strict = strict
        self.max_graphs = max_graphs
        self.check = check
        self.data_parallel = data_parallel
        self.shard_optimizer = shard_optimizer
        self.shard_parameters = shard_parameters
        self._replica: Reducer | None = None
        self._name = getattr(function, "__name__", type(function).__name__)
        self._build = build
        self._dynamic = dynamic
        self._lock = ForkSafeLock()
        self.refusals: list[Fallback] = []
        self._start_anew()

    def _start_anew(self) -> None:
        self._disabled = why_disabled()
        self.refusals[:] = [] if self._disabled is None else [Fallback({}, self._disabled)]
        self._state = StepState(is_checked=self.check > 0)
        self._sizes = ChangingSizes(self._dynamic)
        self._cache = GraphCache()
        self._calls = Calls(self.function)
        self._refused = Refused()
        self._own = OwnTensors()
        self._history = History(self._name)
        self._code = _code_of(self.function)
        self._stepped: dict[int, Optimizer] = {}
        self._has_run = False
        self._num_unready = self._num_one_shot = self._num_first = 0
        self._missed: Counter[Any] = Counter()
        self._jobs: dict[Any, Job] = {}  # that lower graphs in other processes, by the key of the calls that wait
        self._num_fruitless = 0
        self._why = "Its arguments have another structure, shape or dtype every time."
        self._compared: CaptureError | None = None  # why there is a graph for each number that changes

    def reset(self) -> None:
        """Drop all graphs, and forget what calls have taught: the next ones capture anew, also what fell back.

        The graphs' memory is given back. Models, optimizers and gradients stay as they are.
        """
        with self._lock.lock:
            for graph in self._cache:
                self._drop(graph)
            self._start_anew()

    @property
    def graphs(self) -> list[StepGraph]:
        """The graphs there are, the one unused for longest first."""
        return list(self._cache)

    @property
    def history(self) -> list[str]:
        """Each capture with its cause, for people."""
        return self._history.lines()

    @property
    def regions(self) -> Sequence[tuple[int, int]]:
        """First and last line of each eager region."""
        return ()

    @property
    def jobs(self) -> list[Job]:
        """Other processes that calls wait for as plain Python."""
        return [job for job in dict.fromkeys(self._jobs.values()) if not job.is_over]

    @property
    def fallbacks(self) -> list[str]:
        """Why anything runs eagerly, for people."""
        now = time.monotonic()
        until = "until it is done calls run as plain Python"
        compiled = [f"for {now - job.since:.0f} s another process has been compiling; {until}" for job in self.jobs]
        return [*compiled, *(str(refusal.error) for refusal in self.refusals)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Step[P, R]:
        """The same of a copy of the function, with the copied object where it is a method; nothing is captured yet."""
        function = copy.deepcopy(self.function, memo)
        return Step(
            function,
            build=self._build,
            strict=self.strict,
            max_graphs=self.max_graphs,
            check=self.check,
            data_parallel=self.data_parallel,
            shard_optimizer=self.shard_optimizer,
            shard_parameters=self.shard_parameters,
            dynamic=self._dynamic,
        )

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Step[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A step defined in a class is a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:  # noqa: C901  a call changes file at most 14 times
        """Run the step."""
        if (
            torch.compiler.is_compiling() and is_compiling()
        ) or torch.is_inference_mode_enabled():  # part of another capture; no training
            return self.function(*args, **kwargs)
        if innermost_transform() is not None or FORWARD_AD._current_level >= 0:
            return self._run_within_transform(args, kwargs)
        if LEFT_WHOLE:
            reshard_left()
        with self._lock.lock:  # a call reads numbers, runs and writes numbers before the next one does
            usual = self._cache.usual if not self.check else None
            if usual is not None and usual.specs is not None and not kwargs:
                leaves, brought = (
                    split_leaves(args) if usual.kinds and usual.kinds == tuple(map(type, args)) else ([*args], [])
                )
                if usual.specs.find(leaves) is not None and (len(leaves) == 1 or not has_same(leaves)):
                    _, modes, *_ = usual.key
                    if modes == ambient() and usual.fits(leaves, brought):
                        return self._run_whole(usual, leaves)
            arguments: list[Any] = [*args]
            given: Sequence[float] = ()
            self._cache.usual = None
            key = None if kwargs else key_of_tensors(arguments)
            if key is None:
                numbers: list[float] = []
                form: Any
                form, arguments = self._calls.flatten(args, kwargs, numbers)
                if numbers:
                    form, given = self._calls.split_numbers(form, numbers)
                key = key_of(form, arguments)
            if (graph := self._cache.find(key, arguments, given)) is not None:
                if not graph.guards.is_quickened and graph.num_runs and not graph.num_runs % QUICKEN_EVERY:
                    undisturbed(graph.guards.quicken_if_made, graph.parameters)  # it may start a thread
                    _learn_arguments(graph, self._calls.make(args, kwargs))
                self._check_if_due(graph, args, kwargs)
                return self._run_whole(graph, arguments)
            is_refused = self._disabled is not None or self._refused.covers(key) or self._waits(key)
            if is_refused and not self._forget_if_edited():
                with releasable(self._lock.lock):
                    return self._run_plainly(args, kwargs, arguments)
            call = self._calls.make(args, kwargs)
            graph = self._cache.find(
                call.key, call.arguments, call.given
            )  # numbers may be given now that were in the key
            if graph is not None:
                return self._run_whole(graph, call.arguments)
            with releasable(self._lock.lock):
                return self._call_slowly(call)

    def _run_within_transform(self, args: Any, kwargs: Any) -> Any:
        self._note_obstacle({}, within_transform())
        return self.function(*args, **kwargs)

    def _run_whole(self, graph: StepGraph, arguments: list[Tensor]) -> Any:
        """Run a graph; where its kernels run within the call, an interrupt comes before or after."""
        if not graph.has_calls:
            return undisturbed(graph.run, arguments) if graph.is_on_host else graph.run(arguments)
        with releasable(self._lock.lock):
            return undisturbed(graph.run, arguments) if graph.is_on_host else graph.run(arguments)

    def _call_slowly(self, call: StepCall) -> Any:
        if self._disabled is not None or self._refused.covers(call.key) or self._waits(call.key):
            return self._run_call_plainly(call)
        error: CaptureError | None = None
        done: Callable[[], Any] | None = None
        try:
            done = functools.partial(StepGraph.finish, *self._capture_objects(call))
            self._missed.clear()
        except EagerFirst:
            pass
        except NotYet as later:
            self._jobs[call.key] = later.job
            install_later()  # what such calls take is mostly their key
            done = functools.partial(self._run_call_plainly, call)
        except StateMissing as missing:
            if self._num_unready == MAX_UNREADY or self._has_missed(call, missing):
                error = self._with_region(
                    CaptureError(
                        f"The step creates new state ({missing.name}) again and again.",
                        where=missing.where,
                        remedy=(
                            "Give every parameter a gradient in the first call, and caches room for all they are asked;"
                            " call function.__wrapped__ where the step asks a cache in some calls only."
                        ),
                    )
                )
        except FirstChange as change:
            self._num_first += 1
            error = change.error if self._num_first > MAX_FIRST else None
        except OneShot as number:
            self._num_one_shot += 1
            if self._num_one_shot > MAX_ONE_SHOT:
                error = _one_shot_refusal(number)
        except NotNow as obstacle:
            self._note_obstacle(call.signature, obstacle.error)
            done = functools.partial(self._run_call_plainly, call)
        except CaptureError as refusal:
            error = self._with_region(refusal)
        if done is not None:  # what it raises, as by effects, is the user's own
            return done()
        return self._run_watching(call) if error is None else self._fall_back(call, error)

    def _waits(self, key: Any) -> bool:
        """Whether calls like this one run as plain Python, as their graph is lowered in another process."""
        job = self._jobs.get(key)
        if job is not None and job.is_over:
            self._jobs.pop(key).stop()
            return False
        return job is not None

    def _has_missed(self, call: StepCall, missing: StateMissing) -> bool:
        """Whether a cache has had no answer too often, though eager calls like this one have come in between."""
        if missing.where:
            self._missed[call.key, missing.name] += 1
        return self._missed[call.key, missing.name] >= MAX_MISSED

    def _roots(self, call: StepCall) -> Iterator[tuple[str, Any]]:
        yield self._name, self.function
        yield from call.objects()

    def _search(self, roots: Sequence[tuple[str, Any]]) -> Found:
        """What the roots reach; what the function's own code uses of it can be captured."""
        found = discover(roots)
        if not found.scalers:
            adopt_sharded(module for _, module in found.modules)
        if unsupported := [*find_unsupported(found)]:
            check_used(discover(roots, {_code_of(self.function)}), unsupported)
        return found

    def _optimizers(self, call: StepCall) -> list[Optimizer]:
        return [optimizer for _, optimizer in discover(self._roots(call)).optimizers]

    def _is_unready(self, found: Found, *, is_trial: bool) -> bool:
        """Whether an eager call must come first, to create what only an eager call can create.

        In a trial optimizers have what state they take, which may be none.
        """
        if self.data_parallel is not False and self._replica is None:
            return True
        lazy = (is_lazy(each) for _, module in found.modules for each in (*module.parameters(), *module.buffers()))
        if not self._has_run and any(lazy):  # later, the trace tells whether the step uses one
            return True
        if any(scaler._scale is None for _, scaler in found.scalers):
            return True
        if is_trial:
            return False
        empty = [optimizer for _, optimizer in found.optimizers if not optimizer.state]
        if not self._has_run:
            return bool(empty)
        is_scaled = bool(found.scalers) and self._num_unready < MAX_UNREADY
        return is_scaled and any(id(optimizer) not in self._stepped for optimizer in empty)

    def _run_watching(self, call: StepCall) -> Any:
        """Run eagerly, and note which optimizers step."""
        self._has_run = True
        self._num_unready += 1
        begin_early()  # for the call that captures, before which this one comes
        ask_early(call.arguments)

        def note(optimizer: Optimizer, *_: Any) -> None:
            self._stepped[id(optimizer)] = optimizer

        with contextlib.ExitStack() as hooks:
            for optimizer in self._optimizers(call):  # one for all would be seen by other threads
                hooks.callback(optimizer.register_step_post_hook(OwnHook(note)).remove)
            return self._run_call_plainly(call)

    def _result_of(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an eager call gives to the caller."""

        def own() -> set[int]:
            call = self._calls.make(args, kwargs)
            return self._own.ids(call.arguments, lambda: discover(self._roots(call)))

        return detached(result, own)

    def _run_call_plainly(self, call: StepCall) -> Any:
        return self._run_plainly(call.args, call.kwargs, call.arguments)

    def _run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Sequence[Tensor]) -> Any:
        """Run the user's function as it is, but for gradients of DDP models, which all runs reduce alike.

        Args:
            args: Of the call.
            kwargs: Likewise.
            arguments: Tensors among both.
        """
        if self.data_parallel is not False and self._replica is None:
            found = discover(self._roots(self._calls.make(args, kwargs)))
            group = None if self.data_parallel is True else self.data_parallel
            self._replica = replicate(
                self._name,
                found.modules,
                found.optimizers,
                found.tensors,
                group,
                found.scalers,
                shards=self.shard_optimizer,
                shards_parameters=self.shard_parameters,
            )
            adopt_sharded(module for _, module in found.modules)

        is_open = not all(argument.is_leaf for argument in arguments)  # gradients are to reach beyond the step
        if is_distributed_run():
            with ReducedRun(self._replica, lambda: self._optimizers(self._calls.make(args, kwargs))).active():
                result = self.function(*args, **kwargs)
        else:
            result = self.function(*args, **kwargs)
        return result if is_open else self._result_of(result, args, kwargs)

    def _forget_if_edited(self) -> bool:
        """Try again what was refused if the function has other code, as after an edit in a notebook; whether it has."""
        if (code := _code_of(self.function)) is self._code:
            return False
        self._code, self._disabled, self._num_fruitless = code, why_disabled(), 0
        self._refused = Refused()
        self._jobs = {}
        self.refusals[:] = [] if self._disabled is None else [Fallback({}, self._disabled)]
        return True

    def _with_region(self, error: CaptureError) -> CaptureError:
        """The same refusal with another remedy: an eager region where that would work, or for a library's line."""
        lines, library = lines_for_a_region(self.function, error.where.partition(COMES_TO)[0]), library_in(error.where)
        if lines is not None:
            which = f"line {lines[0]}" if lines[0] == lines[1] else f"lines {lines[0]} to {lines[1]}"
            offer = f"Or put {which} into `with ms.eager_region():`, and the rest stays captured."
        elif library:
            offer = in_library(library)
        else:
            return error
        told = type(error)(error.reason, where=error.where, remedy=f"{error.remedy} {offer}".strip())
        told.__cause__ = error.__cause__
        return told.with_traceback(error.__traceback__)

    def _look_back(self, call: StepCall, found: Found) -> None:
        """Learn from graphs that do not fit: drop dead ones, lift what changes, stop if it leads nowhere."""
        candidates = self._cache.candidates(call.key)
        call.cause = call.cause or cause_of(candidates, self._cache, call)  # before any is dropped
        for graph in candidates:
            if graph.sizes is not None and not graph.sizes.hold(call.arguments):
                continue
            change = graph.guards.broken()
            if change is None:
                if (number := graph.changed_number(call.given)) is not None:
                    self._why = f"It depends on the value of {number[0]}, which changes."
                continue
            self._why = change.reason
            numbers = [*graph.guards.numbers()]
            changed = [location for location, is_changed in numbers if is_changed]
            self._state.note_reads(found, changed, beside=[location for location, _ in numbers])
            if change.location is not None:
                rates = (number for _, optimizer in found.optimizers for number in numbers_of(optimizer))
                self._state.cycled |= {change.location} & {rate.location.entry for rate in rates}
                if change.is_tensor:
                    self._state.changing.add(change.location)
            if change.is_final:
                self._drop(graph)
        last = self._cache.last_used
        self._num_fruitless = self._num_fruitless + 1 if last is not None and last.num_runs < 3 else 0
        if self._is_fruitless():
            error = CaptureError(
                f"{self._num_fruitless} graphs in a row were captured that hardly served again. {self._why}",
                remedy="Pass what changes as a tensor argument, keep shapes constant, or raise max_graphs.",
            )
            if (cause := self._compared) is not None:
                error = CaptureError(f"{error.reason} {cause.reason}", where=cause.where, remedy=cause.remedy)
            raise error

    def _is_fruitless(self) -> bool:
        return self._num_fruitless > 2 * self.max_graphs

    def precompile(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Capture a graph for a call like this, and leave everything as it is, as ``ms.precompile`` says."""
        if self.data_parallel is not False or self.regions:
            raise CaptureError(
                "A step with eager regions, or of several processes, cannot be compiled ahead of its first call.",
                remedy="Call it once: what its captured parts come to is kept on disk all the same.",
            )
        with self._lock.lock:
            call = self._calls.make(args, kwargs)
            with undrawn(draw.generator for graph in self._cache for draw in graph.questions.draws):
                if self._cache.find(call.key, call.arguments, call.given) is not None:
                    return
            found = self._search([*self._roots(call)])
            optimizers = [optimizer for _, optimizer in found.optimizers if not optimizer.state]
            try:
                with pretended_state(optimizers), at_once():
                    graph, _, _ = self._capture(call, is_trial=True)
                    if optimizers:  # it would read the pretended state
                        self._drop(graph)
            except (EagerFirst, FirstChange, StateMissing):
                raise CaptureError(
                    "The step has to run once before it can be captured, as it makes state that it needs.",
                    remedy="Call it once.",
                ) from None
            except OneShot as number:
                raise _one_shot_refusal(number) from None
            except NotNow as obstacle:
                raise obstacle.error from None

    def _capture_objects(self, call: StepCall) -> tuple[StepGraph, list[Tensor], list[Tensor]]:
        """Capture; where that cannot be with objects taken apart, as they may be changed, with these very objects."""
        try:
            return self._capture(call)
        except FailingStepCaptureError:
            raise
        except CaptureError as error:
            whole = self._calls.keep_whole(call)
            if whole is None:
                raise
            try:
                return self._capture(whole)
            except CaptureError:
                self._calls.open_again(call.opened)
                raise error from error.__cause__

    def _capture(self, call: StepCall, *, is_trial: bool = False) -> tuple[StepGraph, list[Tensor], list[Tensor]]:
        """Trace, build, run and keep a graph for ``call``; a failure, or a trial, leaves everything as it was.

        Numbers that change are inputs of the graph, if that can be; it is for those of the call otherwise.

        Returns:
            The graph, its complete arguments and its results.
        """
        with showing(self._name, "captured"):
            made = None
            while made is None:
                try:
                    made = self._capture_at_sizes(call, is_trial=is_trial)
                except CaptureError:
                    if not self._state.keep_reads():
                        raise
        self._history.note(call.cause, made[0].capture_seconds)
        return made

    def _capture_at_sizes(self, call: StepCall, *, is_trial: bool) -> tuple[StepGraph, list[Tensor], list[Tensor]]:
        """The same: sizes that change are symbols of the graph, if that can be."""
        dimensions = self._sizes.choose(call.key, call.arguments)
        if dimensions:
            try:
                return self._capture_for(call, dimensions, is_trial=is_trial)
            except SizesFixed:
                pass
            except FailingStepCaptureError:  # as for a size past memory: others may be symbols
                raise
            except (CaptureError, NoSymbols) as error:
                if not isinstance(error.__cause__, torch.OutOfMemoryError):
                    self._sizes.refuse(call.key, call.arguments, str(error))
        return self._capture_for(call, {}, is_trial=is_trial)

    def _capture_for(
        self, call: StepCall, dimensions: dict[int, frozenset[int]], *, is_trial: bool
    ) -> tuple[StepGraph, list[Tensor], list[Tensor]]:
        counts = CountsOnDevice()
        watch_wrapping(self)
        try:
            with tracing_alone():
                found = self._search([*self._roots(call)])
                check_function(self.function)
                check_modes()
                if self._is_unready(found, is_trial=is_trial):
                    raise EagerFirst
                self._look_back(call, found)
                ask_early(call.arguments)
                phase("tracing")
                graph = self._trace(call, found, counts, dimensions)
                if self._calls.hold_among(call, graph.containers):
                    graph = self._trace(call, discover(self._roots(call)), counts, {})
            arguments, results = build_and_run(self._build, call, graph, is_trial=is_trial)
        except BaseException:
            counts.undo()
            raise
        counts.settle()
        _learn_arguments(graph, call)
        self._cache.keep(graph)
        self._jobs.pop(call.key, None)  # as by precompile, which waits for none
        if present() is not settings_of(call.key):  # another thread has set one: it may hold for both, in parts
            self._cache.drop(graph)
            self._state.forget(self._cache)
        while len(self._cache) > self.max_graphs:
            self._drop(next(iter(self._cache)))
        self._calls.hold(each for graph in self._cache for each in graph.containers)
        return graph, arguments, results

    def _check_if_due(self, graph: StepGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Every ``check`` calls of a graph, capture again and compare.

        Raises:
            CaptureError: Another graph would be captured now.
        """
        if not self.check or graph.num_runs % self.check:
            return
        with tracing_alone():
            call = self._calls.make(args, kwargs)
            dimensions = {} if graph.sizes is None else graph.sizes.dimensions
            try:
                request, traced = self._record(call, discover(self._roots(call)), CountsOnDevice(), dimensions, graph)
            except NoGraph:  # as in the last call before one that takes another branch: the next check will tell
                return
            compare(graph.listing, listing_of(request, traced), self._name)

    def _trace(
        self, call: StepCall, found: Found, counts: CountsOnDevice, dimensions: dict[int, frozenset[int]]
    ) -> StepGraph:
        start = time.perf_counter()
        request, traced = self._record(call, found, counts, dimensions)
        if traced.sizes is not None:
            fixed, names = traced.sizes.fixed(), list(call.signature)
            if advice := self._sizes.note_fixed(call.key, call.arguments, names, fixed):
                warn_user(f"{self._name}: {advice}")
            if not traced.sizes.is_changing:
                raise SizesFixed
            check_symbols(request, traced)
        return self._state.assemble(call, request, traced, time.perf_counter() - start)

    def _record(
        self,
        call: StepCall,
        found: Found,
        counts: CountsOnDevice,
        dimensions: dict[int, frozenset[int]],
        like: StepGraph | None = None,
    ) -> tuple[Request, Traced]:
        """Trace, and again wherever something shows up late; ``like`` a graph that there is, if one is given."""
        roots, where, last, num_disturbed, is_plain = list(self._roots(call)), "", "", 0, False
        plain: set[Location] = set()
        disturbed: set[Location] = set()
        is_usual = like is None and not dimensions and self._replica is None and not any_sharded()
        shelf = open_shelf(self.function, call.key, call.structure, call.arguments) if is_usual else None
        if shelf is not None and (taken := self._take(shelf, call, roots, found, counts)) is not None:
            return taken
        num_roots = len(roots)
        for _ in range(MAX_LATE):
            for _, optimizer in found.optimizers:
                counts.move(optimizer)
            request = self._state.make_request(self.function, call, roots, found, like)
            request.replica, request.dimensions, request.plain = self._replica, dimensions, plain
            request.disturbed, request.is_plain = disturbed, is_plain
            request.drawn = () if like is None else like.questions.drawn
            try:
                traced = self._trace_converting(request, call)
                self._leave(shelf, call, request, traced, roots[num_roots:])
                return request, traced
            except FoundLate as late:
                roots.append((late.name, late.value))
                where, last = late.where, late.name
                found = discover(roots)
            except NumbersChanged as changed:
                last = ", ".join(str(location) for location in changed.locations)
                self._state.note_counts(found, changed.locations)
            except TypesCompared as compared:
                if dimensions or any(number.location in self._state.lifted for number in request.numbers):
                    raise compared.error from None
                is_plain, self._compared = True, compared.error
            except OtherFlags as flags:
                self._state.note_flags(flags, like)
            except Disturbed as other:
                num_disturbed += 1
                disturbed.add(other.location)
                if num_disturbed > MAX_DISTURBED:
                    raise CaptureError(
                        f"Another thread writes to {other.location} while the step is captured.",
                        remedy="Let it wait for the first calls of the step, or pass what it writes as an argument.",
                    ) from None
                found = discover(roots)
                is_lifted = any(number.location == other.location for number in request.numbers)
                if not is_lifted and other.location.key is not None and is_number(other.location.get()):
                    self._state.note_reads(found, [other.location])
        raise CaptureError(
            f"The step meets ever more that was made outside of it, {last} last.",
            where=where,
            remedy="Make tensors arguments, or make them with PyTorch functions inside of the step.",
        )

    def _leave(
        self, shelf: Shelf | None, call: StepCall, request: Request, traced: Traced, late: Sequence[tuple[str, Any]]
    ) -> None:
        """Keep a trace for later processes, if it can be."""
        if shelf is not None:
            shelf.keep(request, traced, self._state.learned(request, late))
            _add_to_cause(call, shelf)

    def _take(
        self, shelf: Shelf, call: StepCall, roots: list[tuple[str, Any]], found: Found, counts: CountsOnDevice
    ) -> tuple[Request, Traced] | None:
        """What an earlier process has traced, where all of it holds here."""
        for _, optimizer in found.optimizers:
            counts.move(optimizer)
        taken = None
        if (kept := shelf.find(found, lambda late: discover([*roots, *late]))) is not None:
            with self._state.learning(kept.learned) as settle:
                if kept.learned.late:
                    found = discover([*roots, *kept.learned.late])
                request = self._state.make_request(self.function, call, roots, found)
                if (traced := shelf.take(kept, request)) is not None:
                    settle()
                    taken = request, traced
        _add_to_cause(call, shelf)
        return taken

    def _trace_converting(self, request: Request, call: StepCall) -> Traced:
        """Trace; what ``float(number)`` and its like give are numbers of the graph, where it takes that and can be."""
        try:
            traced = _trace_twice(request)
            _check_growth(request, traced, call)
        except Converted:
            request.converts = self._state.converts = True
            request.plain.clear()  # the numbers there may be some of the graph now
            return self._trace_converting(request, call)
        except CaptureError as error:  # as where C takes a plain number only
            if not request.converts:
                raise
            request.converts = self._state.converts = False
            try:
                return self._trace_converting(request, call)
            except CaptureError:  # which may be of what the conversions would have done
                self._state.converts = None
                raise error  # noqa: B904  with the cause that it had
        if request.converts:
            self._state.converts = True if traced.num_converted else None  # as another way may have use for it
        return traced

    def _drop(self, graph: StepGraph) -> None:
        self._cache.drop(graph)
        self._state.forget(self._cache)
        graph.release()

    def _fall_back(self, call: StepCall, error: CaptureError) -> Any:
        if self.strict:
            raise error
        if error.__cause__ is None:
            self._note_refusal(call, error)
            return self._run_call_plainly(call)
        result = self._run_call_plainly(call)  # which may raise as well: then that is what the user is to see
        self._note_refusal(call, error)
        return result

    def _note_obstacle(self, signature: dict[str, str], error: CaptureError) -> None:
        """Tell once why calls run as plain Python for now."""
        if self.strict:
            raise error from None
        if not any(str(error) == str(refusal.error) for refusal in self.refusals):
            self.refusals.append(Fallback(signature, error))
            warn_user(f"{self._name} runs as plain Python for now: {error}")

    def _refuse_alike(self, call: StepCall, error: CaptureError) -> bool:
        """Refuse calls like this from now on; whether that is all calls."""
        install_later()
        return self._refused.add(call.key, error, [graph.form.key for graph in self._cache])

    def _note_refusal(self, call: StepCall, error: CaptureError) -> None:
        is_known = any(str(error) == str(refusal.error) for refusal in self.refusals)
        is_hopeless = self._refuse_alike(call, error)
        self.refusals.append(Fallback(call.signature, error))
        if is_hopeless or len(self.refusals) > 2 * self.max_graphs or self._is_fruitless():
            self._disabled = error
        if not is_known:
            warn_user(f"{self._name} runs as plain Python: {error}")
        if not len(self._cache):
            with contextlib.suppress(CaptureError):  # then there never was a graph
                for optimizer in self._optimizers(call):
                    move_counts_to_host(optimizer)


def _add_to_cause(call: StepCall, shelf: Shelf) -> None:
    """Tell people what has come of the trace on disk."""
    if shelf.outcome and call.cause is not None:
        call.cause = replace(call.cause, text=f"{call.cause.text}; {shelf.outcome}")
        shelf.outcome = ""


def _code_of(function: Callable[..., Any]) -> Any:
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _trace_twice(request: Request) -> Traced:
    """Trace; where text holds values that are known later, do so again with other stand-ins, and compare.

    Raises:
        CaptureError: They differ: the step looks at the characters.
    """
    traced = trace_step(request)
    if traced.effects.outline is not None:
        again = trace_step(replace(request, style=1))
        if again.effects.outline != traced.effects.outline:
            raise text_changed(next((call.where for call in traced.effects.calls), ""))
        traced.effects.outline = None
    return traced


def _check_growth(request: Request, traced: Traced, call: StepCall) -> None:
    """Trace again with other things in the lists that the step lets grow, and compare.

    Code alone does not show all that may look into a list. Other threads see what is put there meanwhile, as they see
    what a trace appends: so it is much like what was there.

    Raises:
        CaptureError: They differ: the step looks into one.
    """
    lists = traced.effects.lists
    if not lists:
        return
    is_same = not any(_has(call.args, each) or _has(call.kwargs, each) for each in lists)  # the step gets a copy
    kept = [[*each] for each in lists]
    others = [[*map(_another, each), *[0.5] * (len(each) % 7 + 13)] for each in kept]
    try:
        for each, other in zip(lists, others, strict=True):
            each[:] = other
        again = trace_step(replace(request))
        compare(listing_of(request, traced), listing_of(request, again), "the step")
        is_same = is_same and again.effects.said == traced.effects.said
    except Exception:  # noqa: BLE001  whatever it makes of that
        is_same = False
    finally:
        for each, other, content in zip(lists, others, kept, strict=True):
            each[: len(other)] = content  # other threads may have appended to it
    if not is_same:
        where = next(call.where for call in traced.effects.calls if call.is_state)
        raise CaptureError(
            "The step looks into a list to which it appends, which a graph would not do again.",
            where=where,
            remedy=CALLBACK_REMEDY,
        )


def _has(value: Any, held: list[Any]) -> bool:
    """Whether a list is among what containers hold."""
    if isinstance(value, dict):
        return any(_has(each, held) for each in value.values())
    return value is held or (isinstance(value, list | tuple) and any(_has(each, held) for each in value))


def _another(value: Any) -> Any:
    """A number of the same type, and anything else as it is."""
    return value + 1 if type(value) in (int, float) else value


def _learn_arguments(graph: StepGraph, call: StepCall) -> None:
    """Let compiled code compare the arguments of later calls with these, if it checks the rest, too."""
    if graph.guards.quick is not None and graph.sizes is None:
        graph.specs = specs_of(call)
        graph.kinds = tuple(map(type, call.args)) if call.given else ()


def _one_shot_refusal(number: OneShot) -> CaptureError:
    return CaptureError(
        f"The step depends on the very value of {number}, which it changes.",
        remedy="Compute with it by operators and functions of math, such as math.sqrt, or use a tensor.",
    )
