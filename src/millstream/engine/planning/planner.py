"""Plan a program on a GPU: measure costs, propose plans, choose the best one."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import nullcontext
from math import inf
from typing import Any

from millstream.check import check_plan
from millstream.cost import Costs, CostTable, KernelCost, MeasuredCosts, Roofline
from millstream.device import DeviceContext, guard
from millstream.engine.plan_source import compile_plan
from millstream.engine.planning.measure import CostMeter, to_measure
from millstream.engine.planning.store import Store, choice_key
from millstream.engine.planning.trial import Trials
from millstream.graph import Candidate, Plan
from millstream.locks import ForkSafeLock
from millstream.lower import Lowered
from millstream.progress import showing
from millstream.schedule import Scheduling
from millstream.schedule.choose import (
    CandidatePlan,
    Found,
    at_once,
    calibrate,
    choose_stepwise,
    from_json,
    propose,
    take_predicted,
    to_json,
)

SHARE_OF_COMPILING, LEAST_S = 0.1, 1.0  # trials end after this part of the time that compiling took, or this many s

_guard = ForkSafeLock()
_tables: dict[str, CostTable] = {}  # by device: what this process has read and measured so far


class Planner:
    """Finds the plan for one program on one CUDA device.

    Args:
        lowered: The program.
        serial: Its plan on one stream.
        context: Of its device.
        scheduling: What the user asked for.

    Attributes:
        costs: What was measured, or ``None`` before.
        candidates: What the choice was made from; empty before, and where there was nothing to choose.
        error: Why the kernels could not all be measured, or ``None``.
    """

    def __init__(self, lowered: Lowered, serial: Plan, context: DeviceContext, scheduling: Scheduling) -> None:
        self.costs: Costs | None = None
        self.candidates: tuple[Candidate, ...] = ()
        self.error: Exception | None = None
        self._lowered, self._serial, self._context, self._scheduling = lowered, serial, context, scheduling
        self._store = Store(context.torch_device)

    def measuring_run(self, inputs: list[Any]) -> list[Any] | None:
        """Run the program for its caller and measure its kernels meanwhile; ``None`` when all of them are known."""
        program, known = self._lowered.program, self._known()
        if not to_measure(known, program.graph):
            return None
        meter = CostMeter(program, self._context, known)
        run = compile_plan(program, self._serial, observe=meter.observe)
        with guard(self._context.place):
            outputs = run(inputs)
        self._keep(meter.costs)
        self.error = meter.error
        return outputs

    def settle(self, trial: Trials[Plan]) -> CandidatePlan:
        """Do what ``settle_stepwise`` does without a pause."""
        return at_once(self.settle_stepwise(trial))

    def settle_stepwise(self, trial: Trials[Plan]) -> Generator[None, None, CandidatePlan]:
        """Choose the plan: by trials, or by prediction where the user says how many streams.

        Yields:
            Before each step that takes the device's time.
        """
        graph = self._lowered.program.graph
        self.costs = self._known().estimate(graph)
        if self._scheduling.streams is None:
            best, self.candidates = yield from self._choose(self.costs, trial)
            return best
        best, self.candidates = take_predicted(propose(graph, self.costs, self._scheduling))
        return best

    def _choose(self, costs: Costs, trial: Trials[Plan]) -> Generator[None, None, Found]:
        """Choose as before, if this program was planned before; otherwise by trials."""
        graph = self._lowered.program.graph
        key = choice_key(self._lowered.program, self._scheduling)
        noted = dict(self._store.load_choice(key) or {})
        serial_ns = noted.get("serial_ns")
        if type(serial_ns) is not int or serial_ns <= 0:
            yield
            serial_ns = trial.serial_ns()
        if serial_ns is None:
            return propose(graph, costs, Scheduling(1))[0], ()
        self.costs = calibrate(costs, serial_ns)
        found = from_json(noted, graph, self.costs, self._scheduling)
        if found is not None:
            check_plan(found[0].plan)
        else:
            candidate_plans = propose(graph, self.costs, self._scheduling)
            is_paced = self._scheduling.tune == "background"
            seconds = inf if is_paced else max(SHARE_OF_COMPILING * self._lowered.seconds, LEAST_S)
            with nullcontext() if is_paced else showing(self._lowered.program.graph.name, "plan chosen"):
                found = yield from choose_stepwise(candidate_plans, trial, seconds)
            if trial.error is None:
                self._store.save_choice(key, {"serial_ns": serial_ns, **to_json(*found)})
        return found

    def known_costs(self) -> Costs:
        """Return what is known of the kernels."""
        return self._known().estimate(self._lowered.program.graph)

    def _known(self) -> MeasuredCosts:
        """Return what this process knows, by measurements where there are any."""
        name, program = str(self._context.place), self._lowered.program
        with _guard.lock:
            if name not in _tables:
                _tables[name] = self._store.load_costs()
            return MeasuredCosts(_tables[name], Roofline(), lambda kernel: program.code(kernel.id))

    def _keep(self, costs: Mapping[str, KernelCost]) -> None:
        with _guard.lock:
            name = str(self._context.place)
            table = _tables[name] = _tables[name].with_costs(costs)
        self._store.save_costs(table)
