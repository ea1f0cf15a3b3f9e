"""Measure kernels on a CPU, and choose between several threads and the operators' own.

**Contract**
- Nothing is planned where the longest chain takes nearly all of the time: chains cost nothing but a look.
- Nothing is tried unless a simulated plan is faster by what ``ON_CPU`` demands, first if kernels took no longer with
  their part of the intra-op threads, then as they were measured with it.
- Trials work on the caller's inputs; afterwards memory and generator are what they were. They end after a bounded time.
- Several threads must give the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

import torch

from millstream.cost import Costs, KernelCost, Roofline
from millstream.engine.arena import bind_arena
from millstream.engine.cpu.threads_native import Runner
from millstream.engine.cpu.worker_pool import intra_op_threads
from millstream.engine.plan_source import compile_plan
from millstream.engine.unchanged import bits_of, unchanged, written
from millstream.graph import Candidate, Plan
from millstream.lower import Lowered
from millstream.program import Program
from millstream.schedule import Scheduling, assign_offsets
from millstream.schedule.choose import ON_CPU, CandidatePlan, choose, propose_threads, take_predicted

MEASURED_CALLS = 2  # the first one warms up
MOST_SAMPLES, LEAST_SAMPLES = 15, 3  # pairs of timed runs
SETTLE_S = 0.008  # before each: so long OpenMP's threads, and this engine's, look for work after what ran before
TIMED_RUNS = 3  # the median of which is a sample
SHARE_OF_COMPILING, LEAST_S = 0.1, 0.3  # trials end after this part of the time that compiling took, or this many s


class Meter:
    """Notes the least time that each kernel took, in ns, by kernel id."""

    def __init__(self, num_kernels: int) -> None:
        self.least_ns: list[int | None] = [None] * num_kernels

    def observe(self, kernel: int, launch: Callable[[], Any], updated: tuple[torch.Tensor, ...]) -> Any:  # noqa: ARG002
        """Launch a kernel for ``compile_plan``."""
        start = time.perf_counter_ns()
        result = launch()
        taken_ns = max(time.perf_counter_ns() - start, 1)
        before = self.least_ns[kernel]
        self.least_ns[kernel] = taken_ns if before is None else min(before, taken_ns)
        return result


class CpuPlanner:
    """Finds the plan for one program on the CPU.

    Args:
        lowered: The program.
        serial: Its plan on one stream.
        scheduling: What the user asked for.
        num_streams: At most so many.

    Attributes:
        meter: Of serial runs with all intra-op threads.
        costs: What the choice went by, or ``None`` before.
        candidates: What it was made from, empty before.
        num_threads: Intra-op threads for each stream of what was chosen.
    """

    def __init__(self, lowered: Lowered, serial: Plan, scheduling: Scheduling, num_streams: int) -> None:
        self.meter = Meter(len(serial.graph.kernels))
        self.costs: Costs | None = None
        self.candidates: tuple[Candidate, ...] = ()
        self.num_threads = torch.get_num_threads()
        self._lowered, self._serial, self._scheduling, self._num_streams = lowered, serial, scheduling, num_streams

    def predict(self) -> Plan:
        """Return the plan for the streams asked for, by what was measured."""
        best, self.candidates = take_predicted(self._propose(self.meter))
        return best.plan

    def choose(self, inputs: Sequence[Any], serial: Runner, prepare: Callable[[Plan, int], Runner]) -> Plan:
        """Choose between the serial plan and one on several streams.

        Args:
            inputs: Of the present call.
            serial: Runs the serial plan.
            prepare: Compiles another one, to be run with so many intra-op threads a stream.
        """
        costs = Costs(tuple(KernelCost(least or 0) for least in self.meter.least_ns))
        if ON_CPU.leaves_nothing_to_gain(self._serial.graph, costs, self._serial_ns):
            return self._serial
        candidate_plans, serial_costs = self._propose(self.meter), self.costs
        share = max(self.num_threads // self._num_streams, 1)
        if any(each.is_promising(candidate_plans[0], ON_CPU) for each in candidate_plans[1:]):
            with intra_op_threads(share):
                candidate_plans = self._propose(measure_kernels(self._lowered.program, self._serial, inputs))
        trial = CpuTrial(self._lowered, inputs, serial, prepare, share)
        best, self.candidates = choose(candidate_plans, trial, inf, ON_CPU)
        if best is candidate_plans[0]:
            self.costs = serial_costs  # not those of kernels with a part of the threads, which run no more
            return self._serial
        self.num_threads = share
        return best.plan

    @property
    def _serial_ns(self) -> int:
        return sum(filter(None, self.meter.least_ns))

    def _propose(self, meter: Meter) -> list[CandidatePlan]:
        estimate = Roofline().estimate(self._serial.graph)
        share = 1 / self._num_streams  # of the cores, and of what else they have in common
        kernels = (
            KernelCost(cost.duration_ns if measured is None else measured, share, share)
            for measured, cost in zip(meter.least_ns, estimate.kernels, strict=True)
        )
        self.costs = replace(estimate, kernels=tuple(kernels))
        return propose_threads(self._serial, self._serial_ns, self.costs, self._scheduling, self._num_streams)


def measure_kernels(program: Program, serial: Plan, inputs: Sequence[Any]) -> Meter:
    """Time the kernels one after another with the present number of intra-op threads; nothing of the caller's changes.

    Args:
        program: What is run.
        serial: Its plan on one stream.
        inputs: Of the present call.
    """
    meter = Meter(len(serial.graph.kernels))
    bound = bind_arena(program, assign_offsets(serial))
    run = compile_plan(program, serial, bound, observe=meter.observe)
    with unchanged(program, written(program, inputs), torch.default_generator) as rewind:
        for _ in range(MEASURED_CALLS):
            rewind()
            run(list(inputs))
    return meter


@dataclass(frozen=True)
class CpuTrial:
    """Times a plan in turn with the serial one, or with another that is there to compare with.

    Attributes:
        lowered: What is run.
        inputs: Of the caller, who finds them as they were.
        serial: Runs the serial plan.
        prepare: Compiles another one.
        share: Intra-op threads for each of its streams.
    """

    lowered: Lowered
    inputs: Sequence[Any]
    serial: Runner
    prepare: Callable[[Plan, int], Runner]
    share: int

    def compare(self, candidate: CandidatePlan, best: CandidatePlan) -> tuple[int, int] | str:  # noqa: ARG002
        try:
            return self._compare(self.prepare(candidate.plan, self.share))
        except Exception as error:  # noqa: BLE001  whatever a kernel raises, it is for the caller's own run
            return f"failed: {error}"

    def _compare(self, threads: Runner) -> tuple[int, int] | str:
        program, inputs = self.lowered.program, self.inputs
        deadline = time.monotonic() + max(SHARE_OF_COMPILING * self.lowered.seconds, LEAST_S)

        def run_serial() -> list[Any]:
            return self.serial(list(inputs))

        def run_threads() -> list[Any]:
            with intra_op_threads(self.share):
                return threads(list(inputs))

        changed = written(program, inputs)
        bits = []
        for run in (run_serial, run_threads):
            with unchanged(program, changed, torch.default_generator):
                bits.append([bits_of(value) for value in (*run(), *changed)])
        if not all(map(torch.equal, *bits)):
            return "rounds otherwise"
        pairs: list[tuple[int, int]] = []
        with unchanged(program, changed, torch.default_generator) as rewind:
            while len(pairs) < LEAST_SAMPLES or (len(pairs) < MOST_SAMPLES and time.monotonic() < deadline):
                pairs.append((settled_ns(run_threads, rewind), settled_ns(run_serial, rewind)))
        own_ns, base_ns = (round(median(times)) for times in zip(*pairs, strict=True))
        return own_ns, base_ns


def settled_ns(run: Callable[[], Any], rewind: Callable[[], None]) -> int:
    """Time a call among others of its kind, as it is used: threads of the other kind have gone to sleep by then.

    Args:
        run: The call.
        rewind: Called before each, and not timed.
    """
    end, is_first = time.perf_counter() + SETTLE_S, True
    while is_first or time.perf_counter() < end:
        rewind()
        run()
        is_first = False
    times = []
    for _ in range(TIMED_RUNS):
        rewind()
        start = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - start)
    return round(median(times))
