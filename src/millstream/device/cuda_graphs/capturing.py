"""Capturing CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from millstream._torch.devices.capture_generators import NoExchange, aside
from millstream._torch.devices.raw_streams import RunOn, stop_recording
from millstream.device.context import DeviceContext
from millstream.device.drivers.cuda import capture_nothing
from millstream.device.drivers.driver import GraphPool
from millstream.device.guard import guard


@contextmanager
def capture(context: DeviceContext, graph: torch.cuda.CUDAGraph, pool: GraphPool | None = None) -> Iterator[None]:
    """Capture what the body launches on stream 0 of a context, and on streams that join it, into a graph.

    Like ``torch.cuda.graph``, but other threads' calls do no harm, the host does not wait for the device, and PyTorch's
    caches are not emptied first, which takes longer than capturing a few kernels.

    All graphs of a device read their random seed and offset in one place, which PyTorch (before pytorch#176752) resets
    when a capture begins. So that happens after the replays before it and in front of those to come: a capture is a
    use of what graphs share, as a replay is. And it happens on the caller's stream: kernels on a second one slow all
    kernels of a process (docs/decisions/side-by-side.md).

    Args:
        context: Of the device, which must be current; its ``graphs.lock`` is held.
        graph: An empty one.
        pool: Memory shared with other graphs; ``None`` gives the graph its own.

    Raises:
        RuntimeError: Something cannot be captured: the first error, not those that follow from it.
    """
    context.graphs.enter()
    caller, stream = context.current_stream(), context.streams[0]
    randomness = aside(graph)
    context.events.order(caller, stream)
    try:
        with context.capture_lock, context.on(stream), _no_collection():
            pool = pool or context.driver.name_graph_pool()
            try:
                with RunOn(caller), randomness.begin():
                    graph.capture_begin(pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
                with randomness.body():
                    yield
            except BaseException:
                with suppress(RuntimeError):  # which only says that there was an error, or that it had not begun
                    _end(context, graph, pool)
                _clean_up(context, randomness)
                raise
            try:
                _end(context, graph, pool)
            except BaseException:
                _clean_up(context, randomness)
                raise
            randomness.end()
    finally:
        context.events.order(stream, caller)


def _clean_up(context: DeviceContext, randomness: NoExchange) -> None:
    """At once after a capture that failed: the next kernel of the same run may draw random numbers.

    A device that works no more is reported where it is used next, in addition to the first error.
    """
    with suppress(Exception):
        randomness.end()
    with suppress(Exception):
        repair(context)


def _end(context: DeviceContext, graph: torch.cuda.CUDAGraph, pool: GraphPool) -> None:
    """End a capture, or let the allocator leave the pool that it records into."""
    try:
        with context.on(context.streams[0]):  # it can be ended on no other, and an error may have left one current
            graph.capture_end()
    except RuntimeError:
        stop_recording(context.place.index, pool)
        raise


def repair(context: DeviceContext) -> None:
    """Let the device's random generator and graph pools work again after a capture, or a trial, that failed.

    The generator waits for the capture's end, until another one ends; pools go on recording.

    Raises:
        RuntimeError: The device works no more.
    """
    context.graphs.abandon_pools()
    with guard(context.place), context.capture_lock:
        capture_nothing()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let garbage wait: a graph that dies in the thread which captures another one ends the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
