"""Suite ``identity``: whether every engine gives the same bits on any number of streams. It takes no times.

Each network is lowered once. Its program then runs on the serial engine and on each of the others with 1, 2, 4 and 8
streams, and as the plan that is chosen by trials, from the same state and on the same inputs, a few calls in a row; in
the end the chosen plan runs a thousand times on one input, and every result is compared with the first one.

Some kernels of PyTorch's add in an order that is another in every run, as does the gradient of an embedding. Where the
serial engine differs from itself, the network is lowered and compared with PyTorch's deterministic algorithms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.cases.models import INFERENCE, TRAINING, InferenceCase, TrainingCase
from benchmarks.measuring.ours import only_executable
from benchmarks.measuring.results import Row
from benchmarks.measuring.suite import Settings, run_suite

ENGINES = {"cuda": ("streams", "graph"), "cpu": ("threads",)}
COUNTS = (1, 2, 4, 8)
CALLS, REPLAYS = 4, 1000
SEED = 0


def run_case(case: InferenceCase | TrainingCase, settings: Settings) -> list[Row]:
    """Compare all engines on one network."""
    if settings.device.type == "cpu":
        torch.set_num_threads(1)  # streams would divide more among them, and some operators then sum in another order
    lowered, inputs = lower(case, settings)
    if repeats(lowered, inputs):
        return compare_all(case.name, lowered, inputs, settings)
    with deterministic():
        torch._dynamo.reset()
        lowered, inputs = lower(case, settings)
        rows = compare_all(case.name, lowered, inputs, settings)
        agrees = repeats(lowered, inputs)
    why = "deterministic algorithms, since the serial engine differs from itself without them"
    return [replace(row, note=f"{row.note}; {why if agrees else why.replace('without', 'with')}") for row in rows]


def compare_all(name: str, lowered: Any, inputs: Sequence[Any], settings: Settings) -> list[Row]:
    """Compare all engines on one program."""
    *_, graphs = engines = ENGINES[settings.device.type]
    with torch.no_grad():
        expected, _ = run(lowered, inputs, "serial", 1)
        rows = [compare(name, expected, lowered, inputs, engine, streams) for engine in engines for streams in COUNTS]
        chosen = compare(name, expected, lowered, inputs, graphs, None)
        return [*rows, chosen, replay_often(name, lowered, inputs, graphs)]


def repeats(lowered: Any, inputs: Sequence[Any]) -> bool:
    """Whether the serial engine gives the same bits twice."""
    with torch.no_grad():
        first, second = (run(lowered, inputs, "serial", 1)[0] for _ in range(2))
    return same_bits(first, second)


@contextmanager
def deterministic() -> Iterator[None]:
    """Let PyTorch take kernels that add in a fixed order, where it has them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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
    seen: list[Any] = []
    own_run = executable._run

    def note(values: list[Any]) -> Any:
        seen.append(copied(values))
        return own_run(values)

    executable._run = note
    call()
    executable._run = own_run
    return executable.lowered, seen[0]


def run(
    lowered: Any, inputs: Sequence[Any], engine: str, streams: int | None, calls: int = CALLS
) -> tuple[list[Any], Any]:
    """Results and state of some calls, whose floating inputs differ a little; and what ran them."""
    from millstream.engine import build
    from millstream.graph import Role
    from millstream.schedule import Scheduling
    from millstream.settings import Settings

    program = lowered.program
    executable = build(lowered, Settings(engine, Scheduling(streams, memory=100.0)))
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
    from millstream.engine import build
    from millstream.schedule import Scheduling
    from millstream.settings import Settings

    executable = build(lowered, Settings(engine, Scheduling(None, memory=100.0)))
    state = copied(inputs)
    written = [(own, start) for own, start in zip(state, inputs, strict=True) if isinstance(own, torch.Tensor)]
    first: list[torch.Tensor] = []
    different = torch.zeros((), dtype=torch.int64, device=next(iter(lowered.program.devices)))
    for _ in range(REPLAYS):
        torch._foreach_copy_(*map(list, zip(*written, strict=True)))
        torch.manual_seed(SEED)
        bits = bits_of([executable(list(state)), state])
        first = first or bits
        # On the device: a thousand times a thousand answers would take the host minutes.
        different += torch.stack([(a != b).any() for a, b in zip(bits, first, strict=True)]).any()
    count = int(different)
    note = f"{REPLAYS:,} runs" + (f", of which {count:,} differ" if count else "")
    return row_of(name, f"{engine}, again and again", executable, not count, note)


def row_of(name: str, variant: str, executable: Any, equal: bool, note: str) -> Row:
    """What is reported of a comparison, and whether the engine that was asked for has run."""
    if executable.notes:
        note, equal = f"{note}; {executable.notes[0]}", False
    return Row(
        name, variant, kernels=executable.num_kernels, streams=executable.num_streams,
        waits=executable.num_waits, equal=equal, note=note,
    )  # fmt: skip


def copied(values: Sequence[Any]) -> list[Any]:
    """The same in other memory."""
    return [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in values]


def same_bits(ours: Any, theirs: Any) -> bool:
    """Whether two trees hold the same tensors, all of them finite."""
    tensors = [leaf for leaf in tree_leaves(theirs) if isinstance(leaf, torch.Tensor)]
    same = all(torch.equal(a, b) for a, b in zip(bits_of(ours), bits_of(theirs), strict=True))
    return same and all(bool(tensor.isfinite().all()) for tensor in tensors)


def bits_of(tree: Any) -> list[torch.Tensor]:
    """The bytes of all tensors in a tree, as one tensor of each dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            by_dtype.setdefault(leaf.dtype, []).append(leaf.detach().reshape(-1))
    return [torch.cat(parts).view(torch.uint8) for parts in by_dtype.values()]


if __name__ == "__main__":
    sys.exit(run_suite("identity", (*INFERENCE, *TRAINING), run_case))
