"""Every baseline, built and judged the same way.

Inference:

- ``eager``: the model called; ``eager graph``: its kernels captured by hand in one CUDA graph
- ``compile``, ``compile reduce-overhead``: torch.compile called, by default and with its own CUDA graphs
- ``inductor graph``: torch.compile's kernels captured by hand in one CUDA graph
- ``max-autotune graph``: the same with searched matrix products and convolutions
- ``cudnn``: ``nn.LSTM`` in place of the custom cell, in one CUDA graph

Training:

- ``eager``: the step called
- ``compile loop``: the user's loop, with torch.compile on the model and the optimizer as PyTorch gives it
- ``compile loop fused``: the same with the fused optimizer
- ``compile loop reduce-overhead``: the same with it and torch.compile's own CUDA graphs
- ``compile loop compiled optimizer``: the same with torch.compile on the optimizer's step as well
- ``step graph``: forward, backward and optimizer captured by hand in one CUDA graph around torch.compile
- ``max-autotune step graph``: the same with searched matrix products and convolutions
- ``cudnn``: the loop with ``nn.LSTM`` in place of the custom cell

The memory of ``inductor graph`` and ``step graph`` is the smaller of two builds: one as it comes, one with Inductor's
own memory planning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.optim import Optimizer

from benchmarks.cases.models import Batch, Inference, Training
from benchmarks.measuring.equality import Comparison, Judge, Results, check_dependence
from benchmarks.measuring.harness import MemoryMeter, Run, full_precision, queue_behind_spin, sound_pools
from benchmarks.measuring.sides import WARM_CALLS, Side, capture, timed

Call = Callable[..., Tensor]
FUSED_LOOPS = ("compile loop fused", "compile loop reduce-overhead")
MEMORY_PLANNING: dict[str, Any] = {"memory_planning": True}
MAX_AUTOTUNE: dict[str, Any] = {"max_autotune": True, "coordinate_descent_tuning": True}  # as the mode of that name

# --- inference -------------------------------------------------------------------------------------------------------


class InferenceJudge:
    """Judges by outputs on an input that the side was not built with."""

    def __init__(self, problem: Inference) -> None:
        self._problem = problem
        wide = torch.float64 if problem.dtype == torch.float32 else torch.float32
        twin = copy.deepcopy(problem.model).to(wide)
        inputs = [x.to(wide) if x.is_floating_point() else x for x in problem.second]
        with full_precision():
            precise = {"output": twin(*inputs)}
        eager = {"output": problem.model(*problem.second)}
        self._judge = Judge({"outputs": precise}, {"outputs": eager}, problem.dtype)
        check_dependence(eager, {"output": problem.model(*problem.first)}, self._judge.allowed)

    def judge(self, call: Call, replay: Run | None) -> Comparison:
        """Judge a call on fresh inputs, then a bare replay whose output was spoilt before, after other work."""
        output = call(*self._problem.second)
        comparison = self._judge.judge({"outputs": {"output": output}})
        if not comparison.equal or replay is None or self._problem.device.type != "cuda":
            return comparison

        def spoil_and_replay() -> None:
            output.fill_(float("nan"))
            replay()

        queue_behind_spin(spoil_and_replay)
        return self._judge.judge({"outputs": {"output": output.clone()}})


def build_inference(
    problem: Inference,
    name: str,
    judge: InferenceJudge | None = None,
    *,
    plan_memory: bool = True,
    freeze: bool = False,
) -> Side:
    """Build an inference baseline by its name.

    Args:
        problem: What to run.
        name: Of the baseline.
        judge: Left out only where nothing but ``build_s`` matters.
        plan_memory: Build ``inductor graph`` again with Inductor's memory planning, for its memory.
        freeze: Fold parameters into what is compiled.
    """
    with inductor_config.patch(freezing=freeze):
        return _build_inference(problem, name, judge, plan_memory)


def _build_inference(problem: Inference, name: str, judge: InferenceJudge | None, plan_memory: bool) -> Side:
    model, inputs, device = problem.model, problem.first, problem.device
    replay: Run | None = None
    build_s = peak = None
    call: Call = model
    match name:
        case "eager":
            pass
        case "compile" | "compile reduce-overhead":
            mode = "reduce-overhead" if name.endswith("overhead") else "default"
            call, build_s = compile_called(model, inputs, device, mode=mode)
        case "eager graph" | "inductor graph" | "max-autotune graph" | "cudnn":
            captured = capture_called(captured_function(model, name), inputs, device)
            call, replay, build_s, peak = captured.call, captured.replay, captured.build_s, captured.peak_bytes
        case _:
            raise ValueError(f"no inference baseline is called {name!r}")
    if name == "inductor graph" and plan_memory:
        planned = torch.compile(model, fullgraph=True, dynamic=False, options=MEMORY_PLANNING)
        peak = smaller_peak(peak, lambda: capture_called(planned, inputs, device))
    comparison = judge.judge(call, replay) if judge else Comparison(True, 0.0)
    return Side(name, comparison, lambda: call(*problem.second), replay, build_s, peak)


def captured_function(model: nn.Module, name: str) -> Call:
    """Return what a captured inference baseline captures."""
    match name:
        case "inductor graph":
            return torch.compile(model, fullgraph=True, dynamic=False)
        case "max-autotune graph":
            return torch.compile(model, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
        case "cudnn":
            return library_twin(model)
        case _:
            return model


def compile_called(model: nn.Module, inputs: Batch, device: torch.device, *, mode: str) -> tuple[Call, float]:
    """Compile a model to be called, and call it until it is warm."""
    compiled = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
    _, build_s = timed(lambda: compiled(*inputs), device)
    for _ in range(WARM_CALLS):  # reduce-overhead warms up, then captures, then replays
        compiled(*inputs)
    return compiled, build_s


@dataclass(frozen=True)
class Captured:
    """A call captured by hand: ``call`` copies its inputs to fixed memory and replays."""

    call: Call
    replay: Run
    build_s: float
    peak_bytes: int | None


def capture_called(run: Call, inputs: Batch, device: torch.device) -> Captured:
    """Capture a call, and meter the memory of its graph."""
    meter = MemoryMeter(device)
    with meter.measure():
        static = [x.clone() for x in inputs]
        (replay, output), build_s = timed(lambda: capture(lambda: run(*static), device), device)

    def call(*fresh: Tensor) -> Tensor:
        for slot, x in zip(static, fresh, strict=True):
            slot.copy_(x)
        replay()
        return output

    return Captured(call, replay, build_s, meter.peak_bytes)


def smaller_peak(plain_peak: int | None, build_planned: Callable[[], Captured]) -> int | None:
    """Return the smaller of two peaks: the plain build's, and that with Inductor's memory planning where it works."""
    if plain_peak is None:
        return None
    try:
        planned_peak = build_planned().peak_bytes
    except Exception as error:  # noqa: BLE001 - an experimental option of Inductor: without it the plain build stands
        print(f"           Inductor's memory planning failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return plain_peak
    return plain_peak if planned_peak is None else min(plain_peak, planned_peak)


def library_twin(model: Any) -> nn.Module:
    """Return the network around ``nn.LSTM`` that computes the same."""
    return copy.deepcopy(model).library_twin()


# --- training --------------------------------------------------------------------------------------------------------


@dataclass
class Trainee:
    """One side's own copy of the model and its optimizer."""

    model: nn.Module
    optimizer: Optimizer

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of parameters, statistics, counters and the optimizer's state, by group and name; no empty group."""
        groups: dict[str, dict[str, Tensor]] = {"parameters": {}, "statistics": {}, "counters": {}, "optimizer": {}}
        for name, value in self.model.named_parameters():
            groups["parameters"][name] = value.detach().clone()
            for key, kept in self.optimizer.state.get(value, {}).items():
                if torch.is_tensor(kept) and kept.shape == value.shape:
                    groups["optimizer"][f"{key} of {name}"] = kept.clone()
        for name, buffer in self.model.named_buffers():
            groups["statistics" if buffer.is_floating_point() else "counters"][name] = buffer.clone()
        return {group: tensors for group, tensors in groups.items() if tensors}

    def tensors(self) -> list[Tensor]:
        """Everything that a step changes."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *self.model.buffers(), *(value for value in states if torch.is_tensor(value))]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put back, in place, what the body changes."""
        tensors = self.tensors()
        saved = [value.detach().clone() for value in tensors]
        yield
        with torch.no_grad():
            for value, old in zip(tensors, saved, strict=True):
                value.copy_(old)


