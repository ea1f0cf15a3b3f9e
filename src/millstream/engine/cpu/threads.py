"""The threads engine: on a CPU, the caller's thread and some workers are the streams of a plan.

What a kernel takes is not known before it runs, so the first calls run it serially and measure; the next one plans.
Where the user asked for this engine, that is all. Otherwise the plan must show that it is worth it (``cpu_choice``),
and if it does not, this engine is the serial one.

The intra-op threads that the caller has are divided among the streams, so that there are never more than it wants.
Where that changes a result in its last bit, because an operator sums its parts in another order, an engine that was not
asked for stays serial. One that was asked for gives what the serial one gives with its number of intra-op threads.
"""

from __future__ import annotations

from typing import Any

import torch

from millstream.cost import Costs
from millstream.engine.arena import Arena, bind_arena
from millstream.engine.cpu.cpu_choice import MEASURED_CALLS, CpuPlanner
from millstream.engine.cpu.threads_native import Runner, compile_threads
from millstream.engine.cpu.worker_pool import WorkerPool, intra_op_threads, worker_pool
from millstream.engine.engine import Engine
from millstream.engine.host.serial_engine import SerialEngine
from millstream.engine.plan_source import CompiledPlan, compile_plan
from millstream.graph import Candidate, Plan
from millstream.lower import Lowered
from millstream.schedule import Scheduling, assign_offsets

MOST_WORKERS = 8  # threads on which dispatching kernels, which only one can do at a time, is not yet all they do


class ThreadsEngine(Engine):
    """Runs a plan on threads of this process.

    A call that comes while another one has the workers runs serially on its own thread, to the same result.

    Args:
        lowered: What to run, on the CPU.
        plan: Its plan on one stream.
        scheduling: Which other plans to consider.
        asked: Whether the user wants this engine, whatever it takes.
        arena: Memory for serial runs, which it has in turn with others.

    Attributes:
        name: ``serial`` as long as nobody asked for threads and they are not known to be quicker.
        plan: What runs: the one-stream plan until another one has been chosen.
    """

    def __init__(
        self, lowered: Lowered, plan: Plan, scheduling: Scheduling, *, asked: bool, arena: Arena | None = None
    ) -> None:
        super().__init__(lowered, plan)
        self.name = "threads" if asked else "serial"
        most = torch.get_num_threads()  # when compiling, as Inductor takes it for its kernels
        self._num_streams = scheduling.streams or max(min(most, MOST_WORKERS), 2)
        if not asked:
            self._num_streams = min(self._num_streams, most)
        self._num_threads = max(most // self._num_streams, 1) if asked else most
        self._asked, self._settled = asked, scheduling.serial
        self._serial = SerialEngine(lowered, plan, arena)
        self._planner = CpuPlanner(lowered, plan, scheduling, self._num_streams)
        self._calls = 0
        self._run: Runner | None = None
        self._pool: WorkerPool | None = None  # that the run was made for

    @property
    def is_settled(self) -> bool:
        return self._settled

    @property
    def shares_memory(self) -> bool:
        return self._settled and self.plan.num_streams == 1 and self._serial.shares_memory

    @property
    def costs(self) -> Costs | None:
        return self._planner.costs

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self._planner.candidates

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self._settled and self.plan.num_streams == 1:
            return self._run_serially(inputs)
        workers = worker_pool()
        if not workers.busy.acquire(blocking=False):
            return self._run_serially(inputs)
        try:
            if self._pool is not workers:
                self._run, self._pool = None, workers
            if not self._settled:
                return self._find_plan(inputs)
            with intra_op_threads(self._num_threads):
                return (self._run or self._prepare(self.plan, self._num_threads))(inputs)
        except BaseException:
            self._run = None  # its signals may stand anyhow
            raise
        finally:
            workers.busy.release()

    def release(self) -> None:
        self._run = None
        self._serial.release()

    def _find_plan(self, inputs: list[Any]) -> list[Any]:
        """Measure, or choose, and meanwhile run serially: first calls take longer anyway."""
        if self._calls < MEASURED_CALLS:
            self._calls += 1
            self._run = self._run or self._prepare_measuring()
            with intra_op_threads(self._num_threads):
                return self._run(inputs)
        self._run, self._settled = None, True
        if self._asked:
            self.plan = self._planner.predict()
        else:
            self.plan = self._planner.choose(inputs, self._serial, self._prepare)
            self._num_threads = self._planner.num_threads
            self.name = "threads" if self.plan.num_streams > 1 else "serial"
        if self.plan.num_streams == 1:
            self._run = None
            return self._run_serially(inputs)
        with intra_op_threads(self._num_threads):
            return (self._run or self._prepare(self.plan, self._num_threads))(inputs)

    def _run_serially(self, inputs: list[Any]) -> list[Any]:
        if self.name == "serial":
            return self._serial(inputs)  # with what the caller has at the time
        with intra_op_threads(self._num_threads):
            return self._serial(inputs)

    def _prepare_measuring(self) -> CompiledPlan:
        bound = bind_arena(self.lowered.program, assign_offsets(self.plan))
        return compile_plan(self.lowered.program, self.plan, bound, observe=self._planner.meter.observe)

    def _prepare(self, plan: Plan, num_threads: int) -> Runner:
        assert self._pool is not None, "the caller has the pool"
        bound = bind_arena(self.lowered.program, plan.layout or assign_offsets(plan))
        self._run = run = compile_threads(self.lowered.program, plan, bound, self._pool, num_threads)
        return run
