"""The way of a batch to a GPU: staged in pinned memory, copied beside the computation, landed in fresh memory.

A batch is handed out in memory of its own, taken from PyTorch's allocator for the consumer's stream, and never in a
slot that a later batch overwrites. So it may be kept for any time (``list(feed)``, a replay buffer, an autograd graph),
and there is no rule that a user could break. Slots on the device would save an allocation from the cache per batch,
about a microsecond, and would turn every kept tensor into silently wrong numbers.

What makes that safe without ``record_stream`` (stream S is the consumer's, C the copy stream):

1. *Allocation.* Memory that the host has just freed may still be in use by kernels queued on S. The consumer thread
   allocates, records an event ("ready") on S right after, and C waits for it before it writes.
2. *Hand-over.* C records an event ("copied") after the copy, and S waits for it before the batch is handed out. So
   whatever S does with the batch, or with its memory after the user has dropped it, comes after the copy.
3. *Slots.* A pinned slot is written again only after the "copied" event of its last batch was reached on the device.

*When* the consumer allocates decides what can overlap. Were the memory of batch k+2 allocated once that batch exists,
the event on S would stand behind all steps the host has queued by then, and the copy would wait for computation that it
should run beside. So each ``next()`` prepares *landings*: memory for batches yet to come, made to the layout of the
latest ones, with "ready" events in front of the step that is about to be queued. The worker fills them as soon as it
has the bytes. A batch of another layout gets its landing when the consumer next calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from millstream.device import DeviceContext, Event, Stream
from millstream.errors import FeedError
from millstream.feed.lane import misplaced
from millstream.feed.layout import Layout, describe_leaf, plan_layout, view_leaves
from millstream.feed.structure import Rebuild, split

FIRST_PAUSE_S = 50e-6
"""How long the worker first sleeps when a slot's copy is not over: about the shortest sleep an operating system
grants."""

LONGEST_PAUSE_S = 500e-6
"""How long at most: refilling a slot this late costs nothing while other batches wait, and 2,000 questions a second to
the runtime take well under 1 % of the interpreter's time."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Pinned memory that one batch after another passes through."""

    copied: Event
    busy: bool = False  # its bytes are still to be read by a copy that has been enqueued
    memory: Tensor | None = None
    layout: Layout | None = None
    views: list[Tensor] = field(default_factory=list)  # the leaves of ``layout`` in ``memory``


@dataclass(slots=True, eq=False)
class _Landing:
    """Memory for one batch on the device, and the event on ``stream`` behind which it may be written."""

    layout: Layout
    parcels: list[Tensor]
    stream: Stream
    ready: Event


@dataclass(slots=True, eq=False)
class _Load:
    """A batch on its way."""

    rebuild: Rebuild
    layout: Layout
    staged: list[int]  # which leaves lie in the slot
    others: dict[int, Tensor]  # the leaves that do not
    slot: _Slot
    made: tuple[Event, Stream] | None  # where the source's own device work for this batch ends
    landing: _Landing | None = None


