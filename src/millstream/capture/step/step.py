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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from millstream._torch.compiler.dynamo import is_compiling
from millstream._torch.dispatcher import FORWARD_AD, innermost_transform
from millstream._torch.distributed.fully_sharded import LEFT_WHOLE, reshard_left
from millstream._torch.modes.active_modes import ambient
from millstream.capture.effects.drawn import undrawn
from millstream.capture.kept.elsewhere import Job, at_once
from millstream.capture.lines import claim
from millstream.capture.state.discover import Found
from millstream.capture.state.signature import has_same, key_of, key_of_tensors
from millstream.capture.step.calls import Calls, StepCall, split_leaves
from millstream.capture.step.capturing.captures import Captures, learn_arguments
from millstream.capture.step.graph import Build, StepGraph
from millstream.capture.step.plain.patience import Patience, one_shot_refusal
from millstream.capture.step.plain.plain_runs import PlainRuns
from millstream.capture.step.plain.refusals import Fallback, Refusals, with_region
from millstream.capture.trace.patches.optimizers import move_counts_to_host, pretended_state
from millstream.capture.trace.refusing.unsupported import within_transform
from millstream.capture.trace.request import EagerFirst, FirstChange, NotNow, NotYet, OneShot, StateMissing
from millstream.capture.trace.tracer import tracing_alone
from millstream.data_parallel.reducer import Reducer
from millstream.data_parallel.replica import replicate
from millstream.device.compiled_switches import install_later
from millstream.errors import CaptureError
from millstream.locks import ForkSafeLock, releasable
from millstream.signals import undisturbed

