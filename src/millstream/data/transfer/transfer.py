"""The interface of a way to a device, and the way to the CPU.

Two threads share a transfer. The *worker* prepares batches, stages them and starts their copies. The *consumer* is the
thread that asks for batches; its current stream is the one that will compute with them. Without a worker the consumer
does both.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from millstream.data.transfer.batch_layout import narrow_repeats
from millstream.device import Place, StreamMarker
from millstream.errors import FeedError
from millstream.tree.batches import as_tensors, flatten_batch, name_leaf

Transform = Callable[[Any], Any]
"""What a user does to each batch on the device before they get it."""


class NotNowError(FeedError):
    """No batch can be handed out now; nothing is lost."""


class PendingBatch:
    """A batch on its way; transfers add what they note about it.

    Attributes:
        num_bytes: What it takes in staging memory.
        copy: Markers around its copy and transform, if it is measured.
        staged_ns: When all of it was staged.
        chunks: What of it is still to be staged while it is sent: until then the source's memory is needed.
    """

    num_bytes: int
    copy: tuple[StreamMarker, StreamMarker] | None = None
    staged_ns = 0
    chunks: Sequence[Any] = ()


class Transfer:
    """A way to a device; what does nothing here is nothing on the CPU.

    Attributes:
        num_kept: Pieces of memory that the user has kept in this pass.
        num_buffers: How many batches can be sent before the user drops one.
        spare_captures: Entered by a consumer that makes a batch.
    """

    num_kept = 0
    num_buffers: float = math.inf
    spare_captures: AbstractContextManager[Any] = nullcontext()

    def in_thread(self) -> AbstractContextManager[Any]:
        """Entered by a worker before anything else in a pass."""
        return nullcontext()

    @property
    def is_usable(self) -> bool:
        """Whether it can serve another pass."""
        return True

    def begin_pass(self, stopped: threading.Event, on_free: Callable[[], object]) -> None:
        """A pass begins on the current stream.

        Args:
            stopped: Set when nothing of it is wanted any more: a thread that waits for the device gives up.
            on_free: To be called, in any thread, when memory for a batch came back.
        """

    def end_pass(self) -> None:
        """No thread makes or asks for a batch of the pass any more."""

    # --- the worker's side -------------------------------------------------------------------------------------------

    def prepare(self, batch: Any) -> Any:
        """Look at a batch and make what is known of it, a ``PendingBatch``.

        Raises:
            FeedError: Something in it cannot go to the device.
        """
        raise NotImplementedError

    def stage(self, pending: Any, *, finish: bool = False) -> bool:
        """Begin to copy the source's memory, or finish that, but for its later chunks; false when stopped before."""
        raise NotImplementedError

    def send(self, pending: Any, *, measured: bool) -> bool | None:  # noqa: ARG002
        """Start moving the batch, which does not need the source's memory then.

        ``None`` if there is no memory for it now, false when stopped. Only a ``measured`` one has markers.
        """
        return True

    def finish(self, pending: Any) -> None:
        """Be done with the source's memory, whatever became of ``stage`` and ``send``."""

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def ask(self) -> None:
        """About to wait for the next batch.

        Raises:
            NotNowError: None can be handed out now.
        """

    def deliver(self, pending: Any) -> Any:
        """Hand the batch out.

        Raises:
            NotNowError: It cannot be handed out now.
        """
        raise NotImplementedError

    def mark(self) -> StreamMarker | None:
        """Note where the consumer's stream and clock stand, if there is a stream."""
        return None

    def close(self) -> None:
        """Give everything back. Called once, when no thread will call again; never waits for the device."""


class _HostBatch(PendingBatch):
    """A batch that is where it has to be."""

    def __init__(self, batch: Any, num_bytes: int) -> None:
        self.batch, self.num_bytes = batch, num_bytes


class HostTransfer(Transfer):
    """The way to the CPU: a batch that the source has made is where it has to be.

    Args:
        transform: Applied to each batch, in the worker.
    """

    def __init__(self, transform: Transform | None = None) -> None:
        self._place = Place("cpu")
        self._transform = transform

    def prepare(self, batch: Any) -> _HostBatch:
        """Check that the batch is on the host, and make tensors of its arrays."""
        tensors, batch = _make_tensors(batch)
        num_bytes = 0
        for i, leaf in enumerate(tensors):
            if isinstance(leaf, Tensor):
                if leaf.device.type != "cpu":
                    raise misplaced(batch, i, leaf, self._place)
                if leaf.layout is torch.strided and not leaf.is_nested:
                    num_bytes += narrow_repeats(leaf).nbytes if 0 in leaf.stride() else leaf.nbytes
        return _HostBatch(batch, num_bytes)

    def stage(self, pending: _HostBatch, *, finish: bool = False) -> bool:  # noqa: ARG002
        """Nothing to move."""
        if self._transform is not None:
            _, pending.batch = _make_tensors(self._transform(pending.batch))
        return True

    def deliver(self, pending: _HostBatch) -> Any:
        """The very object that the source made, if it holds no arrays."""
        return pending.batch


def _make_tensors(batch: Any) -> tuple[list[Any], Any]:
    """The leaves of a batch, tensors for its arrays, and the batch with these: itself, if there is none."""
    leaves, unflatten = flatten_batch(batch)
    tensors = as_tensors(batch, leaves)
    return tensors, unflatten(tensors) if any(map(is_not, tensors, leaves)) else batch


def misplaced(batch: Any, index: int, leaf: Tensor, place: Place) -> FeedError:
    """The error for a tensor that lives on a device which is neither the host nor the feed's."""
    where = "on the host" if place.kind == "cpu" else f"on the host or on {place}"
    return FeedError(
        f"{name_leaf(batch, index)} ({leaf.dtype}, size {tuple(leaf.size())}) lives on {leaf.device}, but the feed "
        f"goes to {place}. Let the source yield it {where}."
    )
