"""The way of a batch to a GPU: staged in pinned memory, copied beside the computation, lent to the consumer.

What makes that safe without ``record_stream`` and without the host waiting (S is the consumer's stream, C the copy
stream):

1. *Refill of a pinned slot* (WAR): only when the copy out of it is over, which the worker asks the device about.
2. *Refill of a device slot* (WAR): C waits for the event recorded on S when the user dropped the slot's last batch.
3. *Hand-over* (RAW): S waits for the event recorded on C behind the copy, before the batch is handed out.

``ring`` says who owns a slot's memory when. A transform runs on C as well, behind the copy; what it allocates there is
lent to the user in the same way, so that it goes back to C's memory only behind his work on S.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from millstream.device import DeviceContext, Event, Stream, likeness
from millstream.device.driver import see_alike, whole_storage
from millstream.device.likeness import Likeness
from millstream.device.native import filler
from millstream.errors import FeedError
from millstream.feed import lending
from millstream.feed.checking import Checker
from millstream.feed.lane import Transform, misplaced
from millstream.feed.layout import Layout, Section, cut, describe_leaves, plan_layout, view_leaves
from millstream.feed.ledger import Mark
from millstream.feed.ring import DeviceSlot, Loan, Ring
from millstream.feed.staging import (
    SECTION_BYTES,
    PinnedRing,
    PinnedSlot,
    find_addresses,
    find_likeness,
)
from millstream.feed.structure import Rebuild, as_tensor, as_tensors, list_items, split

_NEVER = threading.Event()
MOST_KEPT_BYTES = 256 << 20
"""Of slots on both sides, from pass to pass: to make them takes a millisecond, and a copy of larger batches longer."""
ECHOES_LEFT = 8  # of ``check=True``: what was sent a moment ago has not come back


class DeviceLoad:
    """A batch on its way. What is nearly never set, lies in the class and takes no time."""

    copy: tuple[Mark, Mark] | None = None
    staged_ns = 0
    waited_ns = 0  # for the device, before that
    made: tuple[Mark, Stream] | None = None  # where the source's own device work for this batch ends
    pinned: PinnedSlot | None = None
    slot: DeviceSlot | None = None
    loan: Loan | None = None
    ready: Event | None = None  # what the consumer's stream waits for
    tensors: Mapping[int, Tensor] | None = None  # by leaf, those that the user gets
    whole: Sequence[Tensor] | None = None  # the same where there are no others
    hidden: Sequence[int] = ()  # others that a transform has made: they may be seen in memory that is not the user's
    held: Sequence[Tensor] = ()  # such memory, until they were copied out of it

    def __init__(
        self,
        rebuild: Rebuild,
        layout: Layout,
        sections: Sequence[Section],
        leaves: list[Any],
        staged: Sequence[int],
        others: Mapping[int, Any],
        addresses: array[int] | None,
    ) -> None:
        self.rebuild, self.layout = rebuild, layout
        self.sections = sections  # of the layout: those that are still to be staged
        self.leaves = leaves  # on the host; emptied when they are not needed any more
        self.staged, self.others = staged, others  # which leaves lie in the slot, and those that do not
        self.addresses = addresses  # of the leaves, where their bytes can be copied as they are

    @property
    def num_bytes(self) -> int:
        """What it takes in staging memory."""
        return self.layout.num_bytes


class CopyLane:
    """The way to a GPU.

    Args:
        context: Of the device.
        depth: How many batches may be under way.
        threads: How many threads stage a batch at most; ``None`` for as many as help.
        transform: Applied to each batch on the copy stream, in the worker.
        checker: Watches over slots, if the user has asked for it.
        keep: Called behind a pass that has ended in order: whether this will be used, or closed, by who is called.
    """

    def __init__(
        self,
        context: DeviceContext,
        depth: int,
        *,
        threads: int | None = None,
        transform: Transform | None = None,
        checker: Checker | None = None,
        keep: Callable[[CopyLane], bool] = lambda lane: False,
    ) -> None:
        _compile()
        self._context = context
        self.device = context.torch_device
        self._transform = transform
        self._checker = checker
        self._keep = keep
        # One more than can be under way: the copy of the batch that was handed out last may still be going on.
        self._pinned = PinnedRing(context, depth + 1, threads)
        num_slots = max(depth, 2) + (checker is not None)
        self.ring = Ring(context, num_slots, context.current_stream())
        self._layout = plan_layout(())  # of the batch described last; the worker's
        self._sections = self._whole = cut(self._layout, SECTION_BYTES)  # the same in sections, and in one
        self._likeness: Likeness | None = None  # to that batch, if all of its leaves are copied as they are
        self._staged: Sequence[int] = ()  # of its leaves
        self.slot: int | None = None
        self._stream = context.current_stream()  # the consumer's, when he asked last
        self._copy_stream = context.copy_stream
        self._capture_lock = context.capture_lock
        # Of a batch that nothing else is done to on the copy stream, one event tells both that the pinned slot was read
        # and that the device's slot was written.
        self._shares_event = transform is None and checker is None
        self._spare_captures = context.spare_captures()

    @property
    def num_kept(self) -> int:
        """Parcels that the user has kept."""
        return self.ring.num_kept

    def in_thread(self) -> AbstractContextManager[None]:
        """Set the device, and keep the thread from killing captures of others."""
        return self._context.in_thread()

    def spare_captures(self) -> AbstractContextManager[None]:
        """Keep the thread from killing captures of others."""
        return self._spare_captures  # one for all batches: one thread at a time makes any

    # --- the worker's side -------------------------------------------------------------------------------------------

    def describe(self, batch: Any) -> DeviceLoad:
        """Find the batch's leaves and give those on the host their places.

        Raises:
            FeedError: A tensor lives on a third device, or something is of a type that is not known.
        """
        likeness, flat, addresses = self._likeness, None, None
        if likeness is not None and (flat := list_items(batch)) is not None:
            addresses = likeness.find(flat[0])  # of tensors only: what else may be in a list, looks like none of them
        leaves, rebuild = flat if flat is not None and addresses is not None else split(batch)
        if likeness is not None and addresses is None:
            addresses = likeness.find(leaves)
        if addresses is not None:  # nearly always
            return DeviceLoad(rebuild, self._layout, self._sections, leaves, self._staged, {}, addresses)
        staged: list[int] = []
        others: dict[int, Any] = {}
        leaves = as_tensors(batch, leaves)
        for i, leaf in enumerate(leaves):
            if _can_be_staged(leaf):
                staged.append(i)
            elif not isinstance(leaf, Tensor) or leaf.device.type == "cpu" or leaf.device == self.device:
                others[i] = leaf
            else:
                raise misplaced(batch, i, leaf, self._context.place)
        host = [leaves[i] for i in staged]
        specs = describe_leaves(host)
        if specs != self._layout.specs:
            self._layout = plan_layout(specs)
            self._sections, self._whole = cut(self._layout, SECTION_BYTES), cut(self._layout, sys.maxsize)
        self._likeness, self._staged = None if others else find_likeness(self._layout, host), staged
        addresses = find_addresses(self._layout, host)
        sections = self._whole if addresses is None else self._sections
        load = DeviceLoad(rebuild, self._layout, sections, host, staged, others, addresses)
        load.made = self._mark_own_work(others)
        return load

    def stage(self, load: DeviceLoad, stopped: threading.Event, *, wait: bool = True) -> bool:
        """Begin to copy the first section of the batch's host tensors into the next pinned slot.

        Always, even when they are pinned already: a source that yields the same memory again would otherwise overwrite
        a batch whose copy is still in flight, and a pageable one would make the copy block.

        False when stopped, and also where no slot is free if none is to be waited for.
        """
        sections = load.sections
        slot = self._pinned.begin_fill(load.layout, sections[0], load.leaves, stopped, load.addresses, wait=wait)
        if slot is None:
            return False
        load.pinned, load.sections = slot, sections[1:]
        return True

    def _mark_own_work(self, others: dict[int, Any]) -> tuple[Mark, Stream] | None:
        # Tensors that the source made on the device itself: it enqueued the work on this thread's current stream.
        if not any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in others.values()):
            return None
        stream = self._context.current_stream()
        return Mark(self._context, stream, timing=False), stream

    def send(self, load: DeviceLoad, stopped: threading.Event, *, measured: bool) -> bool:
        """Wait for a slot and move the batch there. When memory is short, it is left to the consumer to start it."""
        # A slot that is poisoned is never free at once.
        slot = self.ring.take(stopped, wait=False) if self._checker is None else None
        if slot is None and (slot := self._wait_for_slot(load, stopped)) is None:
            return False
        load.slot = slot
        if self._checker is not None:
            self._checker.verify(stopped, leave=ECHOES_LEFT)
        is_cut = bool(load.sections)
        try:
            if not self._start(load, stopped, measured=measured):
                return False
        except torch.OutOfMemoryError:
            if is_cut and not self._stage_whole(load, stopped):
                return False
            self.finish(load)
            assert load.pinned is not None
            load.pinned.left = True  # later batches take other slots, however many each of them takes
        load.leaves = []
        return True

    def _stage_whole(self, load: DeviceLoad, stopped: threading.Event) -> bool:
        """Stage all of a batch at once, also what was sent before: the consumer may take his time to start it."""
        self.finish(load)
        load.sections = cut(load.layout, sys.maxsize)
        return self.stage(load, stopped)

    def finish(self, load: DeviceLoad) -> None:
        """Return when as much of the batch is staged as was begun."""
        if load.pinned is not None and load.pinned.filling is not None:  # what is short is over when it has begun
            load.pinned.finish()
            if not load.sections and not load.staged_ns:
                load.staged_ns = time.perf_counter_ns() - load.waited_ns

    def end_sending(self, stopped: threading.Event) -> None:
        """Compare the last of what is to be checked."""
        if self._checker is not None:
            self._checker.verify(stopped, leave=0)

    def _wait_for_slot(self, load: DeviceLoad, stopped: threading.Event) -> DeviceSlot | None:
        self.finish(load)  # nothing else to do meanwhile
        began = time.perf_counter_ns()
        while (slot := self.ring.take(stopped)) is not None and self._checker is not None:
            if (checked := self._checker.rotate(slot)) is not None:
                slot = checked
                break
        load.waited_ns += time.perf_counter_ns() - began
        return slot

    def _start(self, load: DeviceLoad, stopped: threading.Event, *, measured: bool = False) -> bool:
        """Move the batch, section by section, each staged while the one before it is copied; false when stopped."""
        context, copy_stream, slot = self._context, self._copy_stream, load.slot
        assert slot is not None
        if torch.is_inference_mode_enabled():  # the source may be a generator that has left it on
            with torch.inference_mode(False):
                return self._start(load, stopped, measured=measured)
        memories = self.ring.open(slot, load.layout, copy_stream)
        if self._transform is None:
            self._lend(load, slot)  # while helpers still stage
        checksums: dict[int, int] = {}
        begin: Sequence[Event] = ()
        end: Sequence[Event] = ()
        if measured:
            load.copy = Mark(context, copy_stream, record=False), Mark(context, copy_stream, record=False)
            begin, end = ((mark.event,) for mark in load.copy)
            if self._transform is not None:
                end = ()  # it comes behind that
        while True:
            pinned, is_last = load.pinned, not load.sections
            assert pinned is not None
            self.finish(load)
            # Helpers shall not be idle while this section is sent.
            goes_on = not is_last and self.stage(load, stopped, wait=False)
            if self._checker is not None:
                self._checker.add(checksums, pinned)
            self._copy(load, slot, pinned, begin, end if is_last else ())
            if is_last:
                break
            begin, began = (), time.perf_counter_ns()
            if not goes_on:
                if not self.stage(load, stopped):
                    return False
                load.waited_ns += time.perf_counter_ns() - began
        if self._checker is not None:
            with self._capture_lock:
                self._checker.follow(load.layout, memories, slot, checksums)
        if self._transform is not None:
            # In the order in which an engine takes them, of which the transform may call one.
            with context.graph_lock, self._capture_lock:
                self._apply(self._transform, load, memories)
        load.ready = slot.ready
        return True

    def _copy(
        self, load: DeviceLoad, slot: DeviceSlot, pinned: PinnedSlot, begin: Sequence[Event], end: Sequence[Event]
    ) -> None:
        """Enqueue the copies of what is staged, behind the consumer's work with the slot's last batch (WAR).

        Behind those of a whole batch the pinned slot's event is recorded only, for the device's slot as well. It may be
        recorded again before who waits for the latter has done so: when the pinned slot is sent anew, on the same
        stream. He then waits for more than he must, and never for less, nor for anything that waits for him: what was
        enqueued before he waits can only wait for what was enqueued even before. (Nor does it happen while a batch is
        under way, since there are more pinned slots than batches.)
        """
        opening = pinned.opening
        assert opening is not None
        shares_event = self._shares_event and opening.section.num_bytes == load.layout.num_bytes
        with self._capture_lock:  # a copy from pageable memory, when pinning was refused, ends captures as well
            try:
                # Before the copy: an interrupt behind it would leave slots that look as if nothing were under way.
                # The turn first: who fills slots takes what is left to nobody, if the copy of its turn is over.
                pinned.turn = next(self._pinned.turns)
                pinned.busy = slot.written = True
                pinned.left = False
                send = slot.sends.get(opening)  # as it was prepared, if both slots are what they were then
                if begin or end or send is None or send() != 0:
                    self._copy_anew(slot, pinned, begin, end, shares_event=shares_event)
                slot.was_lent = False
                slot.ready = pinned.copied if shares_event else slot.copied
            except BaseException:
                slot.ready = slot.copied
                for event in (pinned.copied, slot.copied):  # behind whatever was enqueued
                    with suppress(RuntimeError):  # a device in an error state refuses
                        event.record(self._copy_stream)
                raise

    def _copy_anew(
        self,
        slot: DeviceSlot,
        pinned: PinnedSlot,
        begin: Sequence[Event],
        end: Sequence[Event],
        *,
        shares_event: bool,
    ) -> None:
        """Enqueue the copy between two slots, and prepare it for the next time, if it is not measured."""
        context, pairs = self._context, _pair(pinned, slot.memories)
        events = (pinned.copied,) if shares_event else (pinned.copied, slot.copied)
        send, waits = None, (slot.released,)
        if not (begin or end):
            send = context.prepare_copy(pairs, self._copy_stream, waits=waits, after=events)
        if send is not None:
            slot.sends[pinned.opening] = send
        if send is None or send() != 0:
            waits = waits if slot.was_lent else ()
            context.copy(pairs, self._copy_stream, waits=waits, before=begin, after=(*end, *events))

    def _lend(self, load: DeviceLoad, slot: DeviceSlot) -> None:
        load.loan, leaves = self.ring.lend_leaves(slot, load.layout)
        if not load.layout.parcels:
            self.ring.give_back(slot)  # nothing of it will ever be dropped
        if load.others:
            load.tensors = dict(zip(load.staged, leaves, strict=True))
        else:
            load.whole = leaves

    def _apply(self, transform: Transform, load: DeviceLoad, memories: Sequence[Tensor]) -> None:
        """Run the user's transform on the copy stream, and lend what comes out of it.

        Leaves that are not staged are moved there as well, but for those that require gradients: they would lose what
        made them.
        """
        context, slot, copy_stream = self._context, load.slot, self._copy_stream
        assert slot is not None
        slot.raw = slot.raw or view_leaves(load.layout, memories)
        leaves = dict(zip(load.staged, (leaf.detach() for leaf in slot.raw), strict=True))
        foreign = {leaf.untyped_storage().data_ptr() for leaf in load.others.values() if _is_plain(leaf)}
        if load.made is not None:
            copy_stream.wait_event(load.made[0].event)
        with context.on(copy_stream):
            try:
                leaves |= {i: _bring(leaf, self.device) for i, leaf in load.others.items()}
                batch = transform(load.rebuild([leaves[i] for i in range(len(leaves))]))
                outputs, load.rebuild = split(batch)
                outputs = [as_tensor(leaf) for leaf in outputs]
                outputs = [leaf.resolve_conj().resolve_neg() if _is_plain(leaf) else leaf for leaf in outputs]
            finally:
                if load.copy is not None:
                    load.copy[1].event.record(copy_stream)
                slot.copied.record(copy_stream)
                if load.made is not None:  # WAR: what the source made is dropped here, and its memory goes home
                    load.made[1].wait_event(slot.copied)
        self._lend_outputs(load, outputs, foreign, memories)

    def _lend_outputs(
        self, load: DeviceLoad, outputs: Sequence[Any], foreign: Set[int], memories: Sequence[Tensor]
    ) -> None:
        """Lend what a transform has returned, but for tensors in storages that are not to be lent.

        What is no plain tensor (subclasses, sparse ones, objects) cannot be lent, and is copied when it is handed out.
        """
        slot, home, ring = load.slot, self._copy_stream, self.ring
        assert slot is not None
        # Not those of objects, which the transform may have changed.
        given = {id(leaf) for leaf in load.others.values() if isinstance(leaf, Tensor)}
        load.others = others = {}
        found: dict[int, list[int]] = {}  # by storage, the outputs that lie there
        for i, leaf in enumerate(outputs):
            lies_here = _is_plain(leaf) and leaf.device == self.device
            storage = leaf.untyped_storage() if lies_here else None
            if storage is not None and storage.nbytes() and storage.data_ptr() not in foreign:
                found.setdefault(storage.data_ptr(), []).append(i)
            else:
                others[i] = leaf
        load.hidden = [i for i, leaf in others.items() if id(leaf) not in given and self._may_hide_memory(leaf)]
        own = {memory.data_ptr(): number for number, memory in enumerate(memories)}
        lent = [own[pointer] for pointer in found if pointer in own]
        held = [number for number in range(len(memories)) if number not in lent] if load.hidden else []
        load.loan = loan = ring.begin_loan(slot, lent + held)
        load.held = [ring.lend_bytes(loan, number) for number in held]
        if loan.came_back:
            ring.give_back(slot)
        load.tensors = tensors = {}
        for pointer, together in found.items():
            number, leaf = own.get(pointer), outputs[together[0]]
            is_alone = len(together) == 1
            if number is None and is_alone:
                tensors[together[0]] = ring.lend_other(loan, leaf.detach(), home)  # without what made it
                continue
            if number is None:
                memory = ring.lend_other(loan, whole_storage(leaf), home)
            else:
                memory = ring.lend_bytes(loan, number)
            tensors |= {i: see_alike(memory, outputs[i]) for i in together}

    def _may_hide_memory(self, leaf: Any) -> bool:
        return not _is_plain(leaf) and (not isinstance(leaf, Tensor) or leaf.device == self.device)

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def reclaim(self) -> None:
        """Leave to the user what he has kept, and take new memory in its place.

        Raises:
            FeedError: The current stream is being captured.
        """
        if self._context.is_capturing():
            raise FeedError(
                f"A batch was asked for while the current stream of {self._context.place} is being captured into a "
                "CUDA graph, which would hold this one batch for ever. Take the batch before the capture, and copy it "
                "into the graph's input."
            )
        self._stream = self._context.current_stream()
        self.ring.reclaim()

    def mark(self) -> Mark | None:
        """Note where the consumer's stream stands."""
        return Mark(self._context, self._stream)

    def deliver(self, load: DeviceLoad) -> Any:
        """Hand the batch out on the current stream. The host does not wait for the device."""
        stream = self._stream
        if load.ready is None:
            self._start(load, _NEVER)  # memory was short; if it still is, the user learns it here, and may try again
            assert load.ready is not None
        load.ready.wait(stream)  # RAW: the consumer's kernels must see the copied bytes
        # Not before: what users have registered may compute with the leaves, or keep none of them.
        batch = self._complete(load, stream) if load.whole is None else load.rebuild(load.whole)
        if load.loan is not None:
            self.ring.hand_out(load.loan, stream)
            self.slot = load.loan.slot.number if load.loan.leases else None
        return batch

    def _complete(self, load: DeviceLoad, stream: Stream) -> Any:
        """Make the batch of what was staged and of what was not."""
        tensors: dict[int, Any] = dict(load.tensors or {})
        if load.made is not None:
            tensors |= self._take_over(load, load.made, stream)
        for i, leaf in load.others.items():
            if i not in tensors:
                tensors[i] = _move(_copy(leaf) if i in load.hidden else leaf, self.device)
        if load.hidden:
            # WAR: what the transform has made is in memory of the copy stream, or seen in the slot.
            mark = Mark(self._context, stream, timing=False)  # others get its event when it is gone
            self._copy_stream.wait_event(mark.event)
        return load.rebuild([tensors[i] for i in range(len(tensors))])

    def _take_over(self, load: DeviceLoad, made: tuple[Mark, Stream], stream: Stream) -> dict[int, Tensor]:
        """Make tensors that the source made on the device the property of the consumer's stream.

        Handed out as they are, they would go back to the source's stream when the user drops them, and be overwritten
        there under his kernels. So they are copied, on the device, into memory of his stream.
        """
        mark, source_stream = made
        stream.wait_event(mark.event)  # RAW: what the source computed on the device
        if source_stream == stream:
            return {}
        resident = {
            i: leaf.clone()
            for i, leaf in load.others.items()
            if isinstance(leaf, Tensor) and leaf.device == self.device
        }
        # WAR: the source's stream may use that memory again only when it was read.
        mark = Mark(self._context, stream, timing=False)
        source_stream.wait_event(mark.event)
        return resident

    # --- the end -----------------------------------------------------------------------------------------------------

    def stop(self, stopped: threading.Event) -> None:
        """Wake the worker for good."""
        self.ring.stop(stopped)

    def keep(self) -> bool:
        """Keep slots, and what was prepared for them, if they are not large."""
        if self._checker is not None or self.ring.num_bytes + self._pinned.num_bytes > MOST_KEPT_BYTES:
            return False
        self.ring.idle()
        return self._keep(self)

    def resume(self) -> None:
        """Begin another pass, on the current stream."""
        self.ring.num_kept = 0
        self._stream = self.ring.stream = self._context.current_stream()

    @property
    def is_usable(self) -> bool:
        """Whether it is open, and so is its context, in this process; else nothing of it may be called."""
        return not (self.ring.closed or self._context.closed)

    def close(self) -> None:
        """Give slots and events back, without waiting for copies that are under way."""
        if self._checker is not None:
            self._checker.close()
        try:
            self.ring.close()
        finally:
            self._pinned.close()


