"""The first run of a captured graph, in which it is built; where that fails, nothing has happened."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from millstream.capture.lines import told
from millstream.capture.step.calls import StepCall
from millstream.capture.step.graph import Build, StepGraph
from millstream.capture.step.replay_errors import find_failure
from millstream.capture.step.symbolic_sizes import NoSymbols
from millstream.capture.trace.patches.randomness import RandomState
from millstream.capture.trace.request import NoGraph
from millstream.data_parallel.exchange import PROGRESS
from millstream.errors import ArgumentError, CaptureError, DataParallelError, MillstreamError
from millstream.progress import phase
from millstream.signals import signals_wait


def build_and_run(
    build: Build, call: StepCall, graph: StepGraph, *, is_trial: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Build the graph and run it for the first time; a failure, or a trial, leaves everything as it was.

    Returns:
        The complete arguments, and the graph's results.
    """
    start = time.perf_counter()
    random_state = RandomState()
    for draw in graph.questions.draws:
        random_state.add("a random generator", draw.generator)
    # On the host, so that a large model does not need its state twice on the device.
    backups = [tensor.cpu() if tensor.device.type != "cpu" else tensor.clone() for tensor in graph.written]
    arguments = graph.complete(call.arguments)
    argument_backups = [tensor.detach().clone() for tensor in arguments] if graph.writes_arguments else []

    gradients = [tensor.grad for tensor, _ in graph.left]

    def restore() -> None:
        for (tensor, _), gradient in zip(graph.left, gradients, strict=True):
            tensor.grad = gradient
        with torch.no_grad():
            for tensor, backup in zip(graph.written, backups, strict=True):
                tensor.copy_(backup)
            for tensor, backup in zip(arguments, argument_backups, strict=False):
                tensor.copy_(backup)
        random_state.restore()

    try:
        with signals_wait(interrupts_wait=False):  # what a handler raises is no failure of the graph
            results = _run(build, call, graph, arguments, is_trial=is_trial)
    except BaseException:
        restore()
        raise
    if is_trial:
        restore()
    graph.capture_seconds = graph.trace_seconds + time.perf_counter() - start
    return arguments, results


def _run(build: Build, call: StepCall, graph: StepGraph, arguments: list[Tensor], *, is_trial: bool) -> list[Tensor]:
    """Build the graph and run it."""
    num_exchanges = PROGRESS.num_started
    try:
        graph.fill_slots()
        with torch.no_grad():
            graph.executable = build(graph.gm, graph.examples(arguments), frozenset(range(len(graph.static))))
            graph.tell_hyperparameters()
        if graph.sizes is not None:
            graph.sizes.settle(call.arguments)
        phase("first run")
        results = graph.replay(arguments)
        if is_trial:
            graph.replay(arguments)  # in its second run a plan is chosen
        return results
    except Exception as error:
        if PROGRESS.num_started > num_exchanges:  # which others have taken part in: no plain run may repeat them
            raise
        if isinstance(error, (ArgumentError, CaptureError, DataParallelError, NoGraph, NoSymbols)):
            raise  # it is the user who is asked, or it says by itself what it is
        if (own := find_failure(graph.gm, graph.inputs(arguments))) is not None:
            raise own from own.__cause__
        what = str(error).splitlines()[0] if isinstance(error, MillstreamError) else told(error)
        raise CaptureError(
            f"The captured step could not be built or run: {what}",
            remedy="Please report it; the step works without ms.step.",
        ) from error
