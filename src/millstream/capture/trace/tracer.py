"""Run the user's step once on fake tensors and record it as one flat graph of aten operators.

**Contract**
- The user's tensors, optimizers, modules, ``.grad``, random state and every other Python object found are afterwards
  exactly as before, whether tracing succeeds or fails.
- The graph writes state, numbers and gradients through its inputs and returns the tensors of the result; its results
  share no memory with its inputs or with each other.
- What the graph could not repeat on every call is refused with a ``CaptureError``.

**Steps**
1. Run the function (``one_way.py``), once more for each branch on a tensor's value, and merge these ways.
2. Clean the graph and drop the inputs it does not use (``finished_graph.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import fx

from millstream._torch.compiler.dynamo import compile_lock
from millstream._torch.devices.device_guard import keep_device_guard
from millstream._torch.tensors import storage_id
from millstream.capture.trace.branches.flags import StateFlag
from millstream.capture.trace.branches.merged_ways import merge
from millstream.capture.trace.one_way import OneWay
from millstream.capture.trace.outcome.finished_graph import finish
from millstream.capture.trace.request import (
    Disturbed,
    FirstChange,
    NoGraph,
    OneShot,
    OtherFlags,
    Request,
    Traced,
)
from millstream.capture.trace.watches.asked_values import READ_REMEDY, VALUE_READERS
from millstream.errors import CaptureError
from millstream.locks import TRACING
from millstream.passes.selecting import DifferentWays, results_of
from millstream.room import with_room
from millstream.signals import signals_wait


def trace_step(request: Request) -> Traced:
    """Record the step of ``request``; the caller is ``tracing_alone``.

    Raises:
        CaptureError: It cannot be captured.
        NoGraph: There is no graph for ``request`` now; its class says why.
    """
    first = OneWay(request)
    try:
        traced: Traced = with_room(lambda: _trace(first))
        first.check_conversions()
        return traced
    except Exception as error:
        if isinstance(error, CaptureError | OneShot | Disturbed):  # a plain number seems to be another thread's
            first.check_conversions(error)
        first.failures.make_readable(error)
        raise
    finally:
        for each in first.with_others():
            each.forget()


@contextlib.contextmanager
def tracing_alone() -> Iterator[None]:
    """While one thread traces, no other does, nor looks for what to trace; PyTorch's compilers and signals wait.

    The order of the locks is the same everywhere. Handlers of signals run without them: they may wait for a thread that
    waits for one.
    """
    with contextlib.ExitStack() as end, compile_lock(), TRACING.lock:
        end.enter_context(signals_wait(interrupts_wait=True))
        keep_device_guard()
        yield


def _trace(first: OneWay) -> Traced:
    try:
        way, gm = _trace_ways(first)
        traced = _finished(way, gm)
        traced.flags = _settle_flags(first, traced)
        return traced
    except CaptureError as error:
        met = [flag for each in first.with_others() for flag in each.flags.met]
        if not first.request.waits_for_flags and any(flag.waits for flag in met):
            raise OtherFlags(needs_waiting=True) from None
        _run_first(first.request, met, error)
        raise


def _trace_ways(first: OneWay) -> tuple[OneWay, fx.GraphModule]:
    """Record the step, and once more for each branch that it meets, with the other outcome."""
    try:
        gm = first.trace()
    except CaptureError as error:
        if not first.ways.lines:
            raise
        raise first.ways.refuse_trace(error) from error
    first.num_results = len(results_of(gm)) - len(first.ways.values)
    way, num_given = first, len(first.request.ways)
    for number in reversed(range(num_given, len(first.ways.taken))):
        ways = (*first.ways.taken[:number], not first.ways.taken[number])
        other = OneWay(replace(first.request, ways=ways))
        first.others.append(other)
        try:
            way, gm = merge(way, gm, *_trace_ways(other), number)
        except DifferentWays as different:
            raise first.ways.refusal(number, str(different)) from None
    return way, gm


def _finished(way: OneWay, gm: fx.GraphModule) -> Traced:
    try:
        return finish(way, gm)
    except (CaptureError, NoGraph):
        raise
    except Exception as error:
        raise way.failures.of(error) from error


def _settle_flags(first: OneWay, traced: Traced) -> list[StateFlag]:
    """The flags for whose values the trace holds; stop where it writes one."""
    flags = [flag for each in first.with_others() for flag in each.flags.asked]
    state = zip(traced.state, traced.written, strict=False)
    written = {storage_id(first.request.state[index].tensor) for index, is_written in state if is_written}
    if changed := [flag for flag in flags if flag.storages & written]:
        _run_first(
            first.request, changed, CaptureError(VALUE_READERS["__bool__"], where=changed[0].where, remedy=READ_REMEDY)
        )
        raise OtherFlags(frozenset().union(*(flag.storages for flag in changed)))
    lines = {flag.where for flag in flags if flag.waits}
    traced.effects.waits = sorted({*traced.effects.waits, *lines})
    return flags


def _run_first(request: Request, flags: Iterable[StateFlag], error: CaptureError) -> None:
    """Have the step run as plain Python first where that may be the last time that flags are what they are."""
    settled = {flag.key for flag in flags}
    if not settled <= request.settled:
        request.settled |= settled
        raise FirstChange(error) from None
