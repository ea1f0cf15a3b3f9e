"""The driver of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from millstream.device.drivers.driver import Copies, GraphPool, make_copies
from millstream.device.drivers.lending import lend_host
from millstream.device.handles import Event, NullEvent, NullStream, Stream


class CpuDriver:
    """The CPU: everything has happened when a call returns."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._current = NullStream()

    def make_stream(self, *, high_priority: bool) -> Stream:
        """A stream that never waits."""
        return NullStream("urgent" if high_priority else "stream")

    def make_event(self, *, timing: bool) -> Event:
        """An event that is reached when it is recorded."""
        return NullEvent(timing)

    def current_stream(self) -> Stream:
        """The one stream operators run on: the host itself."""
        return self._current

    def on(self, stream: Stream) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Do nothing: all streams of the CPU are the host itself."""
        return nullcontext()

    def stream_id(self, stream: Stream) -> int:
        """The object's."""
        return id(stream)

    def current_stream_id(self) -> int:
        """That of the one stream."""
        return id(self._current)

    def is_current(self) -> bool:
        """Always."""
        return True

    def is_capturing_elsewhere(self) -> bool:
        """Nobody asks."""
        return False

    def entry(self, stream: Stream) -> Callable[[], Any]:  # noqa: ARG002
        """Nothing: all streams of the CPU are the host itself."""
        return _do_nothing

    def blas_handle(self) -> int:
        """None."""
        return 0

    def workspace_bytes(self) -> int:
        """None."""
        return 0

    def guard(self) -> AbstractContextManager[Any]:
        """Nothing to set."""
        return nullcontext()

    def mark_use(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """Do nothing: whatever uses it is done."""

    def is_capturing(self) -> bool:
        """Never."""
        return False

    def allocate(self, num_bytes: int) -> Tensor:
        """Plain memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def lend(self, memory: Tensor, token: object) -> Tensor:
        """As ``lend_host`` does."""
        return lend_host(memory, token)

    def copy(self, copies: Copies) -> None:
        """Copy at once."""
        make_copies(copies)

    def prepare_copy(self, copies: Copies) -> None:
        """Nothing can be."""

    def pin(self, num_bytes: int) -> Tensor:
        """Plain memory: no other device will read it."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def name_graph_pool(self) -> GraphPool:
        """No pool: the CPU captures no graphs."""
        return (0, 0)

    def make_graph_pool(self) -> GraphPool:
        """No pool either."""
        return (0, 0)

    def in_thread(self) -> AbstractContextManager[None]:
        """Nothing to prepare."""
        return nullcontext()

    def spare_captures(self) -> AbstractContextManager[None]:
        """There are none."""
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing: the CPU is idle."""


def _do_nothing() -> None:
    pass
