"""Capturing CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from millstream.device.context import DeviceContext
from millstream.device.driver import GraphPool
from millstream.lower.streams import RunOn


@contextmanager
def capture(context: DeviceContext, graph: torch.cuda.CUDAGraph, pool: GraphPool | None = None) -> Iterator[None]:
    """Capture what the body launches on stream 0 of a context, and on streams that join it, into a graph.

    Like ``torch.cuda.graph``, but other threads' calls do no harm, the host does not wait for the device, and PyTorch's
    caches are not emptied first, which takes longer than capturing a few kernels.

    All graphs of a device read their random seed and offset in one place, which PyTorch (before pytorch#176752) resets
    when a capture begins. So that happens behind the replays before it and in front of those to come: a capture is a
    use of what graphs share, as a replay is. And it happens on the caller's stream: kernels on a second one slow all
    kernels of a process (docs/decisions/0031).

    Args:
        context: Of the device, which must be current; its ``graph_lock`` is held.
        graph: An empty one.
        pool: Memory shared with other graphs; ``None`` gives the graph its own.

    Raises:
        RuntimeError: Something cannot be captured: the first error, not those that follow from it.
    """
    context.enter_graphs()
    caller, stream = context.current_stream(), context.stream(0)
    context.order(caller, stream)
    try:
        with context.capture_lock, context.on(stream), _no_collection():
            handles = () if pool is None else (pool,)
            with RunOn(caller):
                graph.capture_begin(*handles, capture_error_mode="thread_local")  # type: ignore[arg-type]
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # which only says that there was an error
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        context.order(stream, caller)


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
