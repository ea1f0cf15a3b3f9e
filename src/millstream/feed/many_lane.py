"""The way to several devices at once: a lane for each, batch by batch in step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from millstream.feed.lane import Lane
from millstream.feed.ledger import Mark


@dataclass(slots=True)
class ManyLoad:
    """The parts of a batch, one per device."""

    parts: list[Any]

    @property
    def num_bytes(self) -> int:
        """What they take in staging memory together."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def staged_ns(self) -> int:
        """When the last part was."""
        return max((part.staged_ns for part in self.parts), default=0)

    @property
    def copy(self) -> tuple[Mark, Mark] | None:
        """That of the first part stands for all."""
        return self.parts[0].copy


class ManyLane:
    """Several lanes as one.

    Args:
        lanes: One per device, in the user's order.
        part: Makes the parts of a batch, at most one per lane.
    """

    def __init__(self, lanes: Sequence[Lane[Any]], part: Callable[[Any], Sequence[Any]]) -> None:
        self._lanes = lanes
        self._part = part

    @property
    def slot(self) -> int | None:
        """That of the first device; the others go round in step with it."""
        return self._lanes[0].slot

    @property
    def num_kept(self) -> int:
        """On all devices."""
        return sum(lane.num_kept for lane in self._lanes)

    @property
    def device(self) -> torch.device:
        """The first one; every call below names its own."""
        return self._lanes[0].device

    def in_thread(self) -> AbstractContextManager[None]:
        """As the first lane has it."""
        return self._lanes[0].in_thread()

    def spare_captures(self) -> AbstractContextManager[None]:
        """Likewise."""
        return self._lanes[0].spare_captures()

    def describe(self, batch: Any) -> ManyLoad:
        """Divide the batch."""
        return ManyLoad([lane.describe(part) for lane, part in zip(self._lanes, self._part(batch), strict=False)])

    def stage(self, load: ManyLoad, stopped: threading.Event) -> bool:
        """Stage all parts."""
        return all(lane.stage(part, stopped) for lane, part in zip(self._lanes, load.parts, strict=False))

    def send(self, load: ManyLoad, stopped: threading.Event, *, measured: bool) -> bool:
        """Send all parts."""
        pairs = zip(self._lanes, load.parts, strict=False)
        return all(lane.send(part, stopped, measured=measured) for lane, part in pairs)

    def finish(self, load: ManyLoad) -> None:
        """Be done with all parts."""
        for lane, part in zip(self._lanes, load.parts, strict=False):
            lane.finish(part)

    def end_sending(self, stopped: threading.Event) -> None:
        """Everything was sent."""
        for lane in self._lanes:
            lane.end_sending(stopped)

    def reclaim(self) -> None:
        """About to ask for the next batch."""
        for lane in self._lanes:
            lane.reclaim()

    def deliver(self, load: ManyLoad) -> tuple[Any, ...]:
        """A tuple with one part per device."""
        return tuple(lane.deliver(part) for lane, part in zip(self._lanes, load.parts, strict=False))

    def mark(self) -> Mark | None:
        """Where the first device stands."""
        return self._lanes[0].mark()

    def stop(self, stopped: threading.Event) -> None:
        """Wake the worker for good."""
        for lane in self._lanes:
            lane.stop(stopped)

    def keep(self) -> bool:
        """Nobody does."""
        return False

    def close(self) -> None:
        """Give everything back."""
        for lane in self._lanes:
            lane.close()
