"""The host's side of a feed: pinned slots, and how they are filled.

A slot is written again only when the copy out of it is over on the device. That is the one thing a feed ever asks the
device about, and it asks in the feed's own thread.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from millstream._torch.tensors import place_of_implementation
from millstream.device import DeviceContext, Event
from millstream.device.likeness import Likeness
from millstream.device.native import Filling, filler
from millstream.feed.layout import Layout, Section, narrow_repeats, see_source, view_leaf

SECTION_BYTES = 16 << 20
"""Larger batches are staged and sent in sections of about this size. So their copy begins when a part is staged, and
their bytes pass through so little pinned memory that the processor's cache can hold it. On the way of 64 MiB to an
H200, staging and copies then hardly slow each other down: a loop that waits for nothing else takes 1.03 times as long
as its copies, and not 1.6. So it does with sections of 8 MiB, in each of which Python has its part."""

PAST_CACHES_BYTES = 12 << 20
"""Batches up to this are staged past the processors' caches: a device reads lines that they have just written half as
fast as memory. Of longer ones the caches have let go when their turn comes (docs/decisions/0015)."""

MAX_SLOTS = 32
"""Enough for steps of 50 µs."""

SLACK_BYTES = 64 << 20
"""So much pinned memory may be used to run ahead."""

FIRST_PAUSE_S = 50e-6
"""How long a thread first sleeps when an event is not reached: about the shortest sleep an operating system grants."""

LONGEST_PAUSE_S = 500e-6
"""How long at most: noticing this late costs nothing while other batches wait, and 2,000 questions a second to the
runtime take well under 1 % of the interpreter's time."""


