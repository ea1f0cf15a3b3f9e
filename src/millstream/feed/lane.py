"""What a way to a device must do, and the way to the CPU.

Two threads share a lane. The *worker* stages batches and, when it can, starts their copies. The *consumer* is the
thread that asks for batches; its current stream is the one that will compute with them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from torch import Tensor

from millstream.device import Place
from millstream.errors import FeedError
from millstream.feed.structure import name_leaf, split

L = TypeVar("L")


class Lane(Protocol[L]):
    """A way to a device. ``L`` is the lane's own note about a batch on its way."""

    def in_thread(self) -> AbstractContextManager[None]:
        """Entered by the worker before anything else."""
        ...

    def stage(self, batch: Any, stopped: threading.Event) -> L | None:
        """Worker: take the batch off the source's hands; ``None`` when stopped meanwhile."""
        ...

    def send(self, load: L) -> None:
        """Worker: start moving a staged batch, if that is possible yet."""
        ...

    def deliver(self, waiting: Sequence[L]) -> Any:
        """Consumer: hand the first of the waiting batches out, start moving the others. If it raises, call it again."""
        ...

    def close(self, left: Sequence[L]) -> None:
        """Give everything back. Called once, when neither thread will call again; never blocks."""
        ...


class HostLane:
    """The way to the CPU: a batch that the source has made is where it has to be."""

    def __init__(self) -> None:
        self._place = Place("cpu")

    def in_thread(self) -> AbstractContextManager[None]:
        """Nothing to prepare."""
        return nullcontext()

    def stage(self, batch: Any, stopped: threading.Event) -> Any | None:  # noqa: ARG002
        """Check that the batch is on the host."""
        for i, leaf in enumerate(split(batch)[0]):
            if leaf.device.type != "cpu":
                raise misplaced(batch, i, leaf, self._place)
        return (batch,)

    def send(self, load: Any) -> None:
        """It is there."""

    def deliver(self, waiting: Sequence[Any]) -> Any:
        """The very object that the source made."""
        return waiting[0][0]

    def close(self, left: Sequence[Any]) -> None:
        """Nothing to give back."""


def misplaced(batch: Any, index: int, leaf: Tensor, place: Place) -> FeedError:
    """The error for a tensor that lives on a device which is neither the host nor the feed's."""
    where = "on the host" if place.kind == "cpu" else f"on the host or on {place}"
    return FeedError(
        f"{name_leaf(batch, index)} ({leaf.dtype}, size {tuple(leaf.size())}) lives on {leaf.device}, but the feed "
        f"goes to {place}. Let the loader yield it {where}."
    )