@functools.cache
def _compile() -> None:
    """Compile all that feeding takes, each beside the others: in the midst of a loop the device would wait for it."""
    with ThreadPoolExecutor() as compilers:
        for found in [compilers.submit(each) for each in (filler, likeness.compiled, lending.compiled)]:
            found.result()


def _pair(pinned: PinnedSlot, memories: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Where the bytes in a pinned slot go, and they."""
    pairs = []
    for parcel, first, source in pinned.copies:
        memory = memories[parcel]
        if memory.numel() != source.numel():  # a part of the parcel
            memory = memory[first : first + source.numel()]
        pairs.append((memory, source))
    return pairs


def _can_be_staged(leaf: Any) -> bool:
    """Whether the leaf is plain bytes on the host.

    Others (tensor subclasses, sparse, quantized or gradient-tracking tensors, objects with a ``to``) are moved by their
    own ``to`` when they are handed out: right, if not hidden.
    """
    return _is_plain(leaf) and leaf.is_cpu and not leaf.requires_grad


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_nested


def _copy(leaf: Any) -> Any:
    """The same in memory of the current stream, without what made it."""
    if not isinstance(leaf, Tensor):
        return copy.deepcopy(leaf)
    made = leaf.detach().clone()
    if type(made) is not type(leaf):
        made = made.as_subclass(type(leaf))
    made.__dict__.update(copy.deepcopy(leaf.__dict__))
    return made


def _bring(leaf: Any, device: torch.device) -> Any:
    """A leaf on the device, for a transform: tensors that require gradients would lose what made them."""
    return leaf if isinstance(leaf, Tensor) and leaf.requires_grad else _move(leaf, device)


def _move(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device)  # itself, when it is there
    leaf = copy.copy(leaf)  # its ``to`` may move it in place, and the source may have it for another batch or device
    try:
        return leaf.to(device, non_blocking=True)
    except TypeError:
        return leaf.to(device)
