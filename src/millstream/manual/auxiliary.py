"""``ms.manual.aux_streams``: streams within an operator."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from millstream._torch.dispatcher import is_being_traced, num_modes
from millstream.device import MAX_STREAMS, DeviceContext, Stream
from millstream.errors import ArgumentError, DeviceError
from millstream.manual.hints import HintedStreams
from millstream.manual.operator_rules import look_up
from millstream.manual.scope import Device, Scope, SerialHandle, find_context
from millstream.manual.thread_streams import find_session

_HERE = SerialHandle()
_tried: set[tuple[DeviceContext, int]] = set()  # streams that have had their workspace


def aux_streams(
    num_streams: int = 2, device: Device = None, *, workspace: int | None = None
) -> AuxStreams | HintedStreams:
    """Fork auxiliary streams from the current one within an operator, and join them at the end of the ``with``.

    For the body of a custom operator or an ``autograd.Function``: cheaper than ``ms.streams``, because nothing watches
    operators. The auxiliary streams come after everything that was issued before the ``with``, and the current one
    after everything that was issued on them. What is made within is for the stream that made it until then.

    >>> with ms.manual.aux_streams(2) as (main, aux):
    ...     grad_input = grad @ weight  # on the current stream
    ...     with aux:
    ...         grad_weight = grad.T @ input  # beside it

    Both are the current stream where there is only one: on the CPU, under ``MILLSTREAM_ENGINE=serial``, and where
    streams or memory for a second workspace are not to be had. Within a CUDA graph's capture they are captured; in what
    ``torch.compile``, ``ms.compile`` and ``ms.step`` trace they are hints, as in ``ms.streams``.

    Args:
        num_streams: How many, the current one included.
        device: Where; by default the current CUDA device, or the CPU where there is none.
        workspace: Bytes that work on each auxiliary stream needs; by default what cuBLAS takes, asked for once.

    Raises:
        ArgumentError: An argument has no meaning.
    """
    if type(num_streams) is not int or not 1 <= num_streams <= MAX_STREAMS:
        raise ArgumentError(f"aux_streams({num_streams!r}) is no number of streams; give 1 to {MAX_STREAMS}.")
    if workspace is not None and (type(workspace) is not int or workspace < 0):
        raise ArgumentError(f"workspace={workspace!r} is no number of bytes.")
    if is_being_traced():
        return HintedStreams(num_streams)
    if num_streams == 1 or os.environ.get("MILLSTREAM_ENGINE") == "serial":
        return AuxStreams(num_streams, None, workspace)
    context = find_context(device)
    return AuxStreams(num_streams, None if context.place.kind == "cpu" else context, workspace)


class AuxStreams:
    """Made by ``aux_streams``; entered, it gives the streams, the current one first."""

    def __init__(self, num_streams: int, context: DeviceContext | None, workspace: int | None) -> None:
        self._num_streams, self._context, self._workspace = num_streams, context, workspace
        self._scope: Scope | None = None
        self._lent: list[Stream] = []

    def __enter__(self) -> tuple[Any, ...]:
        context = self._context
        if context is None:
            return (_HERE,) * self._num_streams
        if num_modes() and find_session(context) is not None:
            self._scope = Scope(self._num_streams, context)
            scope = self._scope.__enter__()
            return tuple(scope[index] for index in range(self._num_streams))
        self._main = context.current_stream()
        try:
            self._lent = context.streams.lend(self._main, self._num_streams - 1)
        except DeviceError:
            return (_HERE,) * self._num_streams
        self._event = context.events.acquire()
        self._event.record(self._main)
        for stream in self._lent:
            self._event.wait(stream)
        if not all(_has_workspace(context, stream, self._workspace) for stream in self._lent):
            self.__exit__()
            return (_HERE,) * self._num_streams
        return (_HERE, *(AuxHandle(context, stream) for stream in self._lent))

    def __exit__(self, *details: Any) -> None:
        if self._scope is not None:
            self._scope.__exit__(*details)
        elif self._lent and self._context is not None and not self._context.closed:
            lent, self._lent = self._lent, []
            for stream in lent:
                self._event.record(stream)
                self._event.wait(self._main)
            self._context.events.release(self._event)
            self._context.streams.take_back(lent)


class AuxHandle:
    """An auxiliary stream: ``with aux:``, ``aux.mm(a, b)``, ``aux(function, a, b)``."""

    __slots__ = ("_context", "_on", "stream")

    def __init__(self, context: DeviceContext, stream: Stream) -> None:
        self._context, self.stream = context, stream
        self._on: list[AbstractContextManager[Any]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = look_up(name)
        return lambda *args, **kwargs: self(call, *args, **kwargs)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call any function on this stream."""
        with self._context.on(self.stream):
            return function(*args, **kwargs)

    def __enter__(self) -> AuxHandle:
        on = self._context.on(self.stream)
        on.__enter__()
        self._on.append(on)
        return self

    def __exit__(self, *details: Any) -> None:
        self._on.pop().__exit__(*details)


def _has_workspace(context: DeviceContext, stream: Stream, num_bytes: int | None) -> bool:
    """Return whether there is memory for a stream's workspace: asked by taking it for a moment."""
    key = context, context.driver.stream_id(stream)
    if num_bytes is None:
        if key in _tried:
            return True
        num_bytes = context.handles.workspace_bytes
    try:
        with context.on(stream):
            context.driver.allocate(num_bytes)
    except torch.OutOfMemoryError:
        return False
    _tried.add(key)
    return True
