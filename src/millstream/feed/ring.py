"""The device's side of a feed: slots that one batch after another lands in, and who may use them when.

A slot goes round: *free* → (the worker takes it, its copy is enqueued) → *under way* → (handed out) → *lent* → (the
user drops the last tensor of it) → *free*. Between free and under way stands an event on the consumer's stream,
recorded at the moment of the drop: the copy into the slot waits for all that the user had queued by then, and for
nothing that he queues later. That is the rule by which PyTorch's allocator reuses memory, made to hold across streams.

**Who keeps a batch, owns it.** In a loop the user's variables hold batch k until batch k+1 is there. A parcel of an
older batch that is still held when he asks for batch k+1 leaves the ring: it is his own, as if it had been allocated
for him, and the ring takes new memory in its place. So nothing that can be read is ever overwritten, a loop that keeps
nothing allocates nothing, and nobody can make a feed wait for ever.

What is said of host code may happen in any thread and at any moment, since tensors die where garbage is collected. So
dropping takes no lock; each decision that two threads could take is an item popped from a list or a dict, which only
one of them gets.

Python drops an interrupt that meets a finalizer, and with it the rest of what that was to do. So when the consumer asks
for a batch he looks whether what he has dropped came back, and brings it back if not. It may then do so twice, which
does no harm: what comes back is the loan, and a slot is taken for it once. Memory that does not come back with a slot
is kept by its loan until it was let go, for the same reason.
"""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from millstream.device import DeviceContext, Event, Stream
from millstream.errors import DeviceError
from millstream.feed.layout import Layout, view_leaves
from millstream.feed.ledger import Mark
from millstream.feed.lending import Lend, prepare_lending

MOST_LOOKED_AT = 4
"""Of the loans with memory of their own so many are looked at for each batch: more than come."""


@dataclass(slots=True)
class Parcel:
    """Memory of a slot, and the stream that it was allocated for."""

    memory: Tensor
    home: Stream


@dataclass(slots=True, eq=False)
class DeviceSlot:
    """Memory on the device for one batch at a time.

    Attributes:
        number: Tells it from the others; the tensors of a slot keep their addresses from batch to batch, as long as the
            batches look alike and are not kept.
        copied: Its own event on the copy stream.
        ready: Where there its present batch is complete, with all that was done to it: this or somebody else's.
        released: Where on the consumer's stream its last batch was dropped.
        parcels: Its memory; ``None`` where the user has kept it.
        layout: What it was opened for last; ``None`` when it must be looked at again.
        memories: Of the parcels that this layout has.
        lending: What lends each of them as the leaves that lie there, if compiled code can.
        raw: Its memory as the leaves of the batch, for a transform; empty until one asks.
        sends: What enqueues the copies from a pinned slot, by how that is open.
        written: Whether a copy has been enqueued since the memory was taken.
        was_lent: Whether the copy stream is still to wait for ``released``.
        loan: As what it was lent last, until it is taken again.
    """

    number: int
    copied: Event
    released: Event
    ready: Event = field(init=False)
    parcels: list[Parcel | None] = field(default_factory=list)
    layout: Layout | None = None
    memories: list[Tensor] = field(default_factory=list)
    lending: Sequence[Lend] = ()
    raw: Sequence[Tensor] = ()
    sends: dict[Any, Callable[[], int]] = field(default_factory=dict)
    written: bool = False
    was_lent: bool = False
    loan: Loan | None = None

    def __post_init__(self) -> None:
        self.ready = self.copied

    def close(self) -> None:
        """Forget what it was opened for: it has other memory from here on."""
        self.layout, self.memories, self.lending, self.raw = None, [], (), ()
        self.sends.clear()


@dataclass(slots=True, eq=False)
class Rest:
    """Memory of another stream than the consumer's, which he has dropped.

    Attributes:
        memory: It.
        home: The stream that it was allocated for.
        stream: The consumer's.
        mark: Where his work with it ends there; ``None`` where an interrupt came first.
    """

    memory: Tensor
    home: Stream
    stream: Stream
    mark: Mark | None = None


