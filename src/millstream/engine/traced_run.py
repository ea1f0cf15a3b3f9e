"""One run of a program, kernel by kernel: what happened, beside what was predicted.

Nothing of the caller's changes. On a CPU the program runs on inputs of its own, of the right sizes; a CUDA graph is
replayed on what it holds, and what it writes is put back.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from millstream.engine.arena import bind_arena
from millstream.engine.engine import Engine
from millstream.engine.plan_source import compile_plan
from millstream.engine.unchanged import may_count, unchanged
from millstream.errors import ArgumentError
from millstream.graph import KernelKind, Plan, Span, Timeline
from millstream.insight.profiler.kineto import read_trace
from millstream.insight.profiler.replays import timeline_of_replay
from millstream.program import Program
from millstream.schedule import assign_offsets, plan_serial

WARM_UPS, RUNS = 2, 7
"""Of the runs, the one of median length is shown."""


def why_not_trace(engine: Engine) -> str:
    """Say in a few words why a program cannot be run again by itself; empty when it can."""
    program = engine.lowered.program
    if len(engine.plan.graph.devices) > 1:
        return f"its kernels run on {', '.join(sorted(engine.plan.graph.devices))}"
    if program.numbers:
        return "its sizes are left open"
    for kernel in program.graph.kernels:
        if kernel.kind is KernelKind.COLLECTIVE:
            return f"{kernel.label} needs other processes"
        if kernel.kind is KernelKind.CONTROL:
            return f"what runs in {kernel.label} depends on values"
    if program.devices == {"cpu"}:
        unknown = [name for name in program.inputs if name is not None and program.layout(name) is None]
        return f"how its input {unknown[0]} lies in memory is not known" if unknown else ""
    return engine.why_not_replay()


def trace_run(engine: Engine) -> Timeline:
    """Run a program a few times and return the run of median length.

    On a CPU kernels run one after another, whatever the plan, and each is timed by the host's clock. A CUDA graph is
    replayed under the device's profiler.

    Raises:
        ArgumentError: It cannot be run by itself: ``why_not_trace`` says why; or the device's profiler saw nothing.
    """
    obstacle = why_not_trace(engine)
    if obstacle:
        raise ArgumentError(f"{engine.plan.graph.name} cannot be measured: {obstacle}")
    if engine.lowered.program.devices == {"cpu"}:
        return trace_host(engine.lowered.program)
    return _trace_graph(engine)


def trace_host(program: Program) -> Timeline:
    """Run a program on the host a few times, kernel after kernel, on inputs of its own; the run of median length."""
    kernels, plan = program.graph.kernels, plan_serial(program.graph)
    spans: list[Span] = []

    def observe(kernel: int, launch: Callable[[], Any], updated: tuple[torch.Tensor, ...]) -> Any:  # noqa: ARG001
        start = time.perf_counter_ns()
        result = launch()
        spans.append(Span(kernels[kernel].name, 0, start, time.perf_counter_ns(), kernel))
        return result

    run = compile_plan(program, plan, bind_arena(program, assign_offsets(plan)), observe=observe)
    inputs = make_inputs(program)
    timelines = []
    counted = [value for value in inputs if isinstance(value, torch.Tensor) and may_count(value)]
    with torch.no_grad(), unchanged(program, counted, torch.default_generator) as rewind:
        for number in range(WARM_UPS + RUNS):
            rewind()
            spans.clear()
            start = time.perf_counter_ns()
            run(list(inputs))
            end = time.perf_counter_ns()
            if number >= WARM_UPS:
                moved = (Span(s.name, 0, s.start_ns - start, s.end_ns - start, s.kernel) for s in spans)
                timelines.append(Timeline(tuple(moved), 1, end - start))
    return median_run(timelines)


def make_inputs(program: Program) -> list[Any]:
    """Tensors as a call would bring them: floating point numbers near one, and otherwise zeros."""
    inputs: list[Any] = []
    generator = torch.Generator().manual_seed(0)
    for name in program.inputs:
        layout = None if name is None else program.layout(name)
        if layout is None:
            inputs.append(None)
            continue
        tensor = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)
        if tensor.is_floating_point() and layout.device.type == "cpu":
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.zero_()
        inputs.append(tensor)
    return inputs


def _trace_graph(engine: Engine) -> Timeline:
    with engine.replays_unchanged() as replay:
        return trace_replays(engine.plan, replay)


def trace_replays(plan: Plan, replay: Callable[[], None]) -> Timeline:
    """Replay a captured plan a few times under the device's profiler, and return the run of median length.

    Raises:
        ArgumentError: The profiler saw nothing.
    """
    for _ in range(WARM_UPS):
        replay()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:  # else it warns
        for _ in range(RUNS + 1):  # CUPTI may lose the first kernels of a window (pytorch#192021)
            replay()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = read_trace(json.loads(path.read_text(encoding="utf-8")))
    launches = [each.number for each in trace.launches if "GraphLaunch" in each.name][1:]
    of_launch = [[each for each in trace.activities if each.launch == number] for number in launches]
    timelines = [timeline_of_replay(plan, each) for each in of_launch if each]
    if not timelines:
        raise ArgumentError(f"{plan.graph.name} was replayed, and the device's profiler recorded nothing")
    return median_run(timelines)


def median_run(timelines: Sequence[Timeline]) -> Timeline:
    """The run of median length."""
    return sorted(timelines, key=lambda timeline: timeline.end_ns)[len(timelines) // 2]
