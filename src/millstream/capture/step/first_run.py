"""The first run of a captured graph, in which it is built; where that fails, nothing has happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    arguments = graph.complete(call.arguments)
    backups: list[tuple[Tensor, Tensor]] = []
    gradients = [tensor.grad for tensor, _ in graph.left]

    def back_up() -> None:
        """Keep what may be written, once: not before it is built, which may be put off."""
        if not backups:
            # On the host, so that a large model does not need its state twice on the device.
            states = ((each, each.clone() if each.is_cpu else each.cpu()) for each in graph.written)
            backups.extend([*states, *((each, each.detach().clone()) for each in arguments if graph.writes_arguments)])

    def restore() -> None:
        for (tensor, _), gradient in zip(graph.left, gradients, strict=True):
            tensor.grad = gradient
        with torch.no_grad():
            for tensor, backup in backups:
                tensor.copy_(backup)
        random_state.restore()

    try:
        # What a handler raises is no failure of the graph.
        with signals_wait(interrupts_wait=False), _told_as_failure(graph, arguments, back_up):
            _build(build, graph, arguments)
            back_up()
            results = _run(call, graph, arguments, is_trial=is_trial)
    except BaseException:
        restore()
        raise
    if is_trial:
        restore()
    graph.capture_seconds = graph.trace_seconds + time.perf_counter() - start
    return arguments, results


def _build(build: Build, graph: StepGraph, arguments: list[Tensor]) -> None:
    """Build the graph; nothing of the user's is written."""
    graph.fill_slots()
    with torch.no_grad():
        graph.executable = build(graph.gm, graph.examples(arguments), frozenset(range(len(graph.static))))
        graph.tell_hyperparameters()


def _run(call: StepCall, graph: StepGraph, arguments: list[Tensor], *, is_trial: bool) -> list[Tensor]:
    if graph.sizes is not None:
        graph.sizes.settle(call.arguments)
    phase("first run")
    results = graph.replay(arguments)
    if is_trial:
        graph.replay(arguments)  # in its second run a plan is chosen
    return results


@contextmanager
def _told_as_failure(graph: StepGraph, arguments: list[Tensor], back_up: Callable[[], None]) -> Iterator[None]:
    """Say what has failed, in the user's words where it is the user's, which running its operators tells."""
    num_exchanges = PROGRESS.num_started
    try:
        yield
    except Exception as error:
        if PROGRESS.num_started > num_exchanges:  # which others have taken part in: no plain run may repeat them
            raise
        if isinstance(error, (ArgumentError, CaptureError, DataParallelError, NoGraph, NoSymbols)):
            raise  # it is the user who is asked, or it says by itself what it is
        back_up()
        if (own := find_failure(graph.gm, graph.inputs(arguments))) is not None:
            raise own from own.__cause__
        what = str(error).splitlines()[0] if isinstance(error, MillstreamError) else told(error)
        raise CaptureError(
            f"The captured step could not be built or run: {what}",
            remedy="Please report it; the step works without ms.step.",
        ) from error
