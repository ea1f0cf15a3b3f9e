"""Suite ``placement``: a model or step on two devices of one process, beside ours on one of them.

Both are called in a loop, in turn. One device is always a candidate, so that ours may be on one, too; the note says
what is on which, and what crosses. With a bound for memory (``in two thirds``: of what one device takes for temporaries
and outputs), only ours has it. A CPU has two virtual devices: that shows that the scripts run through, nothing else.

- ``one device``: our plan for the first device, without the bound
- ``predicted``: what the simulator says of ours; of one device, the note does
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.models import Inference, Training
from benchmarks.cases.placed import PLACED, PlacedCase
from benchmarks.inference import SampledInferenceJudge
from benchmarks.measuring.baselines import trainee
from benchmarks.measuring.harness import sound_pools
from benchmarks.measuring.ours import only_executable
from benchmarks.measuring.results import Row
from benchmarks.measuring.sides import WARM_CALLS, Side, compare, predicted_ms, timed
from benchmarks.measuring.suite import Settings, run_suite
from benchmarks.training import SampledTrainingJudge

ONE = "one device"
MOST_CALLS = 40  # until a plan is found

Results = Mapping[str, Tensor]


def run_case(case: PlacedCase, settings: Settings) -> list[Row]:
    """Build, judge and time a case on one device and on two."""
    home = settings.device
    if home.type == "cuda" and torch.cuda.device_count() < 2:
        return [Row(case.name, note="not run: it needs two GPUs")]
    others = [0, 1] if home.type == "cpu" else [home.index, *({0, 1} - {home.index})][:2]
    devices = [f"{home.type}:{number}" for number in others]
    problem = case.make(home, tiny=settings.tiny)
    make = Trained if isinstance(problem, Training) else Called
    with torch.set_grad_enabled(isinstance(problem, Training)):
        built: Any = make(problem)
        one, expected = built.build(ONE)
        bound = {} if case.share is None else {"memory": int(case.share * needed_bytes(one.executable))}
        placed, found = built.build("ours", devices=devices, **bound)
        rows = compare(case.name, placed, [one], settings)
    told = describe(placed.executable, one.executable, differing(found, expected))
    return [replace(row, note="; ".join(filter(None, (row.note, told)))) for row in rows]


class Called:
    """Builds sides of an inference case, with parameters folded in as constants: nothing of them crosses."""

    def __init__(self, problem: Inference) -> None:
        self._problem, self._judge = problem, SampledInferenceJudge(problem)

    def build(self, name: str, **how: Any) -> tuple[Side, Results]:
        """Compile and judge a side; return it with its results."""
        import millstream as ms

        problem = self._problem
        options = {"alternatives": False}
        compiled = ms.compile(problem.model, copy_outputs=False, strict=True, freeze=True, options=options, **how)
        _, build_s = timed(lambda: until_settled(compiled, problem.first), problem.device)
        comparison = self._judge.judge(compiled, None)
        results = {"output": compiled(*problem.second).clone()}
        executable = only_executable(compiled)
        return Side(name, comparison, lambda: compiled(*problem.second), None, build_s, executable=executable), results


class Trained:
    """Builds sides of a training case, each with its own copy of the model."""

    def __init__(self, problem: Training) -> None:
        self._problem, self._judge = problem, SampledTrainingJudge(problem)

    def build(self, name: str, **how: Any) -> tuple[Side, Results]:
        """Take steps until the plan is found, go back to the start, and judge those that come then."""
        import millstream as ms

        problem, side = self._problem, trainee(self._problem)
        make_step = problem.make_step(side.model, side.optimizer)
        step = ms.step(make_step, strict=True, options={"alternatives": False}, **how)
        with sound_pools():
            losses = (step(*problem.batches[0]).detach(),)
        with side.unchanged():
            _, build_s = timed(lambda: until_settled(step, problem.batches[1]), problem.device)
        results = self._judge.results(side, step, None, losses)
        comparison = self._judge.judge(results)
        executable = only_executable(step)
        named = {name: value for group in results.values() for name, value in group.items()}
        run = Side(name, comparison, lambda: step(*problem.batches[1]), None, build_s, executable=executable)
        return run, named


def until_settled(compiled: Any, batch: tuple[Tensor, ...]) -> None:
    """Call until the plan is found, and a few times more.

    Raises:
        RuntimeError: None was found.
    """
    from millstream import api

    for _ in range(MOST_CALLS):
        compiled(*batch)
        executables = api.executables(compiled)
        if executables and all(each.is_settled for each in executables):
            for _ in range(WARM_CALLS):
                compiled(*batch)
            return
    raise RuntimeError(f"no plan was found in {MOST_CALLS} calls")


def needed_bytes(executable: Any) -> int:
    """What one stream of one device takes for temporaries and outputs."""
    from millstream.schedule import peak_bytes, plan_serial

    return peak_bytes(plan_serial(executable.plan.graph))


def differing(found: Results, expected: Results) -> list[str]:
    """Names of the tensors whose bits differ."""
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def describe(placed: Any, one: Any, differs: list[str]) -> str:
    """Say what is where, what crosses, what was predicted of it, and whether the bits are those of one device."""
    from millstream.report.placement_report import find_crossings, find_devices

    plan, parts = placed.plan, []
    if len(plan.graph.devices) > 1:
        parts += [
            f"{each.device}: {each.kernels} kernels, {each.peak_bytes >> 20} MiB"
            for each in find_devices(plan, placed.costs)
        ]
        parts += [each.text() for each in find_crossings(plan.graph, placed.costs)]
    else:
        parts.append(ONE)
    parts += [
        f"{each.streams} streams: predicted {each.predicted_ns / 1e6:.4g}"
        + (f", measured {each.measured_ns / 1e6:.4g}" if each.measured_ns else "")
        + f", {each.outcome}"
        for each in placed.candidates
        if each.predicted_ns
    ]
    if (alone := predicted_ms(one)) is not None:
        parts.append(f"{ONE} predicted {alone:.4g}")
    parts.append(f"{len(differs)} results differ from {ONE}, first {differs[0]}" if differs else f"the bits of {ONE}")
    return "; ".join([*parts, *placed.notes])


if __name__ == "__main__":
    sys.exit(run_suite("placement", PLACED, run_case))
