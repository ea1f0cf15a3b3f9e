"""A graph for a call that none serves: look back at those there are, trace, build, run, keep."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from millstream._torch.distributed.wrappers import watch_wrapping
from millstream._torch.modes.full_collections import no_full_collections
from millstream._torch.modes.switches import present
from millstream.capture.guards import native
from millstream.capture.guards.recheck import compare, listing_of
from millstream.capture.state.discover import Found, discover
from millstream.capture.state.signature import settings_of
from millstream.capture.step.calls import Calls, StepCall, code_of, specs_of
from millstream.capture.step.capturing.bind import StepState
from millstream.capture.step.capturing.first_run import build_and_run
from millstream.capture.step.capturing.retracing import Retracing
from millstream.capture.step.graph import Build, GraphCache, StepGraph
from millstream.capture.step.plain.plain_runs import PlainRuns
from millstream.capture.step.recapture import History, cause_of
from millstream.capture.step.symbolic_sizes import ChangingSizes, NoSymbols, SizesFixed, check_symbols
from millstream.capture.trace.patches.optimizers import CountsOnDevice, numbers_of
from millstream.capture.trace.refusing.unsupported import check_function, check_modes, check_used, find_unsupported
from millstream.capture.trace.request import EagerFirst, NoGraph
from millstream.capture.trace.tracer import tracing_alone
from millstream.data_parallel.reduced_run import adopt_sharded
from millstream.errors import CaptureError, FailingStepCaptureError, warn_user
from millstream.lower import ask_early
from millstream.progress import phase, showing

Captured = tuple[StepGraph, list[Tensor], list[Tensor]]
"""A graph, the complete arguments of its call, and its results."""


class Captures:
    """Captures graphs of one step, and learns from those that do not fit.

    Args:
        calls: Of the step.
        plain: How it runs as plain Python, which may have to come first.
        build: Makes an executable of a traced graph.
        max_graphs: So many are kept; the one unused for longest goes first.
        is_checked: Whether they are compared with what would be captured later.
        dynamic: As for ``ChangingSizes``.
        options: Of TorchInductor, the user's.

    Attributes:
        cache: The graphs there are.
        history: Why each was captured.
    """

    def __init__(
        self,
        *,
        calls: Calls,
        plain: PlainRuns,
        build: Build,
        max_graphs: int,
        is_checked: bool,
        dynamic: bool | None,
        options: Mapping[str, Any],
    ) -> None:
        self.cache = GraphCache()
        self.history = History(calls.name)
        self._calls = calls
        self._plain = plain
        self._build = build
        self._max_graphs = max_graphs
        self._state = StepState(is_checked=is_checked, options=options)
        self._sizes = ChangingSizes(dynamic)
        self._num_fruitless = 0
        self._why = "Its arguments have another structure, shape or dtype every time."

    @property
    def is_fruitless(self) -> bool:
        """Whether one graph after another was captured that hardly served again."""
        return self._num_fruitless > 2 * self._max_graphs

    def begin_anew(self) -> None:
        """The function was edited: what came before counts no more."""
        self._num_fruitless = 0

    def drop(self, graph: StepGraph) -> None:
        """Remove a graph, and give back its memory."""
        self.cache.drop(graph)
        self._state.forget(self.cache)
        graph.release()

    def search(self, call: StepCall) -> Found:
        """What a call reaches; what the function's own code uses of it can be captured."""
        found = call.search()
        if not found.scalers:
            adopt_sharded(module for _, module in found.modules)
        if unsupported := [*find_unsupported(found)]:
            check_used(discover(call.roots(), {code_of(call.function)}), unsupported)
        return found

    def capture_objects(self, call: StepCall) -> Captured:
        """Capture; where that cannot be with objects taken apart, as they may be changed, with these very objects."""
        try:
            return self.capture(call)
        except FailingStepCaptureError:
            raise
        except CaptureError as error:
            whole = self._calls.keep_whole(call)
            if whole is None:
                raise
            try:
                return self.capture(whole)
            except CaptureError:
                self._calls.open_again(call.opened)
                raise error from error.__cause__

    def capture(self, call: StepCall, *, is_trial: bool = False) -> Captured:
        """Trace, build, run and keep a graph for ``call``; a failure, or a trial, leaves everything as it was.

        Numbers that change are inputs of the graph, if that can be; it is for those of the call otherwise.
        """
        with showing(self._calls.name, "captured"):
            made = None
            while made is None:
                try:
                    made = self._capture_at_sizes(call, is_trial=is_trial)
                except CaptureError:
                    if not self._state.keep_reads():
                        raise
        self.history.note(call.cause, made[0].capture_seconds)
        return made

    def _capture_at_sizes(self, call: StepCall, *, is_trial: bool) -> Captured:
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

    @no_full_collections()
    def _capture_for(self, call: StepCall, dimensions: dict[int, frozenset[int]], *, is_trial: bool) -> Captured:
        counts = CountsOnDevice()
        watch_wrapping(self)
        try:
            with tracing_alone():
                found = self.search(call)
                check_function(call.function)
                check_modes()
                if self._plain.is_unready(found, is_trial=is_trial):
                    raise EagerFirst
                self._look_back(call, found)
                ask_early(call.arguments)
                native.begin_early(call.arguments)
                phase("tracing")
                graph = self._trace(call, found, counts, dimensions)
                if self._calls.hold_among(call, graph.containers):
                    graph = self._trace(call, call.search(), counts, {})
            arguments, results = build_and_run(self._build, call, graph, is_trial=is_trial)
        except BaseException:
            counts.undo()
            raise
        counts.settle()
        learn_arguments(graph, call)
        self.cache.keep(graph)
        if present() is not settings_of(call.key):  # another thread has set one: it may hold for both, in parts
            self.cache.drop(graph)
            self._state.forget(self.cache)
        while len(self.cache) > self._max_graphs:
            self.drop(next(iter(self.cache)))
        self._calls.hold(each for graph in self.cache for each in graph.containers)
        return graph, arguments, results

    def _trace(
        self, call: StepCall, found: Found, counts: CountsOnDevice, dimensions: dict[int, frozenset[int]]
    ) -> StepGraph:
        start = time.perf_counter()
        request, traced = Retracing(self._state, call, counts, self._plain.replica, dimensions).record(found)
        if traced.sizes is not None:
            fixed, names = traced.sizes.fixed(), list(call.signature)
            if advice := self._sizes.note_fixed(call.key, call.arguments, names, fixed):
                warn_user(f"{self._calls.name}: {advice}")
            if not traced.sizes.is_changing:
                raise SizesFixed
            check_symbols(request, traced)
        return self._state.assemble(call, request, traced, time.perf_counter() - start)

    def check(self, graph: StepGraph, call: StepCall) -> None:
        """Capture again, and compare with the graph that serves a call.

        Raises:
            CaptureError: Another graph would be captured now.
        """
        dimensions = {} if graph.sizes is None else graph.sizes.dimensions
        again = Retracing(self._state, call, CountsOnDevice(), self._plain.replica, dimensions, graph)
        try:
            request, traced = again.record(call.search())
        except NoGraph:  # as in the last call before one that takes another branch: the next check will tell
            return
        compare(graph.listing, listing_of(request, traced), self._calls.name)

    def _look_back(self, call: StepCall, found: Found) -> None:
        """Learn from graphs that do not fit: drop dead ones, lift what changes, stop if it leads nowhere."""
        candidates = self.cache.candidates(call.key)
        call.cause = call.cause or cause_of(candidates, self.cache, call)  # before any is dropped
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
                self.drop(graph)
        last = self.cache.last_used
        self._num_fruitless = self._num_fruitless + 1 if last is not None and last.num_runs < 3 else 0
        if self.is_fruitless:
            error = CaptureError(
                f"{self._num_fruitless} graphs in a row were captured that hardly served again. {self._why}",
                remedy="Pass what changes as a tensor argument, keep shapes constant, or raise max_graphs.",
            )
            if (cause := self._state.compared) is not None:
                error = CaptureError(f"{error.reason} {cause.reason}", where=cause.where, remedy=cause.remedy)
            raise error


def learn_arguments(graph: StepGraph, call: StepCall) -> None:
    """Let compiled code compare the arguments of later calls with these, if it checks the rest, too."""
    if graph.guards.quick is not None and graph.sizes is None:
        graph.specs = specs_of(call)
        graph.kinds = tuple(map(type, call.args)) if call.given else ()
