"""The way to several devices at once: a transfer for each, batch by batch in step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from millstream.data.profiler import StreamMarker
from millstream.data.transfer.base import PendingBatch, Transfer


class _Parts(PendingBatch):
    """The parts of a batch, one per device; the times of the first stand for all."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self.sent = 0  # so many of them
        self.num_bytes = sum(part.num_bytes for part in parts)

    @property
    def chunks(self) -> Sequence[Any]:  # type: ignore[override]
        """Those of all parts."""
        return [chunk for part in self.parts for chunk in part.chunks]


class MultiDeviceTransfer(Transfer):
    """Several transfers as one.

    Args:
        transfers: One per device, in the user's order.
        share: Makes the parts of a batch, at most one per device.
    """

    def __init__(self, transfers: Sequence[Transfer], share: Callable[[Any], Sequence[Any]]) -> None:
        self._transfers = transfers
        self._share = share

    @property
    def buffer(self) -> int | None:  # type: ignore[override]
        """That of the first device; the others go round in step with it."""
        return self._transfers[0].buffer

    @property
    def num_kept(self) -> int:  # type: ignore[override]
        """On all devices."""
        return sum(transfer.num_kept for transfer in self._transfers)

    @property
    def is_usable(self) -> bool:
        """Whether all are."""
        return all(transfer.is_usable for transfer in self._transfers)

    def in_thread(self) -> AbstractContextManager[Any]:
        """As the first transfer has it."""
        return self._transfers[0].in_thread()

    def spare_captures(self) -> AbstractContextManager[Any]:
        """As the first transfer has it, which is for all devices."""
        return self._transfers[0].spare_captures()

    def begin_pass(self, stopped: threading.Event, on_free: Callable[[], object]) -> None:
        """On all devices."""
        for transfer in self._transfers:
            transfer.begin_pass(stopped, on_free)

    def end_pass(self) -> None:
        """On all devices."""
        for transfer in self._transfers:
            transfer.end_pass()

    def prepare(self, batch: Any) -> _Parts:
        """Cut the batch into parts."""
        parts = [transfer.prepare(part) for transfer, part in zip(self._transfers, self._share(batch), strict=False)]
        return _Parts(parts)

    @property
    def num_buffers(self) -> float:  # type: ignore[override]
        """Of the device that has fewest."""
        return min(transfer.num_buffers for transfer in self._transfers)

    def stage(self, pending: _Parts, *, finish: bool = False) -> bool:
        """Stage all parts."""
        pairs = zip(self._transfers, pending.parts, strict=False)
        return all(transfer.stage(part, finish=finish) for transfer, part in pairs)

    def send(self, pending: _Parts, *, measured: bool) -> bool | None:
        """Send the parts that are not yet sent."""
        for transfer, part in [*zip(self._transfers, pending.parts, strict=False)][pending.sent :]:
            if not (is_sent := transfer.send(part, measured=measured)):
                return is_sent
            pending.sent += 1
        pending.copy, pending.staged_ns = pending.parts[0].copy, max(part.staged_ns for part in pending.parts)
        return True

    def finish(self, pending: _Parts) -> None:
        """Be done with all parts."""
        for transfer, part in zip(self._transfers, pending.parts, strict=False):
            transfer.finish(part)

    def ask(self) -> None:
        """About to ask for the next batch."""
        for transfer in self._transfers:
            transfer.ask()

    def deliver(self, pending: _Parts) -> tuple[Any, ...]:
        """A tuple with one part per device."""
        return tuple(transfer.deliver(part) for transfer, part in zip(self._transfers, pending.parts, strict=False))

    def mark(self) -> StreamMarker | None:
        """Where the first device stands."""
        return self._transfers[0].mark()

    def close(self) -> None:
        """Give everything back."""
        for transfer in self._transfers:
            transfer.close()
