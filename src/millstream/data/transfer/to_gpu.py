"""The way of a batch to a GPU: staged in pinned memory, copied beside the computation, lent to the consumer.

What makes that safe without ``record_stream`` and without the host waiting (S is the consumer's stream, C the copy
stream):

1. *Refill of a staging buffer* (WAR): only when the copy out of it is over, which the worker asks the device about.
2. *Refill of a device buffer* (WAR): C waits for the event recorded on S when the user dropped the last batch in it.
3. *Hand-over* (RAW): S waits for the event recorded on C after the copy, before the batch is handed out.

``buffers`` says who owns a buffer's memory when; ``outputs`` runs a transform on C, after the copy.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from millstream import _native
from millstream._torch.tensors import place_of_implementation
from millstream.data.transfer import extras
from millstream.data.transfer.batch_layout import cut, describe_leaves, plan_layout
from millstream.data.transfer.buffers import BatchBuffer, BufferPool
from millstream.data.transfer.extras import DeviceBatch
from millstream.data.transfer.staging import (
    CHUNK_BYTES,
    StagingBuffer,
    StagingPool,
    are_bytes,
    out_of_inference_mode,
)
from millstream.data.transfer.transfer import NotNowError, Transfer, Transform, misplaced
from millstream.device import DeviceContext, Event, Stream, StreamMarker
from millstream.device.drivers.driver import Copies
from millstream.device.tensor_specs import TensorSpecs
from millstream.tree.batches import as_tensors, flatten_batch

MOST_KEPT_BYTES = 256 << 20
"""Of buffers on both sides, from pass to pass: making them takes a millisecond, and a copy of larger batches longer."""


class DeviceTransfer(Transfer):
    """The way to a GPU.

    Args:
        context: Of the device.
        depth: How many batches may be under way.
        transform: Applied to each batch on the copy stream, in the worker.
    """

    def __init__(self, context: DeviceContext, depth: int, transform: Transform | None = None) -> None:
        _compile()
        self.context = context
        self.device = context.torch_device
        self.stream = context.current_stream()  # the consumer's, when it asked last
        self.copy_stream = context.streams.to_device
        self._depth = depth
        self.num_buffers = max(depth, 2)
        self._transform = transform
        # Asked for every batch, and of a closed context too.
        self._is_capturing, self._current_stream = context.driver.is_capturing, context.driver.current_stream
        self._capture_lock = context.capture_lock
        self.spare_captures = context.driver.spare_captures()  # one for all batches: one thread at a time makes any
        # Of a batch that nothing else is done to on the copy stream, one event tells both that the staging buffer was
        # read and that the device's was written.
        self._shares_event = transform is None
        self._stopped = threading.Event()
        self._layout = plan_layout(())  # of the batch prepared last; the worker's
        self._chunks = self._whole = cut(self._layout, CHUNK_BYTES)  # the same in chunks, and in one
        self._specs: TensorSpecs | None = None  # to that batch, if all of its leaves are copied as they are
        self._staged: Sequence[int] = ()  # of its leaves
        self._open()

    def _open(self) -> None:
        # One more than can be under way: the copy of the batch that was handed out last may still be going on.
        self._pinned = StagingPool(self.context, self._depth + 1)
        self.pool = BufferPool(self.context, int(self.num_buffers), self.stream)

    @property
    def num_kept(self) -> int:  # type: ignore[override]
        """Segments that the user has kept."""
        return self.pool.num_kept

    @property
    def is_usable(self) -> bool:
        """Whether its context is open, in this process; else nothing of it may be called."""
        return not (self.pool.closed or self.context.closed)

    def in_thread(self) -> AbstractContextManager[Any]:
        """Set the device, and keep the thread from killing captures of others."""
        return self.context.driver.in_thread()

    def begin_pass(self, stopped: threading.Event, on_free: Callable[[], object]) -> None:
        """Begin another pass, on the current stream."""
        self._stopped, self.pool.on_free = stopped, on_free
        self.pool.num_kept = 0
        self.stream = self.pool.stream = self.context.current_stream()

    def end_pass(self) -> None:
        """Keep buffers, and what was prepared for them, if they are not large."""
        if self.pool.num_bytes + self._pinned.num_bytes > MOST_KEPT_BYTES:
            self._release()
            self._open()
        self._pinned.end_pass()
        self.pool.idle()

    # --- the worker's side -------------------------------------------------------------------------------------------

    def prepare(self, batch: Any) -> DeviceBatch:
        """Find the batch's leaves and give those on the host their places.

        Raises:
            FeedError: A tensor lives on a third device, or something is of a type that is not known.
        """
        kind = type(batch)
        # Of a list, all is looked at by compiled code: what else than tensors may be in it, looks like none of them.
        leaves, unflatten = ([*batch], kind) if kind is list or kind is tuple else flatten_batch(batch)
        pending = DeviceBatch()
        pending.unflatten, pending.leaves = unflatten, leaves
        if self._specs is not None:
            pending.addresses = self._specs.find(leaves)
            if pending.addresses is None and unflatten is kind:  # there may be other containers in it
                pending.leaves, pending.unflatten = flatten_batch(batch)
                pending.addresses = self._specs.find(pending.leaves)
        if pending.addresses is None:
            return self._describe(batch)
        pending.layout, pending.chunks, pending.others = self._layout, self._chunks, {}  # nearly always
        pending.staged, pending.num_bytes = self._staged, self._layout.num_bytes
        return pending

    def _describe(self, batch: Any) -> DeviceBatch:
        """Prepare a batch that looks like none before, or has more than what can be copied as it is."""
        staged: list[int] = []
        others: dict[int, Any] = {}
        leaves, unflatten = flatten_batch(batch)
        leaves = as_tensors(batch, leaves)
        for i, leaf in enumerate(leaves):
            if extras.can_be_staged(leaf):
                staged.append(i)
            elif not isinstance(leaf, Tensor) or leaf.device.type == "cpu" or leaf.device == self.device:
                others[i] = leaf
            else:
                raise misplaced(batch, i, leaf, self.context.place)
        host = [leaves[i] for i in staged]
        specs = describe_leaves(host)
        if specs != self._layout.specs:
            self._layout = plan_layout(specs)
            self._chunks, self._whole = cut(self._layout, CHUNK_BYTES), cut(self._layout, sys.maxsize)
        layout, as_bytes = self._layout, are_bytes(self._layout, host)
        self._specs, self._staged = None, staged
        if host and as_bytes and not (others or layout.shared):
            with suppress(ValueError):  # the compiled code does not know such tensors
                self._specs = TensorSpecs(host, place_of_implementation())
        pending = DeviceBatch()
        pending.unflatten, pending.leaves = unflatten, host
        pending.layout, pending.num_bytes, pending.staged, pending.others = layout, layout.num_bytes, staged, others
        if as_bytes:
            pending.addresses = array("Q", [host[i].data_ptr() for i, _ in layout.sources])
        pending.chunks = self._chunks if as_bytes else self._whole
        pending.made = extras.keep_resident(self.context, others)
        return pending

    def stage(self, pending: DeviceBatch, *, finish: bool = False, wait: bool = True) -> bool:
        """Begin to copy the first chunk of the batch's host tensors into the next staging buffer.

        Always, even when they are pinned already: a source that yields the same memory again would otherwise overwrite
        a batch whose copy is still in flight, and a pageable one would make the copy block.

        False when stopped, and also where no buffer is free if none is to be waited for.
        """
        chunks = pending.chunks
        pinned = self._pinned.begin_fill(
            pending.layout, chunks[0], pending.leaves, self._stopped, pending.addresses, wait=wait
        )
        if pinned is None:
            return False
        pending.pinned, pending.chunks = pinned, chunks[1:]
        if finish and pinned.filling is not None:  # what is short is over when it has begun
            self.finish(pending)
        return True

    def send(self, pending: DeviceBatch, *, measured: bool) -> bool | None:
        """Move the batch into a buffer of the device. When memory is short, that is left to the consumer."""
        if torch.is_inference_mode_enabled():  # the loop may have it on, or the source may have left it on
            with torch.inference_mode(False):
                return self.send(pending, measured=measured)
        taken = self.pool.take(pending.layout if self._transform is None else None)
        if taken is None:
            self.finish(pending)
            return None
        pending.buffer, pending.whole = taken
        is_cut = bool(pending.chunks)
        try:
            if not self._start(pending, measured=measured):
                return False
        except torch.OutOfMemoryError:
            if is_cut and not self._stage_whole(pending):
                return False
            self.finish(pending)
            assert pending.pinned is not None
            pending.pinned.left = True  # later batches take other buffers, however many each of them takes
        pending.leaves = []
        return True

    def _stage_whole(self, pending: DeviceBatch) -> bool:
        """Stage all of a batch at once, also what was sent before: the consumer may take its time to start it."""
        self.finish(pending)
        pending.chunks = cut(pending.layout, sys.maxsize)
        return self.stage(pending)

    def finish(self, pending: DeviceBatch) -> None:
        """Return when as much of the batch is staged as was begun."""
        if pending.pinned is not None and pending.pinned.filling is not None:  # what is short is over when it has begun
            pending.pinned.finish()
        if not (pending.chunks or pending.staged_ns):
            pending.staged_ns = time.perf_counter_ns()

    def _start(self, pending: DeviceBatch, *, measured: bool = False) -> bool:
        """Move the batch, chunk by chunk, each staged while the one before it is copied; false when stopped."""
        context, copy_stream, buffer = self.context, self.copy_stream, pending.buffer
        assert buffer is not None
        if pending.whole is None:
            self.pool.fit(buffer, pending.layout, copy_stream)
        if self._transform is None:
            self._lend(pending, buffer)  # while helpers still stage
        begin: Sequence[Event] = ()
        end: Sequence[Event] = ()
        if measured:
            pending.copy = (
                StreamMarker(context, copy_stream, record=False),
                StreamMarker(context, copy_stream, record=False),
            )
            begin, end = ((marker.event,) for marker in pending.copy)
            if self._transform is not None:
                end = ()  # it comes after that
        while True:
            pinned, is_last = pending.pinned, not pending.chunks
            assert pinned is not None
            self.finish(pending)
            # Helpers shall not be idle while this chunk is sent.
            goes_on = not is_last and self.stage(pending, wait=False)
            self._copy(pending, buffer, pinned, begin, end if is_last else ())
            if is_last:
                break
            begin = ()
            if not goes_on and not self.stage(pending):
                return False
        if self._transform is not None:
            # In the order in which an engine takes them, of which the transform may call one.
            with context.graphs.lock, self._capture_lock:
                extras.apply(self, self._transform, pending, buffer.memories)
        pending.ready = buffer.ready
        return True

    def _copy(
        self,
        pending: DeviceBatch,
        buffer: BatchBuffer,
        pinned: StagingBuffer,
        begin: Sequence[Event],
        end: Sequence[Event],
    ) -> None:
        """Enqueue the copies of what is staged, after the consumer's work with the buffer's last batch (WAR).

        After those of a whole batch only the staging buffer's event is recorded, for the device's as well. It may be
        recorded again before the consumer waits for it: when the staging buffer is sent again, on the same stream. That
        is safe: the wait then covers a later point of the same stream, so it can only be too long.
        """
        plan = pinned.plan
        assert plan is not None
        shares_event = self._shares_event and plan.chunk.num_bytes == pending.num_bytes
        with self._capture_lock:  # a copy from pageable memory, when pinning was refused, ends captures as well
            try:
                # Before the copy: an interrupt after it would leave buffers that look as if nothing were under way.
                pinned.turn = next(self._pinned.turns)
                pinned.busy = buffer.is_written = True
                pinned.left = False
                send = buffer.sends.get(plan)  # as it was prepared, if both buffers are what they were then
                if begin or end or send is None or send() != 0:
                    self._copy_anew(buffer, pinned, begin, end, shares_event=shares_event)
                buffer.was_lent = False
                buffer.ready = pinned.copied if shares_event else buffer.copied
            except BaseException:
                buffer.ready = buffer.copied
                for event in (pinned.copied, buffer.copied):  # after whatever was enqueued
                    with suppress(RuntimeError):  # a device in an error state refuses
                        event.record(self.copy_stream)
                raise

    def _copy_anew(
        self,
        buffer: BatchBuffer,
        pinned: StagingBuffer,
        begin: Sequence[Event],
        end: Sequence[Event],
        *,
        shares_event: bool,
    ) -> None:
        """Enqueue the copy between two buffers, and prepare it for the next time, if it is not measured."""
        driver, pairs = self.context.driver, _pair(pinned, buffer.memories)
        events = (pinned.copied,) if shares_event else (pinned.copied, buffer.copied)
        send, waits = None, (buffer.released,)
        if not (begin or end):
            send = driver.prepare_copy(Copies(pairs, self.copy_stream, waits, after=events))
        if send is not None:
            buffer.sends[pinned.plan] = send
        if send is None or send() != 0:
            waits = waits if buffer.was_lent else ()
            driver.copy(Copies(pairs, self.copy_stream, waits, begin, (*end, *events)))

    def _lend(self, pending: DeviceBatch, buffer: BatchBuffer) -> None:
        leaves = pending.whole
        if leaves is None:
            leaves = self.pool.lend_leaves(buffer, pending.layout)
        pending.lease, pending.whole = buffer.lease, None if pending.others else leaves
        if pending.others:
            pending.tensors = dict(zip(pending.staged, leaves, strict=True))
        if not pending.layout.segments:
            self.pool.give_back(buffer)  # nothing of it will ever be dropped

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Leave to the user what they have kept, and take new memory in its place.

        Raises:
            FeedError: The current stream is being captured.
        """
        self._look_at_stream()
        self.pool.reclaim()

    def _look_at_stream(self) -> Stream:
        if self._is_capturing():
            raise NotNowError(
                f"A batch was asked for while the current stream of {self.context.place} is being captured into a "
                "CUDA graph, which would hold this one batch for ever. Take the batch before the capture, and copy it "
                "into the graph's input."
            )
        self.stream = self._current_stream()
        return self.stream

    def mark(self) -> StreamMarker | None:
        """Note where the consumer's stream stands."""
        return StreamMarker(self.context, self.stream)

    def deliver(self, pending: DeviceBatch) -> Any:
        """Hand the batch out on the current stream. The host does not wait for the device."""
        stream = self._look_at_stream()
        if pending.ready is None:
            with out_of_inference_mode():
                self._start(pending)  # memory was short; if it still is, the user learns it here, and may try again
            assert pending.ready is not None
        pending.ready.wait(stream)  # RAW: the consumer's kernels must see the copied bytes
        # Not before: what users have registered may compute with the leaves, or keep none of them.
        if pending.whole is not None:
            batch = pending.unflatten(pending.whole)
        else:
            batch = extras.complete(self, pending, stream)
        if pending.lease is not None:
            self.pool.hand_out(pending.lease, stream)
        return batch

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give buffers and events back, without waiting for copies that are under way."""
        if not self.pool.closed:
            self._release()

    def _release(self) -> None:
        try:
            self.pool.close()
        finally:
            self._pinned.close()


@functools.cache
def _compile() -> None:
    """Compile all that feeding takes, each beside the other: in the midst of a loop the device would wait for it."""
    _native.is_ready("tensors")  # begins it
    for name in ("core", "tensors"):
        _native.load(name)


def _pair(pinned: StagingBuffer, memories: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return where the bytes in a staging buffer go, and they."""
    pairs = []
    for segment, first, source in pinned.copies:
        memory = memories[segment]
        if memory.numel() != source.numel():  # a part of the segment
            memory = memory[first : first + source.numel()]
        pairs.append((memory, source))
    return pairs
