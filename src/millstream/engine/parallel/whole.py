"""A step with its collectives in it, as one program: on a GPU one CUDA graph, elsewhere kernel after kernel."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import torch

from millstream._torch.devices.raw_streams import current_stream_handle
from millstream._torch.distributed.shutdown import release_before_shutdown
from millstream._torch.modes.switches import SwitchSettings
from millstream.check import check_plan
from millstream.cost import Costs, KernelCost, Roofline
from millstream.data_parallel.agreement import Agreement
from millstream.data_parallel.board import NotTogetherError
from millstream.data_parallel.communicators import Communicator, communicators_of
from millstream.data_parallel.exchange import Exchange
from millstream.device import DeviceContext, context, guard
from millstream.device.cuda_graphs.capturing import repair
from millstream.engine.cuda.captured import Captured, ProgramPair
from millstream.engine.engine import Engine
from millstream.engine.host.serial_engine import SerialEngine
from millstream.engine.parallel.communicator_trial import Settled, choose_communicator
from millstream.engine.parallel.lockstep import (
    LockstepTrials,
    measure_collectives,
    propose_together,
    recall_together,
    together,
)
from millstream.engine.parallel.watchdog import Watchdog, watchdog_of
from millstream.engine.planning.store import Store, choice_key
from millstream.engine.unchanged import replays_unchanged
from millstream.graph import Candidate, KernelKind, Plan
from millstream.lower import Lowered, Phase
from millstream.lower.segmented.merging import merge
from millstream.lower.segmented.segments import Segments
from millstream.schedule import Scheduling, plan_serial
from millstream.schedule.choose import Found, choose, to_json


def merge_lowered(segments: Segments, executables: Sequence[Engine | None], exchanges: Sequence[Any]) -> Lowered:
    """One program of all segments.

    Raises:
        LoweringError: They cannot be put together.
    """
    lowered = [None if executable is None else executable.lowered for executable in executables]
    some = next(each for each in lowered if each is not None)
    name = some.program.graph.name.rpartition(".")[0]
    program, order = merge(name, segments, [None if each is None else each.program for each in lowered], exchanges)
    visible = frozenset(range(len(program.outputs)))
    seconds = sum(each.seconds for each in lowered if each is not None)
    return Lowered(program, Phase.STEP, visible, seconds, order=order)


def digest_of(exchanges: Sequence[Any], given: Sequence[Any]) -> int:
    """A number, of 32 bits, that processes have in common which exchange the same and are given the same shapes.

    Kernels may be others in each, as where inputs lie otherwise in memory, or each has another share of the state.
    """
    exchanged = [(each.label, each.memory.numel(), str(each.memory.dtype)) for each in exchanges]
    shapes = [(tuple(each.shape), str(each.dtype)) for each in given if isinstance(each, torch.Tensor)]
    return int.from_bytes(hashlib.sha256(repr((exchanged, shapes)).encode()).digest()[:4], "big")


def costs_of(lowered: Lowered, segments: Segments, executables: Sequence[Engine | None]) -> Costs:
    """Return what each segment was measured to cost, and a calculation for what came in between."""
    calculated = Roofline().estimate(lowered.program.graph)
    place_of = {position: place for place, position in enumerate(lowered.order)}
    kernels: list[KernelCost] = list(calculated.kernels)
    position = 0
    for segment, executable in zip(segments.segments, executables, strict=True):
        if executable is not None:
            number = executable.num_kernels
            for index, cost in enumerate(() if executable.costs is None else executable.costs.kernels):
                kernels[place_of[position + index]] = cost
            position += number
        position += len(segment.brings) + len(segment.starts)
    return replace(calculated, kernels=tuple(kernels))


class WholeOnHost(Engine):
    """Runs kernels one after another; collectives are waited for in between.

    Args:
        lowered: Merged.
    """

    name = "serial"

    def __init__(self, lowered: Lowered) -> None:
        super().__init__(lowered, plan_serial(lowered.program.graph))
        check_plan(self.plan)
        self._engine = SerialEngine(lowered, self.plan)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        return self._engine(inputs)

    def release(self) -> None:
        self._engine.release()


class WholeGraph(Engine):
    """Replays one CUDA graph. It is made, and called, in all processes at once.

    Inputs are copied into slots: to read them in place would take a capture for every place, in all processes.

    Args:
        lowered: Merged.
        plan: For its kernels.
        inputs: Of the call that captures.
        copied: Positions of the outputs that callers get as copies of their own.
        costs: Of the kernels.
        candidates: Among which the plan was chosen.
        watchdog: Sees that replays come to an end.
        settled: On which communicator its collectives are.
    """

    name = "graph"

    def __init__(
        self,
        lowered: Lowered,
        plan: Plan,
        inputs: Sequence[Any],
        copied: frozenset[int],
        costs: Costs,
        candidates: tuple[Candidate, ...],
        watchdog: Watchdog,
        settled: Settled,
    ) -> None:
        super().__init__(lowered, plan)
        self._watchdog, self.settled = watchdog, settled
        self._costs, self._candidates = costs, candidates
        self._context: DeviceContext = context(next(iter(lowered.program.devices)))
        self._index = self._context.place.index
        self._captured: Captured | None = Captured(
            lowered,
            plan,
            inputs,
            context=self._context,
            family=ProgramPair(),
            copied=copied,
            fixed_state=True,
            pool=None,
        )
        release_before_shutdown(self, group_of(lowered))

    @property
    def costs(self) -> Costs:
        return self._costs

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self._candidates

    @property
    def is_captured(self) -> bool:
        return self._captured is not None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        captured = self._captured
        assert captured is not None, "nobody agrees to replay what is released"
        with self._context.graphs.lock:
            stream = current_stream_handle(self._index)
            if stream != self._context.graphs.stream_handle:
                self._context.graphs.enter()
            if stream not in captured.streams:
                captured.serve(torch.cuda.current_stream(self._index))
            if torch.cuda.current_device() == self._index:
                return self._run(captured, inputs)
            with guard(self._context.place):
                return self._run(captured, inputs)

    @contextmanager
    def replays_unchanged(self) -> Iterator[Callable[[], None]]:
        """Give a function that replays the graph on what it holds; put back what it wrote. In all processes at once."""
        captured = self._captured
        assert captured is not None, "nobody agrees to replay what is released"
        with self._context.graphs.lock, guard(self._context.place):
            self._context.graphs.enter()
            captured.serve(torch.cuda.current_stream(self._index))
            generator = torch.cuda.default_generators[self._index]
            with replays_unchanged(self.lowered.program, captured.written, generator, captured.replay) as replay:
                yield replay

    def _run(self, captured: Captured, inputs: list[Any]) -> list[Any]:
        outputs = captured.run(inputs)
        self._watchdog.watch(self._context)
        return outputs

    def release(self) -> None:
        self._captured = None


def capture_together(
    agreement: Agreement,
    lowered: Lowered,
    costs: Costs,
    inputs: Sequence[Any],
    scheduling: Scheduling,
    copied: frozenset[int],
    switches: SwitchSettings,
) -> WholeGraph:
    """Choose a plan in all processes, and capture it; memory holds what it held before, also where plans were tried.

    The first process says which candidates there are, all plan, capture and time them, and the slowest counts.

    Raises:
        NotTogetherError: Some process could not capture it, or not under ``switches``, for which it was lowered.
        DataParallelError: Some process is gone.
    """
    program, group = lowered.program, group_of(lowered)
    place = context(next(iter(program.devices)))
    try:
        with place.graphs.lock, guard(place.place):
            with communicators_of(group).on(None):
                costs = measure_collectives(agreement, place, program, costs)
                best, candidates = _choose(agreement, lowered, costs, inputs, place, scheduling, copied)
            check_plan(best.plan)
            settled = _settle(agreement, lowered, best.plan, inputs, place, scheduling, copied)
            return together(
                agreement,
                lambda: WholeGraph(
                    lowered, best.plan, inputs, copied, costs, candidates, watchdog_of(agreement), settled
                ),
                switches,
            )
    except NotTogetherError:
        with place.graphs.lock:
            repair(place)
        raise


def _choose(
    agreement: Agreement,
    lowered: Lowered,
    costs: Costs,
    inputs: Sequence[Any],
    place: DeviceContext,
    scheduling: Scheduling,
    copied: frozenset[int],
) -> Found:
    """Choose as before, if the first process has chosen for this program and so many processes; otherwise by trials."""
    program, size, is_first = lowered.program, agreement.board.size, agreement.board.rank == 0
    store, key = Store(place.torch_device), f"{choice_key(program, scheduling)} of {size}"
    noted = store.load_choice(key) if is_first else None
    found = recall_together(agreement, noted, program.graph, costs, scheduling)
    if found is not None:
        return found

    def attempt(plan: Plan) -> Captured:
        return _capture(lowered, plan, inputs, place, copied)

    candidate_plans = propose_together(agreement, program.graph, costs, scheduling)
    trials = LockstepTrials(agreement, attempt, candidate_plans[0].plan, place, program)
    found = choose(candidate_plans, trials, inf)
    if trials.error is not None:
        repair(place)
    elif is_first:
        store.save_choice(key, to_json(*found))
    if trials.ran:
        del trials
        torch.cuda.empty_cache()
    return found


def _settle(
    agreement: Agreement,
    lowered: Lowered,
    plan: Plan,
    inputs: Sequence[Any],
    place: DeviceContext,
    scheduling: Scheduling,
    copied: frozenset[int],
) -> Settled:
    """Choose the communicator: as before, if the first process has chosen for this program; otherwise by trials."""
    program, exchanges = lowered.program, exchanges_of(lowered)
    store = Store(place.torch_device)
    key = f"{choice_key(program, scheduling)} of {agreement.board.size}, communicator"
    known = communicators_of(exchanges[0].group)

    def attempt(communicator: Communicator | None) -> Captured:
        with known.on(communicator):
            return _capture(lowered, plan, inputs, place, copied)

    trials = LockstepTrials[Communicator | None](agreement, attempt, None, place, program)
    settled = choose_communicator(agreement, exchanges, trials, store.load_choice(key))
    if trials.error is not None:
        repair(place)
    elif trials.ran and agreement.board.rank == 0:
        store.save_choice(key, settled.noted)
    if trials.ran:
        torch.cuda.empty_cache()
    return settled


def _capture(
    lowered: Lowered, plan: Plan, inputs: Sequence[Any], place: DeviceContext, copied: frozenset[int]
) -> Captured:
    """Capture it in memory of its own, to be tried."""
    return Captured(
        lowered, plan, inputs, context=place, family=ProgramPair(), copied=copied, fixed_state=True, pool=None
    )


def exchanges_of(lowered: Lowered) -> list[Exchange]:
    """The collectives of a merged program, in the order of its kernels."""
    steps = zip(lowered.program.graph.kernels, lowered.program.calls, strict=True)
    issued: list[Any] = [call.target for kernel, call in steps if kernel.kind is KernelKind.COLLECTIVE]
    return [each.__self__ for each in issued]  # methods of theirs


def group_of(lowered: Lowered) -> Any:
    """The process group of a merged program's collectives."""
    return exchanges_of(lowered)[0].group
