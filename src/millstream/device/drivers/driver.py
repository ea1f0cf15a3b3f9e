"""The interface to a device's runtime: by way of ``context.driver``.

A driver makes and acts; pools, limits and lifetimes are the context's. Tests put a driver of a virtual device in its
place and so prove, without hardware, that code which uses a context is correct on the slowest and on the most eager of
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from millstream.device.handles import Event, Stream

GraphPool = tuple[int, int]
"""PyTorch's name for a memory pool that CUDA graphs share; ``(0, 0)`` means none."""


class Copies(NamedTuple):
    """Copies on a stream, and the events around them.

    Attributes:
        pairs: Tensors of one size and dtype: destination, source.
        stream: Where they are enqueued.
        waits: Events for which the stream waits first of all.
        before: Events to be recorded before the copies.
        after: Events to be recorded after them.
    """

    pairs: Sequence[tuple[Tensor, Tensor]]
    stream: Any
    waits: Sequence[Any] = ()
    before: Sequence[Any] = ()
    after: Sequence[Any] = ()


def make_copies(copies: Copies) -> None:
    """Enqueue copies by PyTorch's own calls."""
    pairs, stream, waits, before, after = copies
    for event in waits:
        event.wait(stream)
    for event in before:
        event.record(stream)
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)
    for event in after:
        event.record(stream)


class Driver(Protocol):
    """The abilities that a device must have. All calls but ``synchronize`` return before the device is done."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors live."""
        ...

    def make_stream(self, *, high_priority: bool) -> Stream:
        """Make a stream, or hand out one of PyTorch's: two calls may give the same one."""
        ...

    def make_event(self, *, timing: bool) -> Event:
        """Make an event."""
        ...

    def current_stream(self) -> Stream:
        """The stream on which the calling thread's operators run on this device."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make ``stream`` (and its device) the calling thread's current one, and restore both."""
        ...

    def stream_id(self, stream: Stream) -> int:
        """A number that no other stream of this device has."""
        ...

    def current_stream_id(self) -> int:
        """``stream_id(current_stream())``, without making the object."""
        ...

    def is_current(self) -> bool:
        """Return whether it is the calling thread's current device."""
        ...

    def is_capturing_elsewhere(self) -> bool:
        """Return whether the calling thread captures a graph on another device, which then is its current one."""
        ...

    def entry(self, stream: Stream) -> Callable[[], Any]:
        """A function that makes ``stream`` (and its device) the calling thread's current one, and restores nothing."""
        ...

    def blas_handle(self) -> int:
        """That of cuBLAS for the calling thread, set to its current stream; 0 where there is none."""
        ...

    def workspace_bytes(self) -> int:
        """Return what cuBLAS takes for each stream."""
        ...

    def guard(self) -> AbstractContextManager[Any]:
        """Make the device the calling thread's current one, and restore device and streams."""
        ...

    def mark_use(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """Let PyTorch's allocator, when the storage is freed, keep it until ``stream`` has done what it has by then."""
        ...

    def is_capturing(self) -> bool:
        """Tell whether the calling thread's current stream is being captured into a CUDA graph."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate a uint8 tensor of the device, whose memory belongs to the calling thread's current stream.

        That is: the host may have freed the memory a moment ago, while kernels on the current stream still use it.
        Other streams may touch the tensor only after an event that is recorded on the current stream after this call;
        and when the tensor is freed, the current stream must have been made to wait for what they did.
        """
        ...

    def lend(self, memory: Tensor, token: object) -> Tensor:
        """See ``memory`` (a plain tensor, not empty) as one of the same form that tells when nobody uses it any more.

        The result and its views have a storage of their own over the same bytes. It keeps ``token`` alive, and
        ``memory``; when the last of them is gone, both are dropped, in whatever thread that happens.
        """
        ...

    def copy(self, copies: Copies) -> None:
        """Wait for events, record events, enqueue copies to the first of each pair, record events.

        Asynchronous to the host when the host's side is pinned. No tensor may be reused before the stream is past it.
        """
        ...

    def prepare_copy(self, copies: Copies) -> Callable[[], int] | None:
        """``copy`` as a function that may be called often, with little left to do for Python.

        It keeps no tensor alive: it must not be called when one is gone. It gives 0 if all was enqueued, as ``copy``
        does where it raises no error; if not, ``copy`` is to be asked, which raises. ``None`` where nothing can be
        prepared, as before the events have been recorded for the first time.
        """
        ...

    def pin(self, num_bytes: int) -> Tensor:
        """Allocate a uint8 host tensor that the device reads directly; ``RuntimeError`` when refused."""
        ...

    def name_graph_pool(self) -> GraphPool:
        """Name a memory pool that one CUDA graph may have for itself."""
        ...

    def make_graph_pool(self) -> GraphPool:
        """Make a memory pool that several CUDA graphs may share."""
        ...

    def in_thread(self) -> AbstractContextManager[Any]:
        """Enter this first in a helper thread: sets its device, and keeps its calls from ending others' captures."""
        ...

    def spare_captures(self) -> AbstractContextManager[Any]:
        """Keep the calls of a thread from ending captures that others make meanwhile. May be entered again later."""
        ...

    def synchronize(self) -> None:
        """Block the host until the device has done everything."""
        ...