class CopyLane:
    """The way to a GPU.

    Args:
        context: Of the device.
        depth: How many batches may be under way.
    """

    def __init__(self, context: DeviceContext, depth: int) -> None:
        self._context = context
        self._device = context.torch_device
        self._depth = depth
        # One slot more than batches that can wait: the worker fills it while ``depth`` batches lie on the conveyor.
        self._slots = [_Slot(context.acquire_event()) for _ in range(depth + 1)]
        self._turn = 0
        self._layout = plan_layout(())  # of the batch staged last; the worker's
        self._landings: deque[_Landing] = deque()  # prepared by the consumer, taken by the worker, under the lock
        self._landings_lock = threading.Lock()
        self._num_open = 0  # landings made and not yet handed out; the consumer's
        self._handed_layout: Layout | None = None  # the consumer's

    def in_thread(self) -> AbstractContextManager[None]:
        """Set the device, and keep the worker from killing captures of other threads."""
        return self._context.in_thread()

    # --- the worker's side -------------------------------------------------------------------------------------------

    def stage(self, batch: Any, stopped: threading.Event) -> _Load | None:
        """Copy the batch's host tensors into the next slot, so that the source may reuse them.

        Always, even when they are pinned already: a source that yields the same memory again would otherwise overwrite
        a batch whose copy is still in flight, and a pageable one would make the copy block.

        Raises:
            FeedError: A tensor lives on a third device.
        """
        leaves, rebuild = split(batch)
        staged: list[int] = []
        others: dict[int, Tensor] = {}
        for i, leaf in enumerate(leaves):
            if _can_be_staged(leaf):
                staged.append(i)
            elif leaf.device.type == "cpu" or leaf.device == self._device:
                others[i] = leaf
            else:
                raise misplaced(batch, i, leaf, self._context.place)
        layout = self._find_layout([leaves[i] for i in staged])
        slot = self._slots[self._turn % len(self._slots)]
        # The slot's last batch was handed out before there was room for this one on the conveyor, so its copy has been
        # enqueued. It need not be over: writing now would change bytes that the device is about to read (WAR).
        if not self._wait_until_copied(slot, stopped):
            return None
        self._turn += 1
        for view, i in zip(self._open_slot(slot, layout), staged, strict=True):
            view.copy_(leaves[i])
        made = self._mark_own_work(others)
        return _Load(rebuild, layout, staged, others, slot, made)

    def send(self, load: _Load) -> None:
        """Start the copy if the consumer has prepared a landing of this layout; otherwise the consumer will do both."""
        landing = self._take_landing(load.layout)
        if landing is not None:
            self._start_copy(load, landing)

    def _find_layout(self, leaves: Sequence[Tensor]) -> Layout:
        specs = tuple(map(describe_leaf, leaves))
        if specs != self._layout.specs:
            self._layout = plan_layout(specs)
        return self._layout

    def _wait_until_copied(self, slot: _Slot, stopped: threading.Event) -> bool:
        # Asked in pauses rather than by ``synchronize``: the question is put under the capture lock, which must not be
        # held for long, and a feed that is closed need not wait for the device.
        pause_s = FIRST_PAUSE_S
        while slot.busy:
            with self._context.capture_lock:
                slot.busy = not slot.copied.query()
            if slot.busy:
                if stopped.wait(pause_s):
                    return False
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return not stopped.is_set()

    def _open_slot(self, slot: _Slot, layout: Layout) -> list[Tensor]:
        """The leaves of ``layout`` in the slot's memory, which is replaced if it is too small."""
        if slot.layout is layout:
            return slot.views
        slot.views, slot.layout = [], None
        if slot.memory is None or slot.memory.numel() < layout.num_bytes:
            if slot.memory is not None:
                self._context.release_pinned(slot.memory)  # its copy is over
                slot.memory = None
            reserve_bytes = len(self._slots) * layout.num_bytes
            slot.memory = self._context.pinned(layout.num_bytes, reserve_bytes=reserve_bytes)
        memory = slot.memory
        slot.views = view_leaves(layout, [memory[p.start : p.start + p.num_bytes] for p in layout.parcels])
        slot.layout = layout
        return slot.views

    def _mark_own_work(self, others: dict[int, Tensor]) -> tuple[Event, Stream] | None:
        # Tensors that the source made on the device itself: it enqueued the work on this thread's current stream.
        if all(leaf.device.type == "cpu" for leaf in others.values()):
            return None
        event, stream = self._context.acquire_event(), self._context.current_stream()
        event.record(stream)
        return event, stream

    # --- either side -------------------------------------------------------------------------------------------------

    def _take_landing(self, layout: Layout) -> _Landing | None:
        with self._landings_lock:
            if self._landings and self._landings[0].layout is layout:
                return self._landings.popleft()
            return None

    def _start_copy(self, load: _Load, landing: _Landing) -> None:
        slot, copy_stream = load.slot, self._context.copy_stream
        with self._context.capture_lock:  # from pageable memory, when pinning was refused, a copy synchronises
            # Kernels queued on the consumer's stream may still use the landing's memory for what it was before (WAR,
            # WAW).
            copy_stream.wait_event(landing.ready)
            for parcel, memory in zip(load.layout.parcels, landing.parcels, strict=True):
                if parcel.num_bytes:
                    assert slot.memory is not None
                    source = slot.memory[parcel.start : parcel.start + parcel.num_bytes]
                    self._context.copy(memory, source, copy_stream)
            slot.copied.record(copy_stream)
        slot.busy = True
        load.landing = landing
        self._context.release_event(landing.ready)  # the wait above holds the record; the event may serve again

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def deliver(self, waiting: Sequence[_Load]) -> Any:
        """Hand the first batch out on the current stream. The host does not wait for the device.

        Raises:
            FeedError: The current stream is being captured.
        """
        context, load = self._context, waiting[0]
        if context.is_capturing():
            raise FeedError(
                f"A batch was asked for while the current stream of {context.place} is being captured into a CUDA "
                "graph, which would hold this one batch for ever. Take the batch before the capture, and copy it into "
                "the graph's input."
            )
        stream = context.current_stream()
        # Fresh tensors made under ``inference_mode`` could never be used for training, nor filled by the worker.
        with context.capture_lock, torch.inference_mode(False):
            self._drop_landings(waiting[-1].layout, stream)
            for each in waiting:
                if each.landing is None:
                    landing = self._take_landing(each.layout) or self._make_landing(each.layout, stream)
                    self._start_copy(each, landing)
            self._prepare_landings(waiting, stream)
            tensors = self._take_over(load, stream)
        for i, leaf in load.others.items():
            if i not in tensors:
                tensors[i] = leaf.to(self._device)  # itself, when it is there
        batch = load.rebuild([tensors[i] for i in range(len(tensors))])
        # Nothing fails from here on, so this part happens once even if an attempt above has to be repeated.
        if load.made is not None:
            context.release_event(load.made[0])
            load.made = None
        self._num_open -= 1
        self._handed_layout = load.layout
        return batch

    def _make_landing(self, layout: Layout, stream: Stream) -> _Landing:
        parcels = [self._context.allocate(parcel.num_bytes) for parcel in layout.parcels]
        ready = self._context.acquire_event()
        ready.record(stream)  # after the allocation: behind every kernel that may still use this memory
        self._num_open += 1
        return _Landing(layout, parcels, stream, ready)

    def _prepare_landings(self, waiting: Sequence[_Load], stream: Stream) -> None:
        """Top the landings up to ``depth`` batches on the way, beside the one that is handed out now.

        Only when the latest two batches look alike: for a source whose batches all differ, a guess would be wrong
        nearly every time and would double the memory.
        """
        layout = waiting[-1].layout
        previous = waiting[-2].layout if len(waiting) > 1 else self._handed_layout
        if layout is not previous:
            return
        while self._num_open - 1 < self._depth:
            try:
                landing = self._make_landing(layout, stream)
            except torch.OutOfMemoryError:
                return  # only an advance: the batch gets its memory when it is handed out, or the error belongs there
            with self._landings_lock:
                self._landings.append(landing)

    def _drop_landings(self, layout: Layout, stream: Stream) -> None:
        """Drop prepared landings that batches to come cannot use: of another layout, or made for another stream."""
        with self._landings_lock:
            if all(landing.layout is layout and landing.stream == stream for landing in self._landings):
                return
            dropped = list(self._landings)
            self._landings.clear()
        self._num_open -= len(dropped)
        for landing in dropped:  # never written, so the memory may go back to its stream without further ado
            self._context.release_event(landing.ready)

    def _take_over(self, load: _Load, stream: Stream) -> dict[int, Tensor]:
        """Make the tensors that are on the device the property of ``stream``.

        The consumer may have changed streams since their memory was taken. Handed out as they are, they would go back
        to the old stream's memory when the user drops them, and be overwritten there under the kernels of the new one.
        So they are copied, on the device, into memory of the new stream. This is rare, and right.
        """
        landing = load.landing
        assert landing is not None
        stream.wait_event(load.slot.copied)  # RAW: the consumer's kernels must see the copied bytes
        parcels = landing.parcels
        if landing.stream != stream:
            parcels = [self._context.allocate(parcel.numel()) for parcel in landing.parcels]
            for new, old in zip(parcels, landing.parcels, strict=True):
                self._context.copy(new, old, stream)
            self._hold_back(landing.stream, stream)
        tensors = dict(zip(load.staged, view_leaves(load.layout, parcels), strict=True))
        if load.made is not None:
            made, source_stream = load.made
            stream.wait_event(made)  # RAW: what the source computed on the device
            if source_stream != stream:
                resident = {i: leaf for i, leaf in load.others.items() if leaf.device == self._device}
                tensors.update({i: leaf.clone() for i, leaf in resident.items()})
                self._hold_back(source_stream, stream)
        return tensors

    def _hold_back(self, old: Stream, new: Stream) -> None:
        """Let ``old`` reuse memory that the host is about to free only when ``new`` has read it (WAR)."""
        event = self._context.acquire_event()
        event.record(new)
        old.wait_event(event)
        self._context.release_event(event)

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, left: Sequence[_Load]) -> None:
        """Give slots, events and undelivered batches back, without waiting for copies that are under way."""
        for load in left:
            # A device in an error state refuses even this. That error was raised where it happened.
            with suppress(RuntimeError):
                if load.landing is not None:
                    # The memory is freed here, so its stream may use it again at once: not before the copy into it is
                    # over.
                    load.landing.stream.wait_event(load.slot.copied)
            if load.made is not None:
                self._context.release_event(load.made[0])
        for landing in self._landings:
            self._context.release_event(landing.ready)
        self._landings.clear()
        for slot in self._slots:
            slot.views = []
            if slot.memory is None:
                self._context.release_event(slot.copied)
            elif slot.busy:
                self._context.release_pinned(slot.memory, after=slot.copied)
            else:
                self._context.release_pinned(slot.memory)
                self._context.release_event(slot.copied)
        self._slots.clear()


def _can_be_staged(leaf: Tensor) -> bool:
    """Whether the tensor is plain bytes on the host.

    Others (subclasses, sparse, quantized or gradient-tracking tensors) are moved by their own ``to`` when they are
    handed out: right, if not hidden.
    """
    return (
        type(leaf) is Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not leaf.requires_grad
        and not leaf.is_quantized
    )
