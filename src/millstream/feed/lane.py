"""What a way to a device must do, and the way to the CPU.

Two threads share a lane. The *worker* pulls batches, stages them and starts their copies. The *consumer* is the thread
that asks for batches; its current stream is the one that will compute with them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import is_not
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from millstream.device import Place
from millstream.errors import FeedError
from millstream.feed.layout import narrow_repeats
from millstream.feed.ledger import Mark
from millstream.feed.structure import as_tensors, name_leaf, split

L = TypeVar("L", bound="Load")

Transform = Callable[[Any], Any]
"""What a user does to each batch on the device before he gets it."""


class Load(Protocol):
    """A batch on its way; lanes add what they note about it.

    Attributes:
        num_bytes: What it takes in staging memory.
        staged_ns: When the source's memory was no longer needed.
        copy: Marks around its copy and transform, for the ledger, if the batch is measured.
    """

    num_bytes: int
    staged_ns: int
    copy: tuple[Mark, Mark] | None


class Lane(Protocol[L]):
    """A way to a device. ``L`` is the lane's own note about a batch on its way."""

    @property
    def slot(self) -> int | None:
        """Number of the slot of the batch handed out last, if it lies in one."""
        ...

    @property
    def num_kept(self) -> int:
        """Pieces of memory that the user has kept."""
        ...

    @property
    def device(self) -> torch.device:
        """The current one where batches are made."""
        ...

    def in_thread(self) -> AbstractContextManager[None]:
        """Entered by a worker before anything else."""
        ...

    def spare_captures(self) -> AbstractContextManager[None]:
        """Entered by a consumer who is the worker of one batch."""
        ...

    def describe(self, batch: Any) -> L:
        """Worker: look at a batch."""
        ...

    def stage(self, load: L, stopped: threading.Event) -> bool:
        """Worker: begin to copy the source's memory; false when stopped before."""
        ...

    def send(self, load: L, stopped: threading.Event, *, measured: bool) -> bool:
        """Worker: start moving the batch; false when stopped before. Only a ``measured`` one has marks."""
        ...

    def finish(self, load: L) -> None:
        """Worker: be done with the source's memory, whatever became of ``stage`` and ``send``."""
        ...

    def end_sending(self, stopped: threading.Event) -> None:
        """Worker: everything was sent."""
        ...

    def reclaim(self) -> None:
        """Consumer: about to ask for the next batch."""
        ...

    def deliver(self, load: L) -> Any:
        """Consumer: hand the batch out. May be called again, until the load is dropped because the user has it."""
        ...

    def mark(self) -> Mark | None:
        """Consumer: note where his stream and his clock stand, if the lane has a stream."""
        ...

    def stop(self, stopped: threading.Event) -> None:
        """Any thread: wake the worker of the pass that this event is of, for good."""
        ...

    def keep(self) -> bool:
        """Behind a pass that has ended in order: whether somebody keeps this for another one, and it is not closed."""
        ...

    def close(self) -> None:
        """Give everything back. Called once, when no thread will call again; never blocks."""
        ...


@dataclass(slots=True)
class HostLoad:
    """A batch that is where it has to be."""

    batch: Any
    num_bytes: int
    staged_ns: int = 0
    copy: tuple[Mark, Mark] | None = None


class HostLane:
    """The way to the CPU: a batch that the source has made is where it has to be.

    Args:
        transform: Applied to each batch, in the worker.
    """

    slot = None
    num_kept = 0
    device = torch.device("cpu")

    def __init__(self, transform: Transform | None = None) -> None:
        self._place = Place("cpu")
        self._transform = transform

    def in_thread(self) -> AbstractContextManager[None]:
        """Nothing to prepare."""
        return nullcontext()

    def spare_captures(self) -> AbstractContextManager[None]:
        """There are none."""
        return nullcontext()

    def describe(self, batch: Any) -> HostLoad:
        """Check that the batch is on the host, and make tensors of its arrays."""
        tensors, batch = _make_tensors(batch)
        num_bytes = 0
        for i, leaf in enumerate(tensors):
            if isinstance(leaf, Tensor):
                if leaf.device.type != "cpu":
                    raise misplaced(batch, i, leaf, self._place)
                num_bytes += narrow_repeats(leaf).nbytes if leaf.layout is torch.strided and not leaf.is_nested else 0
        return HostLoad(batch, num_bytes)

    def stage(self, load: HostLoad, stopped: threading.Event) -> bool:  # noqa: ARG002
        """Nothing to move."""
        if self._transform is not None:
            _, load.batch = _make_tensors(self._transform(load.batch))
        load.staged_ns = time.perf_counter_ns()
        return True

    def send(self, load: HostLoad, stopped: threading.Event, *, measured: bool) -> bool:  # noqa: ARG002
        """It is there."""
        return True

    def finish(self, load: HostLoad) -> None:
        """The source's memory is the user's."""

    def end_sending(self, stopped: threading.Event) -> None:
        """Nothing was sent."""

    def reclaim(self) -> None:
        """Every batch is the user's own."""

    def deliver(self, load: HostLoad) -> Any:
        """The very object that the source made, if it holds no arrays."""
        return load.batch

    def mark(self) -> Mark | None:
        """No stream, no mark."""
        return None

    def stop(self, stopped: threading.Event) -> None:
        """Nobody waits."""

    def keep(self) -> bool:
        """There is nothing to keep."""
        return False

    def close(self) -> None:
        """Nothing to give back."""


def _make_tensors(batch: Any) -> tuple[list[Any], Any]:
    """The leaves of a batch, tensors for its arrays, and the batch with these: itself, if there is none."""
    leaves, rebuild = split(batch)
    tensors = as_tensors(batch, leaves)
    return tensors, rebuild(tensors) if any(map(is_not, tensors, leaves)) else batch


def misplaced(batch: Any, index: int, leaf: Tensor, place: Place) -> FeedError:
    """The error for a tensor that lives on a device which is neither the host nor the feed's."""
    where = "on the host" if place.kind == "cpu" else f"on the host or on {place}"
    return FeedError(
        f"{name_leaf(batch, index)} ({leaf.dtype}, size {tuple(leaf.size())}) lives on {leaf.device}, but the feed "
        f"goes to {place}. Let the source yield it {where}."
    )
