"""Suite ``overhead``: what the host spends on a call, on compiling, and on planning.

- ``host call``: wall clock of one call that finds the device idle, without waiting for the result; small networks.
- ``call minus replay``: a call less the bare replay of the same graph: what the library itself costs.
- Case ``number that changes``: ``host call`` of a step with a number that differs in each call and is an input of its
  graph by then, beside the same step with a number that stays.
- ``cold compile``: seconds from the uncompiled model to the first result, caches empty, each side in its own process.
- ``plan_serial``: time to plan a random graph; ``8 streams, packed, checked``: on streams, with its memory, and proven.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import millstream as ms
from benchmarks.cases.models import HOST_INFERENCE, HOST_TRAINING, InferenceCase, TrainingCase
from benchmarks.inference import SampledInferenceJudge
from benchmarks.measuring import ours
from benchmarks.measuring.baselines import build_inference, build_training
from benchmarks.measuring.cold import compare_cold
from benchmarks.measuring.harness import Sample, alternate, host_clock, wall_ms
from benchmarks.measuring.results import Row, ratio
from benchmarks.measuring.sides import Failure, Side, build_each
from benchmarks.measuring.suite import Settings, run_suite
from benchmarks.training import SampledTrainingJudge
from millstream.graph import KernelGraph

SAMPLES = 4  # host times are short and noisy: so many times the usual number of samples
CALL_PEERS = ("eager", "compile", "compile reduce-overhead")
REPLAY_PEER = "inductor graph"  # the barest thing a host can do: one replay of a CUDA graph
STEP_PEERS = ("compile loop",)
OWN_REPLAY = "own replay"
PLANNED = (100, 1_000, 3_000, 10_000)
COMPILED = (
    "towers",
    "resnet50 b1",
    "inception_v3 b1",
    "hrnet_w18 b1",
    "nasnetalarge b1",
    "resnet50 b8",
    "transformer 4x512 b16",
)


@dataclass(frozen=True)
class OverheadCase:
    """Something the host does."""

    name: str
    run: Callable[[Settings], list[Row]]
    estimate_s: float


@torch.no_grad()
def run_call(case: InferenceCase, settings: Settings) -> list[Row]:
    """Host time of a compiled model's call against torch.compile's, and against bare replays."""
    problem = case.make(settings.device)
    judge = SampledInferenceJudge(problem)
    mine = ours.build_inference(problem, judge)
    peers = build_each(
        [name for name in (*CALL_PEERS, REPLAY_PEER) if settings.wants(name)],
        lambda name: build_inference(problem, name, judge, plan_memory=False),
    )
    return host_rows(case.name, mine, peers, settings)


def run_step(case: TrainingCase, settings: Settings) -> list[Row]:
    """Host time of a step's call against the compiled loop's, and against the bare replay of the same graph."""
    problem = case.make(settings.device)
    judge = SampledTrainingJudge(problem)
    mine = ours.build_training(problem, judge)
    peers = build_each(
        [name for name in STEP_PEERS if settings.wants(name)], lambda name: build_training(problem, name, judge)
    )
    return host_rows(case.name, mine, peers, settings)


def host_rows(case: str, mine: Side, peers: list[Side | Failure], settings: Settings) -> list[Row]:
    """Time calls (of captured peers: replays) and our own replay in turn on the host."""
    facts = Row(case, "host call", kernels=mine.executable.num_kernels, equal=mine.comparison.equal)
    if not mine.comparison.equal:
        return [replace(facts, note=f"not timed: {mine.comparison.reason}")]
    assert mine.replay is not None
    runs = {"ours": mine.call, OWN_REPLAY: mine.replay}
    runs |= {peer.name: peer.replay or peer.call for peer in peers if isinstance(peer, Side) and peer.comparison.equal}
    clocks = {name: host_clock(run, settings.device) for name, run in runs.items()}
    # Ours and its bare replay in turn by themselves, as in a training loop; milliseconds of a peer's Python in between
    # would empty the host's caches. Then the peers, likewise.
    samples = alternate({name: clocks.pop(name) for name in ("ours", OWN_REPLAY)}, settings.rounds * SAMPLES)
    samples |= alternate(clocks, settings.rounds * SAMPLES) if clocks else {}
    own = samples.pop("ours")
    facts = replace(facts, ours_ms=own.median, p20=own.p20, p80=own.p80)
    rows = [
        replace(facts, baseline=name, baseline_ms=sample.median, ratio=ratio(sample.median, own.median))
        for name, sample in samples.items()
    ]
    rows += [
        replace(facts, baseline=peer.name, note=f"{peer.name} not timed: {problem_of(peer)}")
        for peer in peers
        if problem_of(peer)
    ]
    spent = own.median - samples[OWN_REPLAY].median
    return [*rows, Row(case, "call minus replay", ours_ms=spent, equal=True)]


def weighted_step(device: torch.device, compiled: bool) -> Any:
    """A training step of a small network whose loss has a weight; the same network each time."""
    torch.manual_seed(0)
    with device:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(batch: Tensor, weight: float) -> Tensor:
        optimizer.zero_grad()
        loss = weight * model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return ms.step(step, strict=True) if compiled else step


def run_number(settings: Settings) -> list[Row]:
    """Host time of a step's call whose number changes, beside that of a step whose number stays."""
    batch, weights = torch.randn(16, 32, device=settings.device), itertools.count(1)
    changing, eager = (weighted_step(settings.device, compiled) for compiled in (True, False))
    same = [torch.allclose(changing(batch, 1 / k), eager(batch, 1 / k)) for k in itertools.islice(weights, 20)]
    staying = weighted_step(settings.device, compiled=True)
    clocks = {
        "ours": host_clock(lambda: changing(batch, 1 / next(weights)), settings.device),
        "same number": host_clock(lambda: staying(batch, 0.5), settings.device),
    }
    samples = alternate(clocks, settings.rounds * SAMPLES)
    own, plain = samples["ours"], samples["same number"]
    more_us, graphs = 1000 * (own.median - plain.median), len(changing.graphs)
    note = f"{more_us:.1f} us more; graphs after {next(weights)} numbers: {graphs}"
    facts = Row("number that changes", "host call", "same number", ours_ms=own.median, p20=own.p20, p80=own.p80)
    times = {"baseline_ms": plain.median, "ratio": ratio(plain.median, own.median)}
    return [replace(facts, **times, equal=all(same), note=note)]