QUICKEN_EVERY = 32
"""Runs of a graph on the host after which it is asked whether compiled code can check it by now."""

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
        options: Of TorchInductor, with which graphs are lowered; some decide what is traced.

    Attributes:
        function: The user's function.
    """

    _is_part = False  # of another step

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
        options: Mapping[str, Any] | None = None,
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
        self._build = build
        self._dynamic, self._options = dynamic, options or {}
        self._lock = ForkSafeLock()
        self._name = self._find_name()
        self._refusals = Refusals(self._name, function, 2 * max_graphs)
        self._calls = Calls(self._name, function)
        replicated = None if data_parallel is False else self._replicate
        self._plain = PlainRuns(self._calls, replicated, is_part=self._is_part)
        self._start_anew()

    def _find_name(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def _start_anew(self) -> None:
        self._calls = Calls(self._name, self.function)
        self._plain.begin(self._calls)
        self._captures = Captures(
            calls=self._calls,
            plain=self._plain,
            build=self._build,
            max_graphs=self.max_graphs,
            is_checked=self.check > 0,
            dynamic=self._dynamic,
            options=self._options,
        )
        self._cache = self._captures.cache
        self._patience = Patience()
        self._jobs: dict[Any, Job] = {}  # that lower graphs in other processes, by the key of the calls that wait

    def reset(self) -> None:
        """Drop all graphs, and forget what calls have taught: the next ones capture anew, also what fell back.

        The graphs' memory is given back. Models, optimizers and gradients stay as they are.
        """
        with self._lock.lock:
            for graph in self._cache:
                self._captures.drop(graph)
            self._refusals.begin()
            self._start_anew()

    @property
    def refusals(self) -> list[Fallback]:
        """What runs eagerly, and why."""
        return self._refusals.list

    @property
    def graphs(self) -> list[StepGraph]:
        """The graphs there are, the one unused for longest first."""
        return list(self._cache)

    @property
    def history(self) -> list[str]:
        """Each capture with its cause, for people."""
        return self._captures.history.lines()

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
            options=self._options,
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
                    learn_arguments(graph, self._calls.make(args, kwargs))
                self._check_if_due(graph, args, kwargs)
                return self._run_whole(graph, arguments)
            is_refused = self._refusals.covers(key) or self._waits(key)
            if is_refused and not self._forget_if_edited():
                with releasable(self._lock.lock):
                    return self._plain.run(args, kwargs, arguments)
            call = self._calls.make(args, kwargs)
            graph = self._cache.find(
                call.key, call.arguments, call.given
            )  # numbers may be given now that were in the key
            if graph is not None:
                return self._run_whole(graph, call.arguments)
            with releasable(self._lock.lock):
                return self._call_slowly(call)

    def _run_within_transform(self, args: Any, kwargs: Any) -> Any:
        self._say_for_now({}, within_transform())
        return self.function(*args, **kwargs)

    def _run_whole(self, graph: StepGraph, arguments: list[Tensor]) -> Any:
        """Run a graph; where its kernels run within the call, an interrupt comes before or after."""
        if not graph.has_calls:
            return undisturbed(graph.run, arguments) if graph.is_on_host else graph.run(arguments)
        with releasable(self._lock.lock):
            return undisturbed(graph.run, arguments) if graph.is_on_host else graph.run(arguments)

    def _check_if_due(self, graph: StepGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Every ``check`` calls of a graph, capture again and compare.

        Raises:
            CaptureError: Another graph would be captured now.
        """
        if self.check and not graph.num_runs % self.check:
            with tracing_alone():
                self._captures.check(graph, self._calls.make(args, kwargs))

    def _call_slowly(self, call: StepCall) -> Any:
        """Capture, or run as plain Python if that cannot be, or not now."""
        if self._refusals.covers(call.key) or self._waits(call.key):
            return self._plain.run_call(call)
        error: CaptureError | None = None
        done: Callable[[], Any] | None = None
        try:
            graph, arguments, results = self._captures.capture_objects(call)
            self._jobs.pop(graph.form.key, None)  # as by precompile, which waits for none
            self._patience.note_capture()
            done = functools.partial(graph.finish, arguments, results)
        except NotYet as later:
            self._jobs[call.key] = later.job
            install_later()  # what such calls take is mostly their key
            done = functools.partial(self._plain.run_call, call)
        except NotNow as obstacle:
            self._say_for_now(call.signature, obstacle.error)
            done = functools.partial(self._plain.run_call, call)
        except (EagerFirst, StateMissing, FirstChange, OneShot) as why:
            error = self._patience.is_lost(why, call.key, self._plain.num_unready)
            if error is not None and isinstance(why, StateMissing):
                error = self._with_region(error)
        except CaptureError as refusal:
            error = self._with_region(refusal)
        if done is not None:  # what it raises, as by effects, is the user's own
            return done()
        return self._plain.run_watching(call) if error is None else self._fall_back(call, error)

    def _waits(self, key: Any) -> bool:
        """Whether calls like this one run as plain Python, as their graph is lowered in another process."""
        job = self._jobs.get(key)
        if job is not None and job.is_over:
            self._jobs.pop(key).stop()
            return False
        return job is not None

    def _forget_if_edited(self) -> bool:
        """Try again what was refused if the function has other code; whether it has."""
        if not self._refusals.forget_if_edited():
            return False
        self._captures.begin_anew()
        self._jobs = {}
        return True

    def _replicate(self, found: Found) -> Reducer:
        return replicate(
            self._name,
            found.modules,
            found.optimizers,
            found.tensors,
            None if self.data_parallel is True else self.data_parallel,
            found.scalers,
            shards=self.shard_optimizer,
            shards_parameters=self.shard_parameters,
        )

    def _with_region(self, error: CaptureError) -> CaptureError:
        return with_region(self.function, error)

    def _fall_back(self, call: StepCall, error: CaptureError) -> Any:
        if self.strict:
            raise error
        if error.__cause__ is None:
            self._refuse(call, error)
            return self._plain.run_call(call)
        result = self._plain.run_call(call)  # which may raise as well: then that is what the user is to see
        self._refuse(call, error)
        return result

    def _refuse(self, call: StepCall, error: CaptureError) -> None:
        self._refusals.add(call, error, self._served, is_last=self._captures.is_fruitless)
        if not len(self._cache):
            with contextlib.suppress(CaptureError):  # then there never was a graph
                for optimizer in call.optimizers():
                    move_counts_to_host(optimizer)

    @property
    def _served(self) -> list[Any]:
        """Keys of the calls for which graphs were captured."""
        return [graph.form.key for graph in self._cache]

    def _say_for_now(self, signature: dict[str, str], error: CaptureError) -> None:
        if self.strict:
            raise error from None
        self._refusals.add_for_now(signature, error)

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
            found = self._captures.search(call)
            optimizers = [optimizer for _, optimizer in found.optimizers if not optimizer.state]
            try:
                with pretended_state(optimizers), at_once():
                    graph, _, _ = self._captures.capture(call, is_trial=True)
                    self._jobs.pop(graph.form.key, None)
                    if optimizers:  # it would read the pretended state
                        self._captures.drop(graph)
            except (EagerFirst, FirstChange, StateMissing):
                raise CaptureError(
                    "The step has to run once before it can be captured, as it makes state that it needs.",
                    remedy="Call it once.",
                ) from None
            except OneShot as number:
                raise one_shot_refusal(number) from None
            except NotNow as obstacle:
                raise obstacle.error from None
