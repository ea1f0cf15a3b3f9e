"""Suite ``identity``: whether every engine gives the same bits on any number of streams. It takes no times.

Each network is lowered once. Its program then runs on the serial engine and on each of the others with 1, 2, 4 and 8
streams, and as the plan that is chosen by trials, from the same state and on the same inputs, a few calls in a row; in
the end the chosen plan runs a thousand times on one input, and every result is compared with the first one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.models import INFERENCE, TRAINING, InferenceCase, TrainingCase
from benchmarks.ours import only_executable
from benchmarks.results import Row
from benchmarks.suite import Settings, run_suite

ENGINES = {"cuda": ("streams", "graph"), "cpu": ("threads",)}
COUNTS = (1, 2, 4, 8)
CALLS, REPLAYS = 4, 1000
SEED = 0


def run_case(case: InferenceCase | TrainingCase, settings: Settings) -> list[Row]:
    """Compare all engines on one network."""
    lowered, inputs = lower(case, settings)
    with torch.no_grad():
        expected, _ = run(lowered, inputs, "serial", 1)
        rows = [
            compare(case.name, expected, lowered, inputs, engine, streams)
            for engine in ENGINES[settings.device.type]
            for streams in COUNTS
        ]
        engine = ENGINES[settings.device.type][-1]
        chosen = compare(case.name, expected, lowered, inputs, engine, None)
        return [*rows, chosen, replay_often(case.name, lowered, inputs, engine)]


def lower(case: InferenceCase | TrainingCase, settings: Settings) -> tuple[Any, list[Any]]:
    """The program of a network or of its training step, and its flat inputs, state included."""
    import millstream as ms

    problem = case.make(settings.device, tiny=settings.tiny)
    if isinstance(case, InferenceCase):
        compiled = ms.compile(problem.model, engine="serial", strict=True)
        arguments, warm_up = problem.first, 1
    else:
        step = problem.make_step(problem.model, problem.make_optimizer(problem.model))
        compiled = ms.step(step, engine="serial", strict=True)
        arguments, warm_up = problem.batches[0], 2

    def call() -> None:
        with torch.set_grad_enabled(isinstance(case, TrainingCase)):
            compiled(*arguments)

    for _ in range(warm_up):
        call()
    return record(only_executable(compiled), call)


def record(executable: Any, call: Callable[[], object]) -> tuple[Any, list[Any]]:
    """The program of what runs on the serial engine, and copies of the flat inputs that it gets in a call."""
    engine, seen = executable.engine, []
    own_run = engine._run

    def note(values: list[Any]) -> Any:
        seen.append(copied(values))
        return own_run(values)

    engine._run = note
    call()
    engine._run = own_run
    return executable.lowered, seen[0]


def run(
    lowered: Any, inputs: Sequence[Any], engine: str, streams: int | None, calls: int = CALLS
) -> tuple[list[Any], Any]:
    """Results and state of some calls, whose floating inputs differ a little; and what ran them."""
    from millstream.engine import Scheduling, build
    from millstream.graph import Role

    program = lowered.program
    executable = build(lowered, engine=engine, scheduling=Scheduling(streams, memory=100.0))
    state, results = copied(inputs), []
    torch.manual_seed(SEED)
    for number in range(calls):
        values = list(state)
        for position, name in enumerate(program.inputs):
            value = values[position]
            if name is None or program.graph.buffer_of[name].role is not Role.INPUT or name in program.mutated:
                continue
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                values[position] = value * (1 + number / 64)
        results.append(copied(executable(values)))
    return [results, state], executable


def compare(name: str, expected: Any, lowered: Any, inputs: Sequence[Any], engine: str, streams: int | None) -> Row:
    """Whether an engine gives the same bits as the serial one."""
    results, executable = run(lowered, inputs, engine, streams)
    variant = f"{engine}, {'chosen' if streams is None else streams}"
    return row_of(name, variant, executable, same_bits(results, expected), f"{CALLS} calls")


def replay_often(name: str, lowered: Any, inputs: Sequence[Any], engine: str) -> Row:
    """Whether a thousand runs of the chosen plan from one state give the same bits; state is put back in between."""
    from millstream.engine import Scheduling, build

    executable = build(lowered, engine=engine, scheduling=Scheduling(None, memory=100.0))
    state, different, first = copied(inputs), 0, None
    for _ in range(REPLAYS):
        for own, start in zip(state, inputs, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(start)
        torch.manual_seed(SEED)
        results = copied(executable(list(state)))
        first = [results, copied(state)] if first is None else first
        different += not same_bits([results, state], first)
    note = f"{REPLAYS:,} runs" + (f", of which {different:,} differ" if different else "")
    return row_of(name, f"{engine}, again and again", executable, not different, note)


def row_of(name: str, variant: str, executable: Any, equal: bool, note: str) -> Row:
    """What is told of a comparison, and whether the engine that was asked for has run."""
    if executable.notes:
        note, equal = f"{note}; {executable.notes[0]}", False
    return Row(
        name, variant, "serial", kernels=executable.num_kernels, streams=executable.num_streams,
        waits=executable.num_waits, equal=equal, note=note,
    )  # fmt: skip


def copied(values: Sequence[Any]) -> list[Any]:
    """The same in other memory."""
    return [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in values]


def same_bits(ours: Any, theirs: Any) -> bool:
    """Whether two trees hold the same tensors, all of them finite: equal ones differ at most in the signs of zeros."""
    pairs = list(zip(tree_leaves(ours), tree_leaves(theirs), strict=True))
    tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor)]
    return all(torch.equal(a, b) and bool(b.isfinite().all()) for a, b in tensors)


if __name__ == "__main__":
    sys.exit(run_suite("identity", (*INFERENCE, *TRAINING), run_case))