class Ring:
    """The slots of one device. The worker takes them, the consumer hands them out, finalizers bring them back.

    Args:
        context: Of the device.
        num_slots: How many batches may be on the device, the one in use included; at least 2.
        stream: The consumer's.
    """

    def __init__(self, context: DeviceContext, num_slots: int, stream: Stream) -> None:
        self._context = context
        self.stream = stream  # for which memory is allocated
        self.slots = [DeviceSlot(i, context.acquire_event(), context.acquire_event()) for i in range(num_slots)]
        # Slots, or as what they were lent; of passes that are to stop, the event. Its ``put`` may run in finalizers.
        self._free: queue.SimpleQueue[DeviceSlot | Loan | threading.Event] = queue.SimpleQueue()
        for slot in self.slots:
            self._free.put(slot)
        self._loans: deque[Loan] = deque()  # handed out and perhaps still held; the consumer's
        self._scattered: deque[Loan] = deque()  # handed out, with memory of their own; the consumer's
        self._late: deque[tuple[Loan, Tensor | None, Stream | None]] = deque()
        self._resting: deque[Rest] = deque()
        self._num_rested = 0  # of these, how many have rested for a batch
        self._is_idle = False  # whether it is between two passes
        self.num_kept = 0  # parcels that users have kept
        self.closed = False

    # --- the worker's side -------------------------------------------------------------------------------------------

    def take(self, stopped: threading.Event, *, wait: bool = True) -> DeviceSlot | None:
        """A slot that is free, or will be; ``None`` when there is none now and none is waited for, or none will be.

        Args:
            stopped: What ``stop`` is given to end this.
            wait: Whether to wait.
        """
        while wait or not self._free.empty():  # nobody else takes any
            found = self._free.get()
            if found is stopped:
                self._free.put(stopped)  # whoever asks again shall not wait either
                break
            if isinstance(found, Loan) and found.slot.loan is found:  # else it came back before
                found.slot.loan = None
                return found.slot
            if isinstance(found, DeviceSlot):
                return found
        return None

    def open(self, slot: DeviceSlot, layout: Layout, copy_stream: Stream) -> list[Tensor]:
        """Give the slot memory for a layout. Who writes there waits for ``released`` first, if it ``was_lent``.

        Raises:
            torch.OutOfMemoryError: There is none; what was there before still is.
        """
        self._is_idle = False
        if self._num_rested:
            self._end_rest(self._num_rested)
        self._num_rested = len(self._resting)
        if slot.layout is not layout:
            self._fit(slot, layout, copy_stream)
        elif not slot.lending:  # not for the first of a form: there may be no second, and it costs more than it spares
            slot.lending = prepare_lending(layout, slot.memories)
        return slot.memories

    def _fit(self, slot: DeviceSlot, layout: Layout, copy_stream: Stream) -> None:
        slot.close()
        if slot.was_lent:
            copy_stream.wait_event(slot.released)  # WAR: kernels that read the last batch; its memory may go home now
        slot.parcels += [None] * (len(layout.parcels) - len(slot.parcels))
        for i, parcel in enumerate(layout.parcels):
            present = slot.parcels[i]
            if present is None or present.memory.numel() < parcel.num_bytes:
                slot.parcels[i] = self._allocate(parcel.num_bytes, copy_stream)
                if present is not None:
                    self._context.order(copy_stream, present.home)  # what was done with it, was before
        parcels = slot.parcels[: len(layout.parcels)]
        slot.memories = [parcel.memory for parcel in parcels if parcel is not None]
        slot.layout = layout

    def _allocate(self, num_bytes: int, copy_stream: Stream) -> Parcel:
        home = self.stream
        with self._context.capture_lock, self._context.on(home):  # allocating ends captures of other threads
            memory = self._context.allocate(num_bytes)
        # The memory may have been freed a moment ago by the host, while kernels on its stream still use it (WAR, WAW).
        self._context.order(home, copy_stream)
        return Parcel(memory, home)

    def begin_loan(self, slot: DeviceSlot, parcels: Sequence[int]) -> Loan:
        """A loan of some parcels of a slot. Each is to be lent; they bring the slot back when all of them are gone."""
        slot.loan = loan = Loan(self, slot, parcels)
        return loan

    def lend_bytes(self, loan: Loan, number: int) -> Tensor:
        """A parcel as its bytes."""
        lease = loan.lease(number)
        return self._context.lend(lease.memory, lease)

    def lend_leaves(self, slot: DeviceSlot, layout: Layout) -> tuple[Loan, list[Tensor]]:
        """The leaves of a batch in a slot that is open for its layout; they bring it back when all of them are gone."""
        numbers = range(len(slot.memories))
        slot.loan = loan = Loan(self, slot, numbers)
        if not slot.lending:
            return loan, view_leaves(layout, [self.lend_bytes(loan, number) for number in numbers])
        leaves: list[Any] = [None] * len(layout.specs)
        for number, lend in enumerate(slot.lending):
            lend(loan.lease(number), leaves)  # which keeps the memory as well
        return loan, leaves

    def lend_other(self, loan: Loan, memory: Tensor, home: Stream) -> Tensor:
        """The same as a tensor that is in no slot, but shall go back to its stream in order all the same."""
        number = -1 - len(loan.own)  # none of a parcel
        lease = Lease(loan, number, memory)
        loan.own[number] = weakref.ref(lease), memory, home
        return self._context.lend(memory, lease)

    def give_back(self, slot: DeviceSlot) -> None:
        """Make a slot free that the user has never seen: what was done with it was done on the copy stream."""
        slot.loan = None
        self._free.put(slot)

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def reclaim(self) -> None:
        """The consumer asks for a batch: what he still holds of older ones than the last is his own from here on."""
        if self._late:
            self._let_go_late()
        loans = self._loans
        while len(loans) > 1:
            oldest = loans[0]
            if oldest.own or not oldest.came_back:  # nearly always all of it was dropped
                self.num_kept += self._forgo(oldest)
            loans.popleft()
        if loans and not loans[0].came_back:
            self._bring_back(loans[0])
        if self._scattered:
            self._gather(MOST_LOOKED_AT)  # who keeps all batches keeps many

    def _let_go_late(self) -> None:
        for _ in range(len(self._late)):
            self._let_go(*self._late.popleft())

    def _forgo(self, loan: Loan) -> int:
        kept = loan.forgo()
        self._scatter(loan)  # which is asked itself: an interrupt may have come behind that
        self._bring_back(loan)
        return kept

    def _scatter(self, loan: Loan) -> None:
        if loan.own and not loan.is_scattered:
            self._scattered.append(loan)
            loan.is_scattered = True

    def _gather(self, most: int = sys.maxsize) -> None:
        """Let go of what was dropped while an interrupt met its finalizer, of so many loans, by turns."""
        for _ in range(min(len(self._scattered), most)):
            loan = self._scattered[0]
            for number in [*loan.own]:  # and not of its items: to make tuples may begin a collection, and so change it
                lease, _, _ = loan.own.get(number) or (None, None, None)
                if lease is not None and lease() is None:
                    self._send_home(loan, number)
            if loan.own:
                self._scattered.append(loan)
            else:
                loan.is_scattered = False
            self._scattered.popleft()

    def _bring_back(self, loan: Loan) -> None:
        if not loan.came_back and loan.slot.loan is loan and loan.is_over():
            loan.tickets.clear()
            self._let_go(loan, None, None)

    def hand_out(self, loan: Loan, stream: Stream) -> None:
        """Note that a batch now belongs to the consumer, who works with it on ``stream``. May be called again."""
        loan.stream = self.stream = stream
        if loan not in self._loans:
            if loan.own:
                self._scatter(loan)
            self._loans.append(loan)

    # --- finalizers --------------------------------------------------------------------------------------------------

    def _drop(self, lease: Lease) -> None:
        """A parcel was dropped. Runs in any thread, at any moment; takes no lock and never waits."""
        loan = lease.loan
        if self.closed and not loan.forgone:
            return  # never handed out; ``close`` has seen to its memory
        if not loan.claims.pop(lease.index, False):
            self._send_home(loan, lease.index)  # a parcel that has left the ring, or was none of it
        elif loan.is_last():
            self._let_go(loan, None, None)

    def _send_home(self, loan: Loan, number: int) -> None:
        if (found := loan.own.get(number)) is not None:
            self._let_go(loan, *found[1:])
            loan.own.pop(number, None)  # not before: an interrupt may have ended that

    def _let_go(self, loan: Loan, memory: Tensor | None, home: Stream | None) -> None:
        """Record where the user's work with something ends: a slot (no memory given), or memory that goes home."""
        stream = loan.stream
        if stream is None:  # lost on its way to the consumer: what was done with it was done on the copy stream
            if memory is None:
                self._free.put(loan)
                loan.came_back = True
            return
        try:
            if self._context.is_capturing():  # the event would become a part of somebody's graph
                self._late.append((loan, memory, home))
                loan.came_back |= memory is None
            elif memory is None:
                loan.slot.released.record(stream)
                loan.slot.was_lent = True
                self._free.put(loan)
                loan.came_back = True
            elif home is not None and home != stream:
                rest = Rest(memory, home, stream)
                self._resting.append(rest)  # first of all: an interrupt may end this
                rest.mark = Mark(self._context, stream, timing=False)
                if self.closed or self._is_idle:
                    self._end_rest(len(self._resting))
        except (DeviceError, RuntimeError):
            pass  # the context is closed; or its device is in an error state, and that was raised where it happened

    def _end_rest(self, count: int) -> None:
        """Let the oldest memory that rests go home: the allocator gives it out again there at once (WAR).

        It rests while one batch is made. Were its stream to wait as soon as it is dropped, and this is the copy stream
        for all that a transform has made, the next copy would wait for the step that has just been enqueued.
        """
        for _ in range(count):
            try:
                rest = self._resting[0]
            except IndexError:  # another thread was here
                return
            with suppress(RuntimeError):
                if rest.mark is None:
                    self._context.order(rest.stream, rest.home)
                else:
                    rest.home.wait_event(rest.mark.event)
            with suppress(ValueError):  # likewise
                self._resting.remove(rest)

    # --- the end -----------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Memory of its slots."""
        return sum(parcel.memory.numel() for slot in self.slots for parcel in slot.parcels if parcel is not None)

    def stop(self, stopped: threading.Event) -> None:
        """Wake who takes slots for the pass that this event is of, for good."""
        self._free.put(stopped)

    def idle(self) -> None:
        """There will be no batch for a while."""
        self._is_idle = True
        self._end_rest(len(self._resting))

    def close(self) -> None:
        """Forget the slots, without waiting for the device. Nobody takes or hands out any more."""
        self._let_go_late()
        for loan in self._loans:
            self._forgo(loan)
        self._loans.clear()
        self._gather()
        self.closed = True
        self._end_rest(len(self._resting))
        with suppress(RuntimeError):
            for slot in self.slots:
                for parcel in slot.parcels:
                    # The memory is freed here, so its stream may use it again at once: not before the copy into it is
                    # over, nor before a consumer on another stream is done.
                    if parcel is not None and slot.written:
                        parcel.home.wait_event(slot.ready)
                    if parcel is not None and slot.was_lent:
                        parcel.home.wait_event(slot.released)
        for slot in self.slots:
            slot.parcels.clear()
            slot.close()
            self._context.release_event(slot.copied)
            if slot.loan is None or slot.loan.came_back:
                self._context.release_event(slot.released)
            else:  # a thread that drops the batch just now may be about to record it
                self._context.forget_event(slot.released)
            slot.loan = None
        self.slots.clear()


