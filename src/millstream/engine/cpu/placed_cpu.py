"""Several devices in one program, on a CPU: devices are virtual, and all else is real.

Each device has workers and an arena of its own, and what one needs of another is copied. So everything but the speed of
a second device shows on a CPU. Calls that find the workers busy run on one device. What one device has no memory for is
placed before it runs, by calculated costs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch

from millstream._torch.tensors import real_tensors
from millstream.cost import Costs, KernelCost, Link, Rate, Roofline
from millstream.engine.arena import bind_arenas
from millstream.engine.cpu.cpu_choice import CpuTrial, measure_kernels
from millstream.engine.cpu.threads_native import Runner, compile_threads
from millstream.engine.cpu.worker_pool import WorkerPool, intra_op_threads, worker_pool
from millstream.engine.engine import Engine
from millstream.engine.host.serial_engine import SerialEngine
from millstream.engine.placed.placed_engine import PlacedEngine
from millstream.engine.placed.placed_program import find_constraints, place_program
from millstream.errors import ArgumentError, PlanError
from millstream.graph import CHOSEN, Plan
from millstream.lower import Lowered
from millstream.placement import Machine, PlacedPlan, check_streams, place
from millstream.program import Program
from millstream.schedule import Scheduling, plan_serial
from millstream.schedule.choose import ON_CPU, assess, choose

LINK_BYTES, LINK_COPIES = 8 << 20, 5  # what is copied to see how quick that is, and how often
LINK_LATENCY_NS = 5_000  # a thread that waits is told of a copy within this, in orders of magnitude


@functools.cache
def cpu_link() -> Link:
    """Return what a copy costs on this machine: measured once, in some milliseconds."""
    times = []
    with real_tensors():  # it may be asked for while PyTorch compiles
        source = torch.zeros(LINK_BYTES, dtype=torch.uint8)
        target = torch.empty_like(source)
        for _ in range(LINK_COPIES):
            start = time.perf_counter_ns()
            target.copy_(source)
            times.append(time.perf_counter_ns() - start)
    rate = Rate(0, LINK_LATENCY_NS, LINK_BYTES * 1e9 / min(times))
    return Link("memory", (rate,), "measured", measured_devices=2)


class PlacedOnCpu(PlacedEngine):
    """Runs a program on virtual devices of a CPU.

    Args:
        lowered: What to run, on the CPU.
        one: Runs it on one device; ``None`` where it has no memory for that.
        devices: Names; the first is the user's.
        scheduling: Streams are those of each device.
        asked: The engine that the user wants, whatever it takes: ``threads`` or ``serial``; ``None`` leaves it open.
        memory_bytes: That temporaries and outputs may take, for each device; ``None`` sets no bounds.

    Raises:
        ArgumentError: They do not fit.
    """

    several = "threads"

    def __init__(
        self,
        lowered: Lowered,
        one: Engine | None,
        devices: Sequence[str],
        scheduling: Scheduling,
        *,
        asked: str | None,
        memory_bytes: tuple[int, ...] | None,
    ) -> None:
        super().__init__(lowered, one, asked=asked)
        most = torch.get_num_threads()
        num_streams = scheduling.streams or max(most // len(devices), 1)
        self._machine = functools.partial(Machine, tuple(devices), streams=num_streams, memory_bytes=memory_bytes)
        self._num_threads = max(most // (len(devices) * num_streams), 1)
        self._first = None if one else self._place(Roofline().estimate(lowered.program.graph))

    def _find_plan(self, inputs: Sequence[Any]) -> None:
        one = self.one
        if one is None:
            assert self._first is not None, "it was placed at the start"
            made = self._make(self._first)
            self._candidates = (assess(made.plan, self._first.costs).describe(CHOSEN),)
            self._choose(made, self._first.costs)
            return
        self.plan, self.name = one.plan, one.name  # as it has settled
        costs = self._find_costs(one, inputs)
        if self._asked is None and ON_CPU.leaves_nothing_to_gain(self.lowered.program.graph, costs, costs.total_ns):
            return
        try:
            placed = self._place(costs)
        except (ArgumentError, PlanError) as error:  # one device does as well
            self.notes.append(f"{self.lowered.program.graph.name} runs on one device: {error}")
            return
        if len(placed.devices) < 2:
            return
        made = self._make(placed)
        first, candidate = assess(one.plan, costs), assess(made.plan, placed.costs)
        if self._asked:
            self._candidates = first.describe("not asked for"), candidate.describe(CHOSEN)
        else:
            trial = CpuTrial(self.lowered, inputs, one, lambda plan, share: made, self._num_threads)
            best, self._candidates = choose([first, candidate], trial, inf, ON_CPU)
            if best is first:
                return
        self._choose(made, placed.costs)

    def _place(self, costs: Costs) -> PlacedPlan:
        program = self.lowered.program
        return place(program.graph, costs, self._machine(link=cpu_link()), find_constraints(program))

    def _make(self, placed: PlacedPlan) -> _PlacedThreads | SerialEngine:
        check_streams(placed.plan)
        lowered = replace(self.lowered, program=place_program(self.lowered.program, placed.placement))
        serial = SerialEngine(lowered, plan_serial(placed.graph))
        if self._asked == "serial":
            return serial
        return _PlacedThreads(lowered.program, placed.plan, self._num_threads, self.one or serial)

    def _find_costs(self, one: Engine, inputs: Sequence[Any]) -> Costs:
        """Return what the kernels were measured to take on one device."""
        if one.costs is not None:
            return one.costs
        graph = self.lowered.program.graph
        with intra_op_threads(self._num_threads):
            meter = measure_kernels(self.lowered.program, plan_serial(graph), inputs)
        return replace(Roofline().estimate(graph), kernels=tuple(KernelCost(ns or 0) for ns in meter.least_ns))


class _PlacedThreads:
    """Runs a placed plan on threads; a call that finds them busy goes to another engine.

    Attributes:
        plan: What it runs.
    """

    def __init__(self, program: Program, plan: Plan, num_threads: int, otherwise: Engine) -> None:
        self.plan = plan
        self._program, self._num_threads, self._otherwise = program, num_threads, otherwise
        self._run: Runner | None = None
        self._pool: WorkerPool | None = None  # that the run was made for

    def __call__(self, inputs: list[Any]) -> list[Any]:
        pool = worker_pool()
        if not pool.busy.acquire(blocking=False):
            return self._otherwise(inputs)
        try:
            if self._run is None or self._pool is not pool:
                bound = bind_arenas(self._program, self.plan)
                self._run, self._pool = compile_threads(self._program, self.plan, bound, pool, self._num_threads), pool
            with intra_op_threads(self._num_threads):
                return self._run(inputs)
        except BaseException:
            self._run = None  # its signals may stand anyhow
            raise
        finally:
            pool.busy.release()

    def release(self) -> None:
        """Give the arenas back; the next call takes them again."""
        self._run = None
