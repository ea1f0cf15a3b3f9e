"""Our side, through the public interface; with ``strict=True``, because a fallback is another compiler's time."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.cases.models import Inference, Training
from benchmarks.measuring.baselines import InferenceJudge, TrainingJudge, trainee
from benchmarks.measuring.equality import Comparison
from benchmarks.measuring.harness import MemoryMeter, Run, sound_pools
from benchmarks.measuring.sides import WARM_CALLS, Side, timed


def build_inference(
    problem: Inference, judge: InferenceJudge | None = None, *, freeze: bool = False, alternatives: bool = False
) -> Side:
    """Compile the model with the first call, capture it with the second; outputs are not copied, as with the peers.

    Alternatives to the usual kernels are known on disk, or else left out: a program must not change while it is timed.
    """
    import millstream as ms

    options = {"alternatives": alternatives}
    compiled = ms.compile(problem.model, copy_outputs=False, strict=True, freeze=freeze, options=options)
    _, build_s = timed(lambda: [compiled(*problem.first) for _ in range(2)], problem.device)
    executable = only_executable(compiled)
    meter = measure_capture(executable, lambda: compiled(*problem.first), problem.device)
    replay = executable.replay if problem.device.type == "cuda" else None
    comparison = judge.judge(compiled, replay) if judge else Comparison(True, 0.0)
    for _ in range(WARM_CALLS):
        compiled(*problem.second)
    return ours(comparison, lambda: compiled(*problem.second), replay, build_s, meter.peak_bytes, executable)


def build_training(problem: Training, judge: TrainingJudge | None = None, *, alternatives: bool = False) -> Side:
    """Take a step that runs eagerly, for the optimizer has no state yet, one that compiles, and one that captures.

    The seconds to build are those of the latter two, the choice of a plan included.
    """
    import millstream as ms

    side = trainee(problem)
    step = ms.step(problem.make_step(side.model, side.optimizer), strict=True, options={"alternatives": alternatives})
    with sound_pools():
        losses = [step(*problem.batches[0]).detach()]
    more, build_s = timed(lambda: [step(*problem.batches[i]).detach() for i in (1, 2)], problem.device)
    losses += more
    executable = only_executable(step)
    replay = executable.replay if problem.device.type == "cuda" else None
    comparison = judge.judge(judge.results(side, step, replay, tuple(losses))) if judge else Comparison(True, 0.0)
    meter = measure_capture(executable, lambda: step(*problem.batches[1]), problem.device)
    for _ in range(WARM_CALLS):
        step(*problem.batches[1])
    return ours(comparison, lambda: step(*problem.batches[1]), replay, build_s, meter.peak_bytes, executable)


def measure_capture(executable: Any, call: Run, device: torch.device) -> MemoryMeter:
    """Let the graph be captured again, now that its plan is chosen, and measure what it takes."""
    executable.release()
    meter = MemoryMeter(device)
    with meter.measure():
        call()
    return meter


def ours(
    comparison: Comparison, call: Run, replay: Run | None, build_s: float, peak_bytes: int | None, executable: Any
) -> Side:
    """Return our side; without a GPU there is no replay, and a call stands in for it, to try the scripts."""
    return Side("ours", comparison, call, replay or call, build_s, peak_bytes, executable)


def only_executable(compiled: Any) -> Any:
    """Return the one graph that a compiled model or step runs.

    Raises:
        RuntimeError: It runs none, or several with the host's work between them, so that no replay is the whole.
    """
    from millstream import api

    executables = api.executables(compiled)
    if len(executables) != 1:
        raise RuntimeError(f"expected one captured graph, found {len(executables)}")
    return executables[0]