def problem_of(peer: Side | Failure) -> str:
    """Why a peer cannot be timed; empty when it can."""
    return peer.reason if isinstance(peer, Failure) else peer.comparison.reason


def run_plan(num_kernels: int, settings: Settings) -> list[Row]:
    """Time to plan a random graph on one stream; each time a new copy, which has nothing cached."""
    from millstream.check import check_plan
    from millstream.cost import Roofline
    from millstream.schedule import peak_bytes, plan_graph, plan_serial
    from millstream.testing import random_graph

    graph = random_graph(random.Random(num_kernels), num_kernels)
    costs = Roofline().estimate(graph)
    budget = 10 * peak_bytes(plan_serial(graph))

    def plan_streams(fresh: KernelGraph) -> None:
        check_plan(plan_graph(fresh, costs, 8, memory_bytes=budget, packed=True))

    rows = []
    for variant, plan in (("plan_serial", plan_serial), ("8 streams, packed, checked", plan_streams)):
        times = [wall_ms(partial(plan, replace(graph)), torch.device("cpu")) for _ in range(min(settings.rounds, 10))]
        sample = Sample.of(times)
        row = Row(f"plan {num_kernels} kernels", variant, kernels=num_kernels)
        rows.append(replace(row, ours_ms=sample.median, p20=sample.p20, p80=sample.p80))
    return rows


def run_compile(name: str, settings: Settings) -> list[Row]:
    """Cold compile seconds of a case of another suite."""
    return [replace(row, case=f"compile {name}") for row in compare_cold(name, settings)]


def run_case(case: OverheadCase, settings: Settings) -> list[Row]:
    return case.run(settings)


CASES = (
    *(OverheadCase(case.name, partial(run_call, case), case.estimate_s) for case in HOST_INFERENCE),
    *(OverheadCase(case.name, partial(run_step, case), case.estimate_s) for case in HOST_TRAINING),
    OverheadCase("number that changes", run_number, 60),
    *(OverheadCase(f"plan {number} kernels", partial(run_plan, number), 10) for number in PLANNED),
    *(OverheadCase(f"compile {name}", partial(run_compile, name), 120) for name in COMPILED),
)

if __name__ == "__main__":
    sys.exit(run_suite("overhead", CASES, run_case))
