"""Capturing and timing graphs with collectives in them: all processes do the same at the same time.

What one of them finds out alone (that memory is short, how long a replay took) it tells the others before anyone goes
on, and what follows is decided from what all have said: so it is the same everywhere.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

import torch

from millstream._torch.modes.switches import SwitchSettings, present
from millstream.cost import Costs, KernelCost
from millstream.data_parallel.agreement import Agreement
from millstream.data_parallel.board import NotTogetherError
from millstream.device import DeviceContext
from millstream.device.cuda_graphs.capturing import capture
from millstream.engine.cuda.captured import Captured
from millstream.engine.planning.trial import Trials, Way, compare
from millstream.graph import KernelGraph, KernelKind
from millstream.program import Program
from millstream.schedule import Scheduling, peak_bytes
from millstream.schedule.choose import CandidatePlan, Found, PlanRecipe, from_json, plan_by, propose

WHAT = "capture a step with its collectives"
"""What others are waited for to do."""

REPEATS, SAMPLES = 4, 5
STEPS = 4  # are run in a row when two ways to run them are compared: so the host may be ahead, as it is in training
SHARE_OF_BLOCKS = 0.2  # of the multiprocessors of an H100: NCCL takes up to 24 of 132

T = TypeVar("T")


def together(agreement: Agreement, act: Callable[[], T], switches: SwitchSettings | None = None) -> T:
    """Do what exchanges nothing and may fail for want of memory or because it cannot be captured, in all processes.

    Args:
        agreement: Of the processes.
        act: What to do.
        switches: PyTorch's, if it counts that they are these afterwards: another thread may set one meanwhile.

    Raises:
        NotTogetherError: It has failed in one.
    """
    try:
        result = act()
        if switches is not None and present() is not switches:
            raise RuntimeError("another thread has set one of PyTorch's switches meanwhile")
    except (RuntimeError, torch.AcceleratorError) as error:  # want of memory, what cannot be captured
        agreement.board.fail()
        raise NotTogetherError(f"rank {agreement.board.rank} could not {WHAT}: {error}".partition("\n")[0]) from None
    agreement.board.gather(0, WHAT)
    return result


class LockstepTrials(Trials[Way]):
    """Times plans in all processes; the slowest counts.

    Args:
        agreement: Of the processes.
        capture: As of ``Trials``.
        serial: Likewise.
        context: Likewise.
        program: Likewise.
    """

    def __init__(
        self,
        agreement: Agreement,
        capture: Callable[[Way], Captured],
        serial: Way,
        context: DeviceContext,
        program: Program,
    ) -> None:
        super().__init__(capture, serial, context, program)
        self._agreement = agreement

    def _prepare(self, stack: ExitStack, way: Way, best: Way) -> tuple[Captured, Captured, Callable[[], None]]:
        prepare = super()._prepare
        return together(self._agreement, lambda: prepare(stack, way, best))

    def _compare(
        self, graph: torch.cuda.CUDAGraph, base: torch.cuda.CUDAGraph, rewind: Callable[[], None]
    ) -> tuple[int, int]:
        gather = self._agreement.board.gather
        own_ns, base_ns = compare(graph, base, rewind, lambda number: gather(number, WHAT)[0])
        return max(gather(own_ns, WHAT)), max(gather(base_ns, WHAT))


def propose_together(
    agreement: Agreement, graph: KernelGraph, costs: Costs, scheduling: Scheduling
) -> list[CandidatePlan]:
    """The first process's candidates, each made again for this process's graph, whose kernels may be others.

    Raises:
        NotTogetherError: Some process could not plan.
        DataParallelError: Some process is gone.
    """
    own = together(agreement, lambda: propose(graph, costs, scheduling))
    told = pickle.dumps([(each.recipe, each.predicted_ns) for each in own])
    recipes: list[tuple[PlanRecipe | None, int]] = pickle.loads(agreement.board.share(told, WHAT))  # noqa: S301  our own
    budget = scheduling.budget_bytes(own[0].plan)
    made = {each.recipe: each.plan for each in own}

    def follow(recipe: PlanRecipe | None, predicted_ns: int) -> CandidatePlan:
        plan = made[recipe] if recipe is None or recipe in made else plan_by(recipe, graph, costs, budget)
        return CandidatePlan(plan, peak_bytes(plan), predicted_ns, recipe)

    return together(agreement, lambda: [follow(*each) for each in recipes])


def recall_together(
    agreement: Agreement, noted: Mapping[str, Any] | None, graph: KernelGraph, costs: Costs, scheduling: Scheduling
) -> Found | None:
    """Return what the first process chose before, as it has noted it, made again in each.

    ``None`` where one of them cannot.

    Args:
        agreement: Of the processes.
        noted: By the first process; what others give does not count.
        graph: This process's.
        costs: Of its kernels: of another process, or measured again, and so not just those that were chosen by.
        scheduling: What the user asks of the schedule.

    Raises:
        NotTogetherError: Some process could not plan.
        DataParallelError: Some process is gone.
    """
    told = json.loads(agreement.board.share(json.dumps(noted or {}).encode(), WHAT))
    found = together(agreement, lambda: from_json(told, graph, costs, scheduling, exactly=False))
    return found if all(agreement.board.gather(found is not None, WHAT)) else None


def measure_collectives(agreement: Agreement, context: DeviceContext, program: Program, costs: Costs) -> Costs:
    """Costs with what the collectives of a program were measured to take, each captured a few times in a row.

    Args:
        agreement: Of the processes.
        context: Of the device, which is current.
        program: Merged. What the collectives' own memory holds is lost.
        costs: Of all kernels.

    Raises:
        NotTogetherError: Some process could not capture one.
    """
    kernels, known = list(costs.kernels), dict[tuple[Any, ...], KernelCost]()
    limits = torch.cuda.get_device_properties(context.torch_device)
    bandwidth = 2 * limits.memory_clock_rate * 1e3 * limits.memory_bus_width / 8  # bytes/s, double data rate
    for kernel, call in zip(program.graph.kernels, program.calls, strict=True):
        if kernel.kind is not KernelKind.COLLECTIVE:
            continue
        issued: Any = call.target  # the method of a collective
        exchange = issued.__self__
        exchange.held.make_ready()
        memory = exchange.memory
        key = (memory.numel(), memory.dtype, exchange.operation)
        if key not in known:
            memory.zero_()
            launch = call.target
            given = exchange.memories
            graph = together(agreement, lambda launch=launch, given=given: _repeated(context, launch, given))
            times = [_replay_ns(graph) for _ in range(SAMPLES + 1)][1:]
            duration_ns = max(1, *agreement.board.gather(round(median(times) / REPEATS), WHAT))
            memory_share = min(1.0, kernel.num_bytes * 1e9 / (duration_ns * bandwidth)) if bandwidth else 1.0
            known[key] = KernelCost(duration_ns, SHARE_OF_BLOCKS, memory_share)
        kernels[kernel.id] = known[key]
    return replace(costs, kernels=tuple(kernels))


def time_steps(agreement: Agreement, one: Callable[[], Any], other: Callable[[], Any]) -> tuple[int, int]:
    """Time two ways to run a step, in turn, a few steps each; return ns of one step, of the slowest process."""
    pairs = [(_steps_ns(one), _steps_ns(other)) for _ in range(SAMPLES + 1)][1:]
    first, second = (round(median(times)) for times in zip(*pairs, strict=True))
    return max(agreement.board.gather(first, WHAT)), max(agreement.board.gather(second, WHAT))


def _repeated(
    context: DeviceContext, launch: Callable[..., Any], given: Sequence[torch.Tensor]
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with capture(context, graph):
        for _ in range(REPEATS):
            launch(*given)
    return graph


def _replay_ns(graph: torch.cuda.CUDAGraph) -> float:
    return _timed_ns(graph.replay)


def _steps_ns(run: Callable[[], Any]) -> float:
    def steps() -> None:
        for _ in range(STEPS):
            run()

    return _timed_ns(steps) / STEPS


def _timed_ns(act: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    act()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e6
