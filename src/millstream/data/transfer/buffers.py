"""Memory on the device that one batch after another lands in, and who may use it when.

A buffer goes round: *free* → (taken, a copy into it is enqueued) → *under way* → (handed out) → *lent* → (the user
drops the last tensor in it) → *free*. The drop records an event on the consumer's stream: the next copy into the buffer
waits for all that the user had queued by then, and for nothing that they queue later. That is the rule by which
PyTorch's allocator reuses memory, made to hold across streams.

**A batch belongs to the user as long as they keep it.** In a loop the user's variables hold batch k until batch k+1 is
there. A segment of an older batch that is still held when batch k+1 is asked for leaves the pool: it is the user's own,
as if it had been allocated for them, and the pool takes new memory in its place. So nothing that can be read is ever
overwritten, a loop that keeps nothing allocates nothing, and nobody can make a feed wait for ever.

Tensors die where garbage is collected: in any thread, at any moment. So dropping takes no lock. Each segment has a
*claim*, which one of two can pop: the finalizer that brings it back, or the consumer that leaves it to the user. Python
drops an interrupt that meets a finalizer, and with it what that was to do; then the consumer, which looks at each batch
once more when it asks for the next but one, brings the segment back. Memory of another stream than the consumer's is
kept by the pool until it was seen to be dropped, for the same reason.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from millstream.data.transfer.batch_layout import BatchLayout, view_leaves
from millstream.data.transfer.lent_batches import Lend, prepare_lending
from millstream.device import DeviceContext, Event, Stream, StreamMarker
from millstream.errors import DeviceError

MOST_LOOKED_AT = 4
"""Pieces of memory of other streams that are looked at for each batch: more than come."""


class BufferMemory(NamedTuple):
    """Memory of a buffer, and the stream that it was allocated for."""

    tensor: Tensor
    home: Stream


@dataclass(slots=True, eq=False)
class BatchBuffer:
    """Memory on the device for one batch at a time.

    Attributes:
        copied: Its own event on the copy stream.
        released: Where on the consumer's stream its last batch was dropped.
        ready: Where its present batch is complete, with all that was done to it: ``copied``, or somebody else's.
        segments: Its memory; ``None`` where the user has kept it.
        layout: What it was fitted for last; ``None`` when it must be looked at again.
        memories: Of the segments that this layout has.
        lending: What lends each of them as the leaves that lie there, if compiled code can.
        leaves: Its memory as the leaves of the batch, for a transform; empty until one asks.
        sends: What enqueues the copies from a staging buffer, by its plan.
        is_written: Whether a copy has been enqueued since the memory was taken.
        was_lent: Whether the copy stream is still to wait for ``released``.
        lease: Of its present batch.
    """

    copied: Event
    released: Event
    ready: Event = field(init=False)
    segments: list[BufferMemory | None] = field(default_factory=list)
    layout: BatchLayout | None = None
    memories: list[Tensor] = field(default_factory=list)
    lending: Sequence[Lend] = ()
    leaves: Sequence[Tensor] = ()
    sends: dict[Any, Callable[[], int]] = field(default_factory=dict)
    is_written: bool = False
    was_lent: bool = False
    lease: BatchLease | None = None

    def __post_init__(self) -> None:
        self.ready = self.copied

    def forget_layout(self) -> None:
        """It has other memory from here on."""
        self.layout, self.memories, self.lending, self.leaves = None, [], (), ()
        self.sends.clear()


class BatchLease:
    """One batch in the user's hands.

    Attributes:
        pool: Whose the buffer is.
        buffer: Where the batch lies.
        stream: The consumer's; ``None`` before it was handed out.
        claims: One per segment that is to come back, by its number; the one that pops it decides what becomes of it.
        held: What the user's tensors keep alive, by the same number.
        num_left: As many entries as segments are still to come back or to be left to the user.
        kept: Numbers of those that were left to the user.
    """

    __slots__ = ("buffer", "claims", "held", "kept", "num_left", "pool", "stream")

    def __init__(self, pool: BufferPool, buffer: BatchBuffer, numbers: Sequence[int]) -> None:
        self.pool, self.buffer = pool, buffer
        self.stream: Stream | None = None
        self.claims: dict[int | None, bool] = dict.fromkeys(numbers, True)
        self.held: dict[int, weakref.ref[SegmentLease]] = {}
        self.kept: set[int] = set()
        self.num_left = [*range(len(numbers))]  # popping is atomic: one of several threads gets the last, 0

    def lease(self, number: int) -> SegmentLease:
        """Return what keeps a segment from coming back."""
        memory = self.buffer.segments[number]
        assert memory is not None
        lease = SegmentLease(self, number, memory)
        self.held[number] = weakref.ref(lease)
        return lease

    def has_ended(self) -> bool:
        """Return whether the user has nothing more of it but what was left to them, and all finalizers have ended."""
        return all(number in self.kept or held() is None for number, held in self.held.items())

    def is_back(self) -> bool:
        """Return whether every segment has come back or was left to the user."""
        return not self.num_left


class SegmentLease:
    """Held by a lent tensor's storage and by nothing else: its end is the end of the last tensor over the memory."""

    __slots__ = ("__weakref__", "batch", "memory", "number")

    def __init__(self, batch: BatchLease, number: int | None, memory: BufferMemory) -> None:
        self.number, self.memory = number, memory
        self.batch = batch

    def __del__(self) -> None:
        batch = getattr(self, "batch", None)  # an interrupt may have met the making of this
        if batch is not None:
            batch.pool.drop(self)