class TrainingJudge:
    """Judges by losses and state after four steps: three fresh batches, then the last one again.

    The precise run and eager take these steps when the judge is made. A side that captured takes the fourth by a bare
    replay, after other work.
    """

    def __init__(self, problem: Training) -> None:
        self._problem = problem
        wide = torch.float64 if problem.dtype == torch.float32 else torch.float32
        start = trainee(problem).state()
        twin = trainee(problem, wide)
        with full_precision(), sound_pools():
            precise = self.results(twin, problem.make_step(twin.model, twin.optimizer, precise=True))
        plain = trainee(problem)
        with sound_pools():
            eager = self.results(plain, problem.make_step(plain.model, plain.optimizer))
        self._judge = Judge(precise, eager, problem.dtype, start)
        self._losses = Judge({"losses": precise["losses"]}, {"losses": eager["losses"]}, problem.dtype)

    def results(self, side: Trainee, step: Call, replay: Run | None = None, losses: tuple[Tensor, ...] = ()) -> Results:
        """Take the steps that the side has not taken yet (``losses`` are of those it has), and return what came out."""
        taken = list(losses)
        wide = next(side.model.parameters()).dtype
        batches = [tuple(x.to(wide) if x.is_floating_point() else x for x in batch) for batch in self._problem.batches]
        taken += [step(*batch).detach().clone() for batch in batches[len(taken) :]]
        if replay is None:
            step(*batches[-1])
        elif self._problem.device.type == "cuda":
            queue_behind_spin(replay)
        else:
            replay()
        named = {f"loss {i}": loss for i, loss in enumerate(taken)}
        return {"losses": named, **side.state()}

    def judge(self, results: Results, *, losses_only: bool = False) -> Comparison:
        """Judge the results of a side; by its losses only where its parameters have other names."""
        return self._losses.judge(results) if losses_only else self._judge.judge(results)


