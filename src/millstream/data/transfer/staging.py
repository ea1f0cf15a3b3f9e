"""The host's side of a feed: pinned buffers, and how they are filled.

A buffer is written again only when the copy out of it is over on the device. That is the one thing a feed ever asks the
device about, and it asks in the feed's own thread.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from millstream.data.transfer.batch_layout import BatchLayout, Chunk, narrow_repeats, see_source, view_leaf
from millstream.device import DeviceContext, Event, wait_until_reached
from millstream.device.copying import Filling, filler

CHUNK_BYTES = 16 << 20
"""Larger batches are staged and sent in chunks of about this size. So their copy begins when a part is staged, and
their bytes pass through so little pinned memory that the processor's cache can hold it. On the way of 64 MiB to an
H200, staging and copies then hardly slow each other down: a loop that waits for nothing else takes 1.03 times as long
as its copies, and not 1.6. So it does with chunks of 8 MiB, in each of which Python has its part."""

PAST_CACHES_BYTES = 12 << 20
"""Batches up to this are staged past the processors' caches: a device reads lines that they have just written half as
fast as memory. Of longer ones the caches have let go when their turn comes (docs/decisions/feeding.md)."""

MAX_BUFFERS = 32
"""Enough for steps of 50 µs."""

SLACK_BYTES = 64 << 20
"""So much pinned memory may be used to run ahead."""


@dataclass(slots=True, eq=False)
class StagingPlan:
    """A pinned buffer as it is used for one chunk of a layout: made once.

    Attributes:
        chunk: It.
        copies: What goes to which segment, and from which byte on there.
        addresses: Where the chunk's sources go.
        lengths: Of the same, in bytes.
        fill: Begins to bring them there, if compiled code can.
        pieces: Where they go as tensors, if that was ever asked for.
    """

    chunk: Chunk
    copies: Sequence[tuple[int, int, Tensor]] = ()
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    fill: Callable[[int, object], object | None] | None = None
    pieces: list[Tensor] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class StagingBuffer:
    """Pinned memory that one chunk of a batch after another passes through."""

    copied: Event
    busy: bool = False  # its bytes are still to be read by a copy that has been enqueued
    left: bool = False  # or by one that the consumer is to enqueue
    turn: int = -1  # the number of that copy
    memory: Tensor | None = None
    layout: BatchLayout | None = None  # whose chunks it was opened for
    plans: dict[int, StagingPlan] = field(default_factory=dict)  # for these, by the chunks' identities
    plan: StagingPlan | None = None  # the present one
    filling: Filling | None = None

    @property
    def copies(self) -> Sequence[tuple[int, int, Tensor]]:
        """What is to be copied out of it, see ``StagingPlan``."""
        return () if self.plan is None else self.plan.copies

    def finish(self) -> None:
        """Return when the batch lies in the buffer."""
        if self.filling is not None:
            self.filling.finish()
            self.filling = None


class StagingPool:
    """Pinned buffers, used in turn. One thread fills them.

    The host runs ahead of the device by as many batches as there are buffers, less one: so long it may take to notice
    that a copy is over, to stage the next batch and to hand it to a sleeping thread, before the device runs dry. Steps
    of less than a millisecond need more buffers for that than batches may be under way, but their batches are small.

    Args:
        context: Of the device.
        num_buffers: How many batches lie in pinned memory at least.
    """

    def __init__(self, context: DeviceContext, num_buffers: int) -> None:
        self._context = context
        self._filler = filler()
        self._num_buffers = num_buffers
        self._buffers: deque[StagingBuffer] = deque()  # the oldest first
        self.num_bytes = 0  # of all buffers
        self.turns = count()  # of the copies, all of which are enqueued on one stream
        self._over = -1  # the latest of them that is known to be over, as are all before
        self._capture_lock = context.capture_lock

    def begin_fill(
        self,
        layout: BatchLayout,
        chunk: Chunk,
        leaves: Sequence[Tensor],
        stopped: threading.Event,
        addresses: array[int] | None = None,
        *,
        wait: bool = True,
    ) -> StagingBuffer | None:
        """Begin to copy a chunk of a batch into the buffer that was filled longest ago; ``None`` when stopped before.

        The caller has made sure that the copy out of it has been enqueued, or that it is marked as left to the
        consumer; of the buffer filled last it may still be about to. It finishes the buffer before the source may touch
        its memory again, and before ``close``.

        Args:
            layout: Of the batch.
            chunk: Of the layout.
            leaves: The batch.
            stopped: Set to give up waiting for the buffer.
            addresses: Of the sources, if ``are_bytes``; needed unless the chunk is whole.
            wait: Whether to wait for a buffer; else ``None`` as well where none is free.
        """
        buffer = self._find(chunk.num_bytes)
        # The device may be about to read these bytes (WAR).
        if buffer.busy and not (wait and wait_until_reached(self._context, buffer.copied, stopped)):
            return None
        buffer.busy = False
        plan = buffer.plan
        if plan is None or plan.chunk is not chunk:
            plan = self._open(buffer, layout, chunk)
        if addresses is not None and plan.fill is not None:
            if len(chunk.sources) < len(addresses) or chunk.num_bytes < layout.num_bytes:
                addresses = array("Q", [addresses[number] + start for number, start, _, _ in chunk.sources])
            # One call, whatever the number of leaves, during which nobody needs the interpreter's lock: to get it back
            # can take milliseconds while the training loop computes in Python.
            started = plan.fill(addresses.buffer_info()[0], (buffer.memory, leaves))
            if started is not None and self._filler is not None:
                buffer.filling = self._filler.follow(started)
        elif buffer.memory is not None:
            with out_of_inference_mode():
                numbers = range(len(layout.sources))
                plan.pieces = plan.pieces or [_see_piece(buffer.memory, layout, number) for number in numbers]
                torch._foreach_copy_(plan.pieces, [_see_whole(layout, leaves, number) for number in numbers])
        self._buffers.rotate(-1)
        return buffer

    def _find(self, num_bytes: int) -> StagingBuffer:
        """The buffer that was filled longest ago; or a new one, if that is still read and there may be more."""
        num_buffers = len(self._buffers)
        if num_buffers >= self._num_buffers:
            while self._buffers[0].left:  # not all are: there are more buffers than batches under way
                self._buffers.rotate(-1)
            oldest = self._buffers[0]
            if oldest.busy and oldest.turn > self._over:
                self._look(oldest)
            if oldest.turn <= self._over:
                oldest.busy = False
            if not oldest.busy or num_buffers == MAX_BUFFERS or self.num_bytes + num_bytes > SLACK_BYTES:
                return oldest
        self._buffers.appendleft(StagingBuffer(self._context.events.acquire()))
        return self._buffers[0]

    def _look(self, oldest: StagingBuffer) -> None:
        """Ask the device about a buffer; if possible about half of them at once, so that the next batches need not ask.

        Where a copy is over, those enqueued before are. They need not be of the buffers filled before: a batch for
        which memory was short is sent by the consumer, after others that were staged after it.
        """
        with self._capture_lock:  # under which copies are enqueued
            for buffer in (self._buffers[len(self._buffers) // 2], oldest):
                if buffer.busy and buffer.turn > self._over and buffer.copied.query():
                    self._over = buffer.turn
                if oldest.turn <= self._over:
                    break

    def _open(self, buffer: StagingBuffer, layout: BatchLayout, chunk: Chunk) -> StagingPlan:
        """Use the buffer for a chunk, as before or for the first time."""
        if buffer.layout is not layout:
            buffer.plans, buffer.plan = {}, None
            buffer.layout = layout
        if (found := buffer.plans.get(id(chunk))) is None:
            with out_of_inference_mode():
                found = self._prepare(buffer, layout, chunk)
            buffer.plans[id(chunk)] = found
        buffer.plan = found
        return found

    def _prepare(self, buffer: StagingBuffer, layout: BatchLayout, chunk: Chunk) -> StagingPlan:
        """Make views of the buffer's memory for a chunk, and replace the memory if it is too small."""
        num_bytes = chunk.num_bytes
        if buffer.memory is None or buffer.memory.numel() < num_bytes:
            buffer.plans, buffer.plan = {}, None
            if buffer.memory is not None:
                self._context.release_pinned(buffer.memory)  # its copy is over
                buffer.memory = None
            if num_bytes:
                # The first buffers are pinned at once, and so are all that may follow.
                num_buffers = self._num_buffers if len(self._buffers) <= self._num_buffers else MAX_BUFFERS
                reserve_bytes = min(num_buffers * num_bytes, max(SLACK_BYTES, self._num_buffers * num_bytes))
                buffer.memory = self._context.pinned(num_bytes, reserve_bytes=reserve_bytes)
        self.num_bytes = sum(each.memory.numel() for each in self._buffers if each.memory is not None)
        memory, plan = buffer.memory, StagingPlan(chunk)
        if memory is not None:
            plan.copies = [
                (segment, first, memory[start : start + length]) for segment, first, start, length in chunk.copies
            ]
            address = memory.data_ptr()
            plan.addresses = array("Q", [address + start for _, _, start, _ in chunk.sources])
            plan.lengths = lengths = array("Q", [length for _, _, _, length in chunk.sources])
            if self._filler is not None:
                past_caches = layout.num_bytes <= PAST_CACHES_BYTES
                plan.fill = self._filler.prepare(plan.addresses, lengths, None, past_caches=past_caches)
        return plan

    def end_pass(self) -> None:
        """What was left to a consumer is not sent any more."""
        for buffer in self._buffers:
            buffer.left = False

    def close(self) -> None:
        """Give memory and events back, without waiting for copies that are under way."""
        for buffer in self._buffers:
            buffer.finish()  # an interrupt may have come before anybody knew of the buffer that helpers still fill
            if buffer.memory is None:
                self._context.events.release(buffer.copied)
            elif buffer.busy:
                self._context.release_pinned(buffer.memory, after=buffer.copied)
            else:
                self._context.release_pinned(buffer.memory)
                self._context.events.release(buffer.copied)
        self._buffers.clear()


