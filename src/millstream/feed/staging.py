"""The host's side of a feed: pinned slots, and the threads that fill them.

A slot is written again only when the copy out of it is over on the device. That is the one thing a feed ever asks the
device about, and it asks in the feed's own thread.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from millstream.device import DeviceContext, Event
from millstream.feed.layout import ALIGNMENT_BYTES, Layout, narrow_repeats, view_leaf

PARALLEL_BYTES = 4 << 20
"""From here on several threads copy: one core moves 8 to 14 GB/s, so this takes it 0.4 ms, and waking others 0.05."""

MAX_THREADS = 8
"""More than a PCIe 5 bus needs."""

FIRST_PAUSE_S = 50e-6
"""How long a thread first sleeps when an event is not reached: about the shortest sleep an operating system grants."""

LONGEST_PAUSE_S = 500e-6
"""How long at most: noticing this late costs nothing while other batches wait, and 2,000 questions a second to the
runtime take well under 1 % of the interpreter's time."""

Move = tuple[int, int, int]
"""Destination, source, number of bytes."""


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
class PinnedSlot:
    """Pinned memory that one batch after another passes through."""

    copied: Event
    busy: bool = False  # its bytes are still to be read by a copy that has been enqueued
    memory: Tensor | None = None


class PinnedRing:
    """Pinned slots, used in turn. One thread fills them.

    Args:
        context: Of the device.
        num_slots: How many batches may lie in pinned memory.
        num_threads: How many threads fill a slot.
    """

    def __init__(self, context: DeviceContext, num_slots: int, num_threads: int) -> None:
        self._context = context
        self._slots = deque(PinnedSlot(context.acquire_event()) for _ in range(num_slots))  # the oldest first
        self._crew = CopyCrew(num_threads)

    def fill(self, layout: Layout, leaves: Sequence[Tensor], stopped: threading.Event) -> PinnedSlot | None:
        """Copy the leaves of a batch into the slot that was filled longest ago; ``None`` when stopped meanwhile.

        The caller has made sure that the copy out of it has been enqueued.
        """
        slot = self._slots[0]
        # The device may be about to read these bytes (WAR).
        if slot.busy and not wait_until_reached(self._context, slot.copied, stopped):
            return None
        slot.busy = False
        memory = self._open(slot, layout.num_bytes)
        if memory is not None:
            base = memory.data_ptr()
            moves: list[Move] = []
            for i, num_bytes in layout.sources:
                leaf, spec, (parcel, start) = leaves[i], layout.specs[i], layout.position[i]
                start += layout.parcels[parcel].start
                if leaf.stride() == spec.stride and not (leaf.is_conj() or leaf.is_neg()):
                    moves.append((base + start, leaf.data_ptr(), num_bytes))
                else:
                    narrow_repeats(view_leaf(memory, start, spec)).copy_(narrow_repeats(leaf))
            self._crew.copy(moves)
        self._slots.rotate(-1)
        return slot

    def _open(self, slot: PinnedSlot, num_bytes: int) -> Tensor | None:
        """The slot's memory, which is replaced if it is too small."""
        if slot.memory is None or slot.memory.numel() < num_bytes:
            if slot.memory is not None:
                self._context.release_pinned(slot.memory)  # its copy is over
                slot.memory = None
            if num_bytes:
                slot.memory = self._context.pinned(num_bytes, reserve_bytes=len(self._slots) * num_bytes)
        return slot.memory

    def close(self) -> None:
        """Give memory and events back, without waiting for copies that are under way."""
        self._crew.close()
        for slot in self._slots:
            if slot.memory is None:
                self._context.release_event(slot.copied)
            elif slot.busy:
                self._context.release_pinned(slot.memory, after=slot.copied)
            else:
                self._context.release_pinned(slot.memory)
                self._context.release_event(slot.copied)
        self._slots.clear()


def default_threads() -> int:
    """Half of the processors that this process may use, and no more than help."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, processors // 2))


class CopyCrew:
    """Threads that copy host memory together: the caller's own, and helpers that start with the first large copy.

    Each takes one equal share in one call that holds no interpreter lock: to get that lock back can take milliseconds
    while the training loop computes in Python, so it must not be needed often.

    Args:
        num_threads: How many in all.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._helpers: list[threading.Thread] = []
        self._orders: queue.SimpleQueue[Sequence[Move] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def copy(self, moves: Sequence[Move]) -> None:
        """Copy; all of it is done when this returns."""
        total = sum(num_bytes for _, _, num_bytes in moves)
        if total < PARALLEL_BYTES or self._num_threads == 1:
            _run(moves)
            return
        shares = share_out(moves, -(-total // self._num_threads))
        while len(self._helpers) < len(shares) - 1:
            helper = threading.Thread(
                target=_help, args=(self._orders, self._done), name="millstream-feed-copy", daemon=True
            )
            helper.start()
            self._helpers.append(helper)
        for share in shares[1:]:
            self._orders.put(share)
        _run(shares[0])
        for _ in shares[1:]:
            self._done.get()

    def close(self) -> None:
        """End the helpers and wait for them."""
        for _ in self._helpers:
            self._orders.put(None)
        for helper in self._helpers:
            helper.join()
        self._helpers.clear()


def share_out(moves: Sequence[Move], share_bytes: int) -> list[list[Move]]:
    """Cut moves into shares of at most ``share_bytes``, all but the last exactly so long (up to the alignment)."""
    share_bytes = -(-share_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    shares: list[list[Move]] = [[]]
    room = share_bytes
    for to, come_from, left in moves:
        while left:
            if not room:
                shares.append([])
                room = share_bytes
            taken = min(left, room)
            shares[-1].append((to, come_from, taken))
            to, come_from, left, room = to + taken, come_from + taken, left - taken, room - taken
    return shares


def _run(moves: Sequence[Move]) -> None:
    for to, come_from, num_bytes in moves:
        ctypes.memmove(to, come_from, num_bytes)


def _help(orders: queue.SimpleQueue[Sequence[Move] | None], done: queue.SimpleQueue[None]) -> None:
    while (share := orders.get()) is not None:
        _run(share)
        del share
        done.put(None)