def trainee(problem: Training, dtype: torch.dtype | None = None, **options: bool) -> Trainee:
    """Return a fresh copy of the model at its start, with an optimizer of its own."""
    model = copy.deepcopy(problem.model)
    if dtype is not None:
        model = model.to(dtype)
    return Trainee(model, problem.make_optimizer(model, **options))


def build_training(
    problem: Training, name: str, judge: TrainingJudge | None = None, *, plan_memory: bool = True
) -> Side:
    """Build a training baseline by its name; arguments as for ``build_inference``."""
    if name in ("step graph", "max-autotune step graph"):
        return build_step_graph(problem, judge, name, plan_memory=plan_memory)
    side = trainee(problem, fused=name in FUSED_LOOPS)
    run: Any = side.model
    match name:
        case "eager":
            pass
        case "compile loop" | "compile loop fused" | "compile loop compiled optimizer":
            run = torch.compile(side.model)
        case "compile loop reduce-overhead":
            run = torch.compile(side.model, mode="reduce-overhead")
        case "cudnn":
            run = library_twin(problem.model)
            side = Trainee(run, problem.make_optimizer(run))
        case _:
            raise ValueError(f"no training baseline is called {name!r}")
    if name.endswith("compiled optimizer"):
        setattr(side.optimizer, "step", torch.compile(side.optimizer.step))  # noqa: B010 - a method, to a type checker
    step = problem.make_step(run, side.optimizer)
    loss, build_s = timed(lambda: step(*problem.batches[0]), problem.device)
    comparison = Comparison(True, 0.0)
    if judge:
        comparison = judge.judge(judge.results(side, step, losses=(loss.detach(),)), losses_only=name == "cudnn")
    for _ in range(WARM_CALLS):
        step(*problem.batches[1])
    return Side(name, comparison, lambda: step(*problem.batches[1]), None, build_s)


def build_step_graph(problem: Training, judge: TrainingJudge | None, name: str, *, plan_memory: bool) -> Side:
    """Build the whole step, captured by hand."""
    options = MAX_AUTOTUNE if name.startswith("max-autotune") else {}
    side, first_loss, captured = capture_step(problem, options)
    peak = captured.peak_bytes
    if plan_memory:
        peak = smaller_peak(peak, lambda: capture_step(problem, {**options, **MEMORY_PLANNING})[2])
    comparison = Comparison(True, 0.0)
    if judge:
        comparison = judge.judge(judge.results(side, captured.call, captured.replay, (first_loss,)))
    call = captured.call
    return Side(name, comparison, lambda: call(*problem.batches[1]), captured.replay, captured.build_s, peak)


def capture_step(problem: Training, options: dict[str, Any]) -> tuple[Trainee, Tensor, Captured]:
    """Take one eager step, which makes the optimizer's state, then capture one, which leaves the state as it was.

    Returns:
        The side, the loss of its eager step, and the captured step.
    """
    side = trainee(problem, fused=True, capturable=True)
    with sound_pools():
        first_loss = problem.make_step(side.model, side.optimizer)(*problem.batches[0]).detach()
    compiled = torch.compile(side.model, fullgraph=True, dynamic=False, options=options)
    with side.unchanged():
        captured = capture_called(problem.make_step(compiled, side.optimizer), problem.batches[1], problem.device)
    return side, first_loss, captured