def wait_until_reached(context: DeviceContext, event: Event, stopped: threading.Event) -> bool:
    """Block until the device has reached ``event``; false when stopped before.

    Asked in pauses rather than by ``synchronize``: the question is put under the capture lock, which must not be held
    for long, and whoever closes a feed need not wait for the device.
    """
    pause_s = FIRST_PAUSE_S
    while not stopped.is_set():
        with context.capture_lock:
            if event.query():
                return True
        stopped.wait(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return False


@dataclass(slots=True, eq=False)
class Opening:
    """A pinned slot as it is used for one section of a layout: made once.

    Attributes:
        section: It.
        copies: What goes to which parcel, and from which byte on there.
        addresses: Where the section's sources go.
        lengths: Of the same, in bytes.
        fill: Begins to bring them there, if compiled code can.
        pieces: Where they go as tensors, by source, of those that asked for it.
    """

    section: Section
    copies: Sequence[tuple[int, int, Tensor]] = ()
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    fill: Callable[[array[int], object], Filling | None] | None = None
    pieces: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class PinnedSlot:
    """Pinned memory that one section of a batch after another passes through."""

    copied: Event
    busy: bool = False  # its bytes are still to be read by a copy that has been enqueued
    left: bool = False  # or by one that the consumer is to enqueue
    turn: int = -1  # the number of that copy
    memory: Tensor | None = None
    layout: Layout | None = None  # whose sections it was opened for
    openings: dict[int, Opening] = field(default_factory=dict)  # for these, by the sections' identities
    opening: Opening | None = None  # the present one
    filling: Filling | None = None

    @property
    def copies(self) -> Sequence[tuple[int, int, Tensor]]:
        """What is to be copied out of it, see ``Opening``."""
        return () if self.opening is None else self.opening.copies

    def finish(self) -> None:
        """Return when the batch lies in the slot."""
        if self.filling is not None:
            self.filling.finish()
            self.filling = None


class PinnedRing:
    """Pinned slots, used in turn. One thread fills them.

    The host runs ahead of the device by as many batches as there are slots, less one: so long it may take to notice
    that a copy is over, to stage the next batch and to hand it to a sleeping thread, before the device runs dry. Steps
    of less than a millisecond need more slots for that than batches may be under way, but their batches are small.

    Args:
        context: Of the device.
        num_slots: How many batches lie in pinned memory at least.
        threads: How many threads fill a slot at most; ``None`` for as many as help.
    """

    def __init__(self, context: DeviceContext, num_slots: int, threads: int | None) -> None:
        self._context = context
        self._threads = threads
        self._filler = filler()
        self._num_slots = num_slots
        self._slots: deque[PinnedSlot] = deque()  # the oldest first
        self.num_bytes = 0  # of all slots
        self.turns = count()  # of the copies, all of which are enqueued on one stream
        self._over = -1  # the latest of them that is known to be over, as are all before
        self._capture_lock = context.capture_lock

    def begin_fill(
        self,
        layout: Layout,
        section: Section,
        leaves: Sequence[Tensor],
        stopped: threading.Event,
        addresses: array[int] | None = None,
        *,
        wait: bool = True,
    ) -> PinnedSlot | None:
        """Begin to copy a section of a batch into the slot that was filled longest ago; ``None`` when stopped before.

        The caller has made sure that the copy out of it has been enqueued, or that it is marked as left to somebody who
        does so; of the slot filled last he may still be about to. He finishes the slot before the source may touch its
        memory again, and before ``close``.

        Args:
            layout: Of the batch.
            section: Of the layout.
            leaves: The batch.
            stopped: Set to give up waiting for the slot.
            addresses: Of the sources, if they can be copied as the bytes they are; needed unless the section is whole.
            wait: Whether to wait for a slot; else ``None`` as well where none is free.
        """
        slot = self._find(section.num_bytes)
        # The device may be about to read these bytes (WAR).
        if slot.busy and not (wait and wait_until_reached(self._context, slot.copied, stopped)):
            return None
        slot.busy = False
        opening = slot.opening
        if opening is None or opening.section is not section:
            opening = self._open(slot, layout, section)
        if addresses is not None and opening.fill is not None:
            if len(section.sources) < len(addresses) or section.num_bytes < layout.num_bytes:
                addresses = array("Q", [addresses[number] + start for number, start, _, _ in section.sources])
            slot.filling = opening.fill(addresses, (slot.memory, leaves))
        else:
            try:
                with out_of_inference_mode():
                    self._begin_copy(slot, opening, layout, leaves)
            except BaseException:
                slot.finish()
                raise
        self._slots.rotate(-1)
        return slot

    def _begin_copy(self, slot: PinnedSlot, opening: Opening, layout: Layout, leaves: Sequence[Tensor]) -> None:
        # One call, whatever the number of leaves, during which nobody needs the interpreter's lock: to get it back can
        # take milliseconds while the training loop computes in Python.
        as_bytes: list[int] = []
        others: Sequence[int] = range(len(layout.sources))
        if self._filler is not None:
            as_bytes, others = _sort_sources(layout, leaves)
        if self._filler is not None and as_bytes:
            whole = not others  # nearly always
            slot.filling = self._filler.begin(
                opening.addresses if whole else array("Q", [opening.addresses[k] for k in as_bytes]),
                array("Q", [leaves[layout.sources[k][0]].data_ptr() for k in as_bytes]),
                opening.lengths if whole else array("Q", [opening.lengths[k] for k in as_bytes]),
                self._threads,
                (slot.memory, leaves),
                past_caches=layout.num_bytes <= PAST_CACHES_BYTES,
            )
        if others:
            sources = [
                see_source(leaves[i], num_bytes) if i in layout.shared else narrow_repeats(leaves[i])
                for i, num_bytes in (layout.sources[k] for k in others)
            ]
            assert slot.memory is not None
            for k in others:
                if k not in opening.pieces:
                    opening.pieces[k] = _see_piece(slot.memory, layout, k)
            torch._foreach_copy_([opening.pieces[k] for k in others], sources)

    def _find(self, num_bytes: int) -> PinnedSlot:
        """The slot that was filled longest ago; or a new one, if that is still read and there may be more."""
        num_slots = len(self._slots)
        if num_slots >= self._num_slots:
            while self._slots[0].left:  # not all are: there are more slots than batches under way
                self._slots.rotate(-1)
            oldest = self._slots[0]
            if oldest.busy and oldest.turn > self._over:
                self._look(oldest)
            if oldest.turn <= self._over:
                oldest.busy = False
            if not oldest.busy or num_slots == MAX_SLOTS or self.num_bytes + num_bytes > SLACK_BYTES:
                return oldest
        self._slots.appendleft(PinnedSlot(self._context.acquire_event()))
        return self._slots[0]

    def _look(self, oldest: PinnedSlot) -> None:
        """Ask the device about a slot; if possible about half of them at once, so that the next batches need not ask.

        Where a copy is over, those enqueued before are. They need not be of the slots filled before: a batch for which
        memory was short is sent by the consumer, behind others that were staged after it.
        """
        with self._capture_lock:  # under which copies are enqueued
            for slot in (self._slots[len(self._slots) // 2], oldest):
                if slot.busy and slot.turn > self._over and slot.copied.query():
                    self._over = slot.turn
                if oldest.turn <= self._over:
                    break

    def _open(self, slot: PinnedSlot, layout: Layout, section: Section) -> Opening:
        """Use the slot for a section, as before or for the first time."""
        if slot.layout is not layout:
            slot.openings, slot.opening = {}, None
            slot.layout = layout
        if (found := slot.openings.get(id(section))) is None:
            with out_of_inference_mode():
                found = self._prepare(slot, layout, section)
            slot.openings[id(section)] = found
        slot.opening = found
        return found

    def _prepare(self, slot: PinnedSlot, layout: Layout, section: Section) -> Opening:
        """Make views of the slot's memory for a section, and replace the memory if it is too small."""
        num_bytes = section.num_bytes
        if slot.memory is None or slot.memory.numel() < num_bytes:
            slot.openings, slot.opening = {}, None
            if slot.memory is not None:
                self._context.release_pinned(slot.memory)  # its copy is over
                slot.memory = None
            if num_bytes:
                # The first slots are pinned at once, and so are all that may follow.
                num_slots = self._num_slots if len(self._slots) <= self._num_slots else MAX_SLOTS
                reserve_bytes = min(num_slots * num_bytes, max(SLACK_BYTES, self._num_slots * num_bytes))
                slot.memory = self._context.pinned(num_bytes, reserve_bytes=reserve_bytes)
        self.num_bytes = sum(each.memory.numel() for each in self._slots if each.memory is not None)
        memory, opening = slot.memory, Opening(section)
        if memory is not None:
            opening.copies = [
                (parcel, first, memory[start : start + length]) for parcel, first, start, length in section.copies
            ]
            address = memory.data_ptr()
            opening.addresses = array("Q", [address + start for _, _, start, _ in section.sources])
            opening.lengths = lengths = array("Q", [length for _, _, _, length in section.sources])
            if self._filler is not None:
                past_caches = layout.num_bytes <= PAST_CACHES_BYTES
                opening.fill = self._filler.prepare(opening.addresses, lengths, self._threads, past_caches=past_caches)
        return opening

    def close(self) -> None:
        """Give memory and events back, without waiting for copies that are under way."""
        for slot in self._slots:
            slot.finish()  # an interrupt may have come before anybody knew of the slot that helpers still fill
            if slot.memory is None:
                self._context.release_event(slot.copied)
            elif slot.busy:
                self._context.release_pinned(slot.memory, after=slot.copied)
            else:
                self._context.release_pinned(slot.memory)
                self._context.release_event(slot.copied)
        self._slots.clear()


def _see_piece(memory: Tensor, layout: Layout, number: int) -> Tensor:
    """Where a source lies in memory for a whole batch, seen as what it is."""
    i, num_bytes = layout.sources[number]
    parcel, first = layout.position[i]
    first += layout.parcels[parcel].start
    if i in layout.shared:
        return memory[first : first + num_bytes]
    return narrow_repeats(view_leaf(memory, first, layout.specs[i]))


def _sort_sources(layout: Layout, leaves: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Which of a layout's sources can be copied as the bytes that they are, and which must be packed."""
    as_bytes: list[int] = []
    others: list[int] = []
    for k, (i, _) in enumerate(layout.sources):
        leaf = leaves[i]
        alike = leaf.is_contiguous() or leaf.stride() == layout.specs[i].stride
        exact = alike and not (leaf.is_conj() or leaf.is_neg())
        (as_bytes if exact or i in layout.shared else others).append(k)
    return as_bytes, others


def find_addresses(layout: Layout, leaves: Sequence[Tensor]) -> array[int] | None:
    """Where a layout's sources are, if all of them can be copied as the bytes that they are."""
    if filler() is None or _sort_sources(layout, leaves)[1]:
        return None
    return array("Q", [leaves[i].data_ptr() for i, _ in layout.sources])


def find_likeness(layout: Layout, leaves: Sequence[Tensor]) -> Likeness | None:
    """What to compare later leaves with, to know that they have this layout and can be copied as the bytes they are."""
    if not leaves or layout.shared or filler() is None or _sort_sources(layout, leaves)[1]:
        return None
    with suppress(ValueError):
        return Likeness(leaves, place_of_implementation())
    return None


def out_of_inference_mode() -> AbstractContextManager[Any]:
    """The source may be a generator that has left that mode on."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