class Loan:
    """One batch in the user's hands.

    Attributes:
        slot: Where it lies.
        stream: The consumer's; ``None`` before it was handed out.
        claims: One per parcel, by its number: who pops it decides whether the parcel comes back or stays with the user.
        leases: Of the parcels.
        own: Memory that does not come back with the slot, by number: its lease, itself, and the stream that it was
            allocated for.
        is_scattered: Whether the ring looks after what is its own.
        forgone: Whether the ring has given up what had not come back.
        came_back: Whether the slot is free again, or will be when nobody captures any more.
        tickets: As many as parcels are still to come back or to be given up.
    """

    __slots__ = (
        "_decided",
        "_kept",
        "came_back",
        "claims",
        "forgone",
        "is_scattered",
        "leases",
        "own",
        "ring",
        "slot",
        "stream",
        "tickets",
    )

    def __init__(self, ring: Ring, slot: DeviceSlot, parcels: Sequence[int]) -> None:
        self.ring = ring
        self.slot = slot
        self.stream: Stream | None = None
        self.claims = dict.fromkeys(parcels, True)
        self.leases: dict[int, weakref.ref[Lease]] = {}
        self.own: dict[int, tuple[weakref.ref[Lease], Tensor, Stream]] = {}
        self.forgone = self.is_scattered = False
        self.came_back = not parcels
        self._decided: dict[int, bool] = {}  # of what was forgone: whether this got the claim, and not a finalizer
        self._kept: frozenset[int] = frozenset()
        self.tickets = [*range(len(parcels))]  # whatever their numbers: the last to be popped is 0

    def lease(self, number: int) -> Lease:
        """What keeps a parcel from coming back."""
        parcel = self.slot.parcels[number]
        assert parcel is not None
        lease = Lease(self, number, parcel.memory)
        self.leases[number] = weakref.ref(lease)
        return lease

    def is_last(self) -> bool:
        """Count one parcel as come back or given up; true for exactly one caller, the last."""
        return self.tickets.pop() == 0

    def is_over(self) -> bool:
        """Whether the user has nothing of it any more but what he was left, and all finalizers have ended."""
        for i, lease in self.leases.items():  # noqa: SIM110 - asked for every batch: a generator takes three times as long
            if lease() is not None and i not in self._kept:
                return False
        return True

    def forgo(self) -> int:
        """Leave to the user what he still holds; how many parcels that is."""
        self.forgone = True
        kept = 0
        if not self.tickets:  # nothing
            return kept
        for i, lease in self.leases.items():
            if (
                i not in self._decided
            ):  # in one call: an interrupt behind it loses nothing, and this may be called again
                self._decided.update(zip((i,), map(self.claims.pop, (i,), (False,)), strict=True))
            if not self._decided[i] or i in self._kept:
                continue
            if lease() is not None:  # otherwise an interrupt has met its finalizer
                if (parcel := self.slot.parcels[i]) is not None:
                    self.own[i] = lease, parcel.memory, parcel.home
                    self.slot.close()
                    self.slot.parcels[i] = None
                kept += 1
            self._kept |= {i}
            if self.is_last():
                self.ring._let_go(self, None, None)
        return kept


class Lease:
    """Held by a lent tensor's storage, and by nothing else: its end is the end of the last tensor over the memory."""

    __slots__ = ("__weakref__", "index", "loan", "memory")

    def __init__(self, loan: Loan, index: int, memory: Tensor) -> None:
        self.index, self.memory = index, memory
        self.loan = loan  # last: without it, an interrupt has met the making of this, and nobody was lent anything

    def __del__(self) -> None:
        try:
            ring = self.loan.ring
        except AttributeError:
            return
        ring._drop(self)
