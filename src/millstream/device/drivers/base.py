"""What a context asks of a device's runtime.

A driver makes and acts; pools, limits and life times are the context's. Tests put a driver of a virtual device in its
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


class Transfer(NamedTuple):
    """Copies on a stream, and what stands around them.

    Attributes:
        pairs: Tensors of one size and dtype: where to, where from.
        stream: Where.
        waits: Events for which the stream waits first of all.
        before: Events to be recorded in front of the copies.
        after: Events to be recorded after them.
    """

    pairs: Sequence[tuple[Tensor, Tensor]]
    stream: Any
    waits: Sequence[Any] = ()
    before: Sequence[Any] = ()
    after: Sequence[Any] = ()


def make_copies(transfer: Transfer) -> None:
    """Make a transfer by PyTorch's own calls."""
    pairs, stream, waits, before, after = transfer
    for event in waits:
        event.wait(stream)
    for event in before:
        event.record(stream)
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)
    for event in after:
        event.record(stream)


class Driver(Protocol):
    """What a device must be able to do. All calls but ``synchronize`` return before the device has done the work."""

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
        """That of the calling thread's current stream."""
        ...

    def is_current(self) -> bool:
        """Whether it is the calling thread's current device."""
        ...

    def is_capturing_elsewhere(self) -> bool:
        """Whether the calling thread captures a graph on another device."""
        ...

    def entry(self, stream: Stream) -> Callable[[], Any]:
        """What makes ``stream`` (and its device) the calling thread's current one."""
        ...

    def blas_handle(self) -> int:
        """That of cuBLAS for the calling thread, set to its current stream; 0 where there is none."""
        ...

    def workspace_bytes(self) -> int:
        """What cuBLAS takes for each stream."""
        ...

    def guard(self) -> AbstractContextManager[Any]:
        """Make the device current, and restore device and streams."""
        ...

    def mark_use(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """When the storage is freed, keep its memory until ``stream`` has done what it has been given by then."""
        ...

    def is_capturing(self) -> bool:
        """Tell whether the calling thread's current stream is being captured into a CUDA graph."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate a uint8 tensor of the device for the calling thread's current stream."""
        ...

    def lend(self, memory: Tensor, token: object) -> Tensor:
        """The same as ``memory``, in a storage that keeps ``token`` and ``memory`` until its last view is gone."""
        ...

    def copy(self, transfer: Transfer) -> None:
        """Wait for events, record events, enqueue copies to the first of each pair, record events.

        Asynchronous to the host when the host's side is pinned.
        """
        ...

    def prepare_copy(self, transfer: Transfer) -> Callable[[], int] | None:
        """What does the same each time that it is called, but for errors, of which it gives the number; 0 for none.

        It keeps no memory alive. ``None`` where nothing can be prepared.
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
        """Prepare a helper thread for calls to this device."""
        ...

    def spare_captures(self) -> AbstractContextManager[Any]:
        """Keep the calling thread's calls from ending captures that other threads make. May be entered again later."""
        ...

    def synchronize(self) -> None:
        """Block the host until the device has done everything."""
        ...
