"""Suite ``plans``: one network's kernels, its chosen plan, and what bounds it, as graphs that take their turns.

- ``one stream``: all kernels, one after the other.
- ``longest chain``: the kernels of the critical path, with nothing beside them: no plan is quicker. Of what other
  kernels write they read whatever is in memory, so that results mean nothing.
- ``packed``, ``apart``, ``even``: the chosen plan in each way to spread its kernels over the multiprocessors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.cases.models import INFERENCE, Inference, InferenceCase
from benchmarks.measuring.harness import Sample, alternate, device_clock
from benchmarks.measuring.ours import only_executable
from benchmarks.measuring.results import Row, ratio
from benchmarks.measuring.sides import bound_ms, predicted_ms
from benchmarks.measuring.suite import Settings, run_suite

if TYPE_CHECKING:
    from millstream.engine.cuda.captured import Captured

BASE, CHAIN = "one stream", "longest chain"


@torch.no_grad()
def run_case(case: InferenceCase, settings: Settings) -> list[Row]:
    """Capture and time all graphs of a network."""
    from millstream.graph import Spread
    from millstream.schedule import critical_path, plan_serial

    if settings.device.type != "cuda":
        return [Row(case.name, note="not run: only a GPU's plans are captured")]
    problem = case.make(settings.device, channels_last=settings.channels_last)
    executable = build(problem, settings)
    graph, plan, costs = executable.plan.graph, executable.plan, executable.costs
    base = executable.capture_beside(plan_serial(graph))
    chain = critical_path(graph, [cost.duration_ns for cost in costs.kernels])
    graphs: dict[str, Any] = {BASE: base, CHAIN: capture_chain(executable, base, chain)}
    if plan.num_streams > 1:
        graphs |= {each.value: executable.capture_beside(replace(plan, spread=each)) for each in Spread}
    clocks = {name: device_clock(captured.replay, settings.device) for name, captured in graphs.items()}
    samples = alternate(clocks, settings.rounds)
    facts = Row(
        case.name,
        kernels=executable.num_kernels,
        streams=executable.num_streams,
        waits=executable.num_waits,
        bound_ms=bound_ms(executable),
        predicted_ms=predicted_ms(executable),
    )
    return rows_of(facts, samples, settings, chosen=plan.spread.value, num_in_chain=len(chain))


def build(problem: Inference, settings: Settings) -> Any:
    """Compile and capture a network; return its executable."""
    import millstream as ms

    compiled = ms.compile(problem.model, copy_outputs=False, strict=True, freeze=settings.freeze)
    for _ in range(2):
        compiled(*problem.second)
    return only_executable(compiled)


class Chain(NamedTuple):
    """A graph of some kernels of a program, with all that it uses.

    Attributes:
        graph: It.
        outputs: Of the program, when all of its kernels ran.
        keep: What else must live.
    """

    graph: torch.cuda.CUDAGraph
    outputs: list[Any]
    keep: object

    def replay(self) -> None:
        """Run these kernels."""
        self.graph.replay()


def capture_chain(executable: Any, base: Captured, chain: Iterable[int]) -> Chain:
    """Capture only these kernels, in the program's order. All run once before: tensors that others make are there."""
    from millstream.device import context, guard
    from millstream.device.cuda_graphs.capturing import capture
    from millstream.engine.plan_source import compile_plan
    from millstream.schedule import plan_serial

    program, wanted = executable.lowered.program, frozenset(chain)
    device, plan = context(next(iter(program.devices))), plan_serial(program.graph)
    results: dict[int, Any] = {}

    def run_all(kernel: int, launch: Callable[[], Any], _: object) -> Any:
        results[kernel] = launch()
        return results[kernel]

    def run_wanted(kernel: int, launch: Callable[[], Any], _: object) -> Any:
        return launch() if kernel in wanted else results[kernel]

    graph = torch.cuda.CUDAGraph()
    with device.graphs.lock, guard(device.place):
        outputs = compile_plan(program, plan, observe=run_all)(base.inputs)
        with capture(device, graph):
            captured = compile_plan(program, plan, observe=run_wanted)(base.inputs)
    return Chain(graph, outputs, (base, results, captured))


def rows_of(
    facts: Row, samples: Mapping[str, Sample], settings: Settings, *, chosen: str, num_in_chain: int
) -> list[Row]:
    """One row for each graph, compared with one stream."""
    base = samples[BASE].median
    notes = {CHAIN: f"{num_in_chain} kernels", chosen: "chosen"}
    return [
        replace(
            facts,
            variant=settings.name(name),
            baseline=BASE,
            baseline_ms=base,
            ours_ms=sample.median,
            p20=sample.p20,
            p80=sample.p80,
            ratio=ratio(base, sample.median),
            note=notes.get(name),
        )
        for name, sample in samples.items()
        if name != BASE
    ]


if __name__ == "__main__":
    sys.exit(run_suite("plans", INFERENCE, run_case))