class _DeferredFree(NamedTuple):
    """Memory of another stream than the consumer's that was dropped; ``marker``: where the work with it ends."""

    memory: BufferMemory
    marker: StreamMarker


class BufferPool:
    """The buffers of one device. One thread takes them, the consumer hands them out, finalizers bring them back.

    Args:
        context: Of the device.
        num_buffers: How many batches may be on the device, the one in use included; at least 2.
        stream: The consumer's.

    Attributes:
        on_free: Called when a buffer came back, in any thread.
        num_kept: Segments that users have kept.
    """

    def __init__(self, context: DeviceContext, num_buffers: int, stream: Stream) -> None:
        self._context = context
        self._is_capturing = context.driver.is_capturing
        self.stream = stream  # for which memory is allocated
        self.buffers = [BatchBuffer(context.events.acquire(), context.events.acquire()) for _ in range(num_buffers)]
        self._free = deque(self.buffers)
        self._unseen: deque[BatchBuffer] = (
            deque()
        )  # taken, and not handed out: nobody may ever drop what is made of them
        # In compiled code: an interrupt between taking and noting would lose a buffer.
        self._take = map(self._unseen.append, iter(self._free.popleft, object()))
        self._lent: deque[BatchLease] = deque()  # handed out and perhaps still held; the consumer's
        self._late: deque[Callable[[], None]] = deque()  # drops that met a capture
        self._foreign: dict[
            int, tuple[weakref.ref[SegmentLease], BufferMemory, BatchLease]
        ] = {}  # of other streams, lent
        self._deferred: deque[_DeferredFree] = deque()
        self._num_rested = 0  # of these, how many have waited for a batch
        self._is_idle = False  # whether it is between two passes
        self.on_free: Callable[[], object] = _nothing
        self.num_kept = 0
        self.closed = False

    # --- making a batch ----------------------------------------------------------------------------------------------

    def take(self, layout: BatchLayout | None = None) -> tuple[BatchBuffer, list[Tensor] | None] | None:
        """A buffer that is free; ``None`` when there is none.

        Args:
            layout: Of the batch that it is for.

        Returns:
            The buffer; and the leaves of the batch in it, as ``lend_leaves`` gives them, if it is known to fit.
        """
        try:
            next(self._take)
        except IndexError:
            return None
        buffer = self._unseen[-1]
        if layout is not None and buffer.layout is layout and buffer.lending and not self._is_to_end:  # nearly always
            return buffer, self.lend_leaves(buffer, layout)
        buffer.lease = None
        return buffer, None

    @property
    def _is_to_end(self) -> bool:
        """Whether ``fit`` has more to do than to look at a layout."""
        return bool(self._deferred) or self._is_idle

    def give_back(self, buffer: BatchBuffer) -> None:
        """Make a buffer free that the user has never seen: what was done with it was done on the copy stream."""
        with suppress(ValueError):  # there was nothing to lend, and so it is free
            self._unseen.remove(buffer)
            buffer.lease = None
            self._free.append(buffer)
            self.on_free()

    def fit(self, buffer: BatchBuffer, layout: BatchLayout, copy_stream: Stream) -> list[Tensor]:
        """Give the buffer memory for a layout. A writer waits for ``released`` first, if it ``was_lent``.

        Raises:
            torch.OutOfMemoryError: There is none; what was there before still is.
        """
        if self._is_to_end:
            self._is_idle = False
            self._end_deferred(self._num_rested)
            self._num_rested = len(self._deferred)
        if buffer.layout is not layout:
            self._allocate_for(buffer, layout, copy_stream)
        elif not buffer.lending:  # not for the first of a form: there may be no second, and it costs more than it saves
            buffer.lending = prepare_lending(layout, buffer.memories)
        return buffer.memories

    def _allocate_for(self, buffer: BatchBuffer, layout: BatchLayout, copy_stream: Stream) -> None:
        buffer.forget_layout()
        if buffer.was_lent:
            copy_stream.wait_event(buffer.released)  # WAR: kernels that read the last batch; its memory may go home now
        segments = buffer.segments
        segments += [None] * (len(layout.segments) - len(segments))
        for i, segment in enumerate(layout.segments):
            present = segments[i]
            if present is None or present.tensor.numel() < segment.num_bytes:
                segments[i] = self._allocate(segment.num_bytes, copy_stream)
                if present is not None:
                    self._context.events.order(copy_stream, present.home)  # what was done with it, was before
        buffer.memories = [each.tensor for each in segments[: len(layout.segments)] if each is not None]
        buffer.layout = layout

    def _allocate(self, num_bytes: int, copy_stream: Stream) -> BufferMemory:
        home = self.stream
        with self._context.capture_lock, self._context.on(home):  # allocating ends captures of other threads
            memory = self._context.driver.allocate(num_bytes)
        # The memory may have been freed a moment ago by the host, while kernels on its stream still use it (WAR, WAW).
        self._context.events.order(home, copy_stream)
        return BufferMemory(memory, home)

    def lend(self, buffer: BatchBuffer, numbers: Sequence[int]) -> BatchLease:
        """Lend some segments of a buffer. They bring it back when all of them are gone."""
        buffer.lease = lease = BatchLease(self, buffer, numbers)
        return lease

    def lend_bytes(self, lease: BatchLease, number: int) -> Tensor:
        """A segment as its bytes."""
        held = lease.lease(number)
        return self._context.driver.lend(held.memory.tensor, held)

    def lend_leaves(self, buffer: BatchBuffer, layout: BatchLayout) -> list[Tensor]:
        """The leaves of a batch in a buffer that fits its layout; they bring it back when all of them are gone."""
        lease = self.lend(buffer, range(len(buffer.memories)))
        if not buffer.lending:
            return view_leaves(layout, [self.lend_bytes(lease, number) for number in range(len(buffer.memories))])
        leaves: list[Any] = [None] * len(layout.specs)
        for number, lend in enumerate(buffer.lending):
            lend(lease.lease(number), leaves)  # which keeps the memory as well
        return leaves

    def lend_other(self, lease: BatchLease, memory: Tensor, home: Stream) -> Tensor:
        """A tensor that lies in no buffer, but shall go back to its stream in order all the same."""
        held = SegmentLease(lease, None, BufferMemory(memory, home))
        self._foreign[id(held)] = weakref.ref(held), held.memory, lease
        return self._context.driver.lend(memory, held)

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def reclaim(self) -> None:
        """A batch is asked for: what the user still holds of older ones than the last is theirs from here on."""
        for _ in range(len(self._late)):
            self._late.popleft()()
        lent = self._lent
        while len(lent) > 1:
            oldest = lent[0]
            if oldest.num_left or oldest.buffer.lease is oldest:  # nearly always it came back
                self._detach(oldest)
            lent.popleft()
        if self._foreign:
            self._sweep(MOST_LOOKED_AT)

    def hand_out(self, lease: BatchLease, stream: Stream) -> None:
        """Note that a batch now belongs to the consumer, which works with it on ``stream``; ``reclaim`` older ones."""
        self.reclaim()
        lease.stream = self.stream = stream
        if lease.buffer.lease is lease:
            try:  # noqa: SIM105 - for every batch: what suppresses costs more than what it is about
                self._unseen.remove(lease.buffer)
            except ValueError:  # after an interrupt this batch is handed out once more
                pass
        self._lent.append(lease)

    def _detach(self, batch: BatchLease) -> None:
        """Leave to the user what they still hold, and bring back the rest."""
        for number, held in [*batch.held.items()]:
            if not batch.claims.pop(number, False):
                continue  # it came back
            if (lease := held()) is not None:
                if lease.memory.home != batch.stream:
                    self._foreign[id(lease)] = held, lease.memory, batch
                batch.buffer.forget_layout()  # first: an interrupt may come between
                batch.buffer.segments[number] = None
                batch.kept.add(number)
                self.num_kept += 1
            if batch.num_left.pop() == 0:
                self._release(batch)
        if batch.buffer.lease is batch and batch.has_ended():
            self._release(batch)  # an interrupt has kept a finalizer from doing so

    def _sweep(self, most: int) -> None:
        """Let go of what was dropped while an interrupt met its finalizer; so much is looked at, by turns."""
        for key in [*self._foreign][:most]:
            if (found := self._foreign.pop(key, None)) is None:
                continue  # its finalizer was quicker
            held, memory, batch = found
            if held() is not None:
                self._foreign[key] = found
            elif batch.stream is not None:
                self._defer(memory, batch.stream)

    # --- finalizers --------------------------------------------------------------------------------------------------

    def drop(self, lease: SegmentLease) -> None:
        """A segment was dropped. Runs in any thread, at any moment; takes no lock and never waits."""
        batch = lease.batch
        if batch.claims.pop(lease.number, False):
            if batch.num_left.pop() == 0 and not self.closed:  # else ``close`` has seen to its memory
                self._release(batch)
        elif self._foreign and self._foreign.pop(id(lease), None) is not None and batch.stream is not None:
            self._defer(lease.memory, batch.stream)

    def _release(self, batch: BatchLease) -> None:
        """All of a batch has come back: record where the user's work with it ends."""
        stream, buffer = batch.stream, batch.buffer
        if stream is None:
            self.give_back(buffer)
            return
        try:
            if self._is_capturing():  # the event would become a part of somebody's graph
                self._late.append(lambda: self._release(batch))
                return
            buffer.released.record(stream)
        except (DeviceError, RuntimeError):
            return  # the context is closed; or its device is in an error state, which was raised where it arose
        buffer.was_lent = True
        buffer.lease = None
        self._free.append(buffer)
        self.on_free()

    def _defer(self, memory: BufferMemory, stream: Stream) -> None:
        """Let memory of another stream go home after the user's work with it, and when one more batch was made.

        Were its stream to wait at once, and this is the copy stream for all that a transform has made, the next copy
        would wait for the step that has just been enqueued.
        """
        if memory.home == stream:
            return
        with suppress(DeviceError, RuntimeError):  # as above
            if self._is_capturing():
                self._late.append(lambda: self._defer(memory, stream))
                return
            self._deferred.append(_DeferredFree(memory, StreamMarker(self._context, stream, timing=False)))
            if self.closed or self._is_idle:
                self._end_deferred(len(self._deferred))

    def _end_deferred(self, count: int) -> None:
        for _ in range(count):
            try:
                deferred = self._deferred[0]
            except IndexError:  # another thread was here
                return
            with suppress(RuntimeError):
                deferred.memory.home.wait_event(deferred.marker.event)  # the allocator gives it out again at once (WAR)
            with suppress(ValueError, IndexError):
                self._deferred.popleft() if self._deferred[0] is deferred else None

    # --- the end -----------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Memory of its buffers."""
        return sum(each.tensor.numel() for buffer in self.buffers for each in buffer.segments if each is not None)

    def idle(self) -> None:
        """There will be no batch for a while, and of those that were made none is handed out any more."""
        self._is_idle = True
        for buffer in [*self._unseen]:
            if buffer.lease is not None:
                buffer.lease.claims.clear()  # the frames of an error may still hold what was made of it
            self.give_back(buffer)
        self._end_deferred(len(self._deferred))

    def close(self) -> None:
        """Forget the buffers, without waiting for the device. Nobody takes or hands out any more."""
        for _ in range(len(self._late)):
            self._late.popleft()()
        for batch in [*self._lent]:  # which another thread may be dropping
            self._detach(batch)
        self._lent.clear()
        self._sweep(len(self._foreign))
        self.closed = True
        self._end_deferred(len(self._deferred))
        with suppress(RuntimeError):
            for buffer in self.buffers:
                for memory in filter(None, buffer.segments):
                    # The memory is freed here, so its stream may use it again at once: not before the copy into it is
                    # over, nor before a consumer on another stream is done.
                    if buffer.is_written:
                        memory.home.wait_event(buffer.ready)
                    if buffer.was_lent:
                        memory.home.wait_event(buffer.released)
        for buffer in self.buffers:
            buffer.segments.clear()
            buffer.forget_layout()
            self._context.events.release(buffer.copied)
            if buffer.lease is None:
                self._context.events.release(buffer.released)
            else:  # a thread that drops the batch just now may be about to record it
                self._context.events.forget(buffer.released)
            buffer.lease = None
        self.buffers.clear()
        self._free.clear()


def _nothing() -> None:
    pass