def _see_piece(memory: Tensor, layout: BatchLayout, number: int) -> Tensor:
    """Return where a source lies in memory for a whole batch, seen as what it is."""
    i, num_bytes = layout.sources[number]
    segment, first = layout.position[i]
    first += layout.segments[segment].start
    if i in layout.shared:
        return memory[first : first + num_bytes]
    return narrow_repeats(view_leaf(memory, first, layout.specs[i]))


def _see_whole(layout: BatchLayout, leaves: Sequence[Tensor], number: int) -> Tensor:
    """A source as ``_see_piece`` sees its place."""
    i, num_bytes = layout.sources[number]
    return see_source(leaves[i], num_bytes) if i in layout.shared else narrow_repeats(leaves[i])


def are_bytes(layout: BatchLayout, leaves: Sequence[Tensor]) -> bool:
    """Whether all of a layout's sources can be copied as the bytes that they are, and there is code that does."""
    if filler() is None:
        return False
    for i, _ in layout.sources:
        leaf = leaves[i]
        is_alike = leaf.is_contiguous() or leaf.stride() == layout.specs[i].stride
        if not (i in layout.shared or (is_alike and not (leaf.is_conj() or leaf.is_neg()))):
            return False
    return True


def out_of_inference_mode() -> AbstractContextManager[Any]:
    """The source may be a generator that has left that mode on."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
