"""Parts of a batch that no buffer carries: a transform's results, tensors made on the device, objects that move.

A transform runs on the copy stream, after the copy. What it allocates there is lent to the user like a buffer, so that
it goes back to the copy stream only after the user's work with it.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from millstream.data.transfer.batch_layout import BatchLayout, Chunk, is_plain, view_leaves
from millstream.data.transfer.buffers import BatchBuffer, BatchLease, BufferPool
from millstream.data.transfer.staging import StagingBuffer
from millstream.data.transfer.transfer import PendingBatch, Transform
from millstream.device import DeviceContext, Event, Stream, StreamMarker
from millstream.device.drivers.lending import see_alike, whole_storage
from millstream.tree.arrays import as_tensor
from millstream.tree.batches import Unflatten, flatten_batch, name_leaf


class DeviceBatch(PendingBatch):
    """A batch on its way. What is nearly never set lies in the class and takes no time."""

    chunks: Sequence[Chunk]
    made: tuple[StreamMarker, Stream] | None = None  # where the source's own device work for this batch ends
    pinned: StagingBuffer | None = None
    buffer: BatchBuffer | None = None
    lease: BatchLease | None = None
    ready: Event | None = None  # what the consumer's stream waits for
    tensors: Mapping[int, Tensor] | None = None  # by leaf, those that the user gets
    whole: Sequence[Tensor] | None = None  # the same where there are no others
    hidden: Sequence[int] = ()  # others that a transform has made: they may be seen in memory that is not the user's
    held: Sequence[Tensor] = ()  # such memory, until they were copied out of it

    unflatten: Unflatten
    leaves: list[Any]  # on the host; emptied when they are not needed any more
    layout: BatchLayout
    staged: Sequence[int] = ()  # which leaves lie in the buffer
    others: dict[int, Any]  # and those that do not
    addresses: array[int] | None = None  # of the leaves, where their bytes can be copied as they are


class Destination(Protocol):
    """The interface to the device that a batch goes to.

    Attributes:
        context: Of the device.
        copy_stream: Where copies run, and transforms.
        pool: Memory on the device.
    """

    context: DeviceContext
    copy_stream: Stream
    pool: BufferPool

    @property
    def device(self) -> torch.device: ...


def can_be_staged(leaf: Any) -> bool:
    """Return whether the leaf is plain bytes on the host.

    Others (tensor subclasses, sparse, quantized or gradient-tracking tensors, objects with a ``to``) are moved by their
    own ``to`` when they are handed out: right, if not hidden.
    """
    return is_plain(leaf) and leaf.is_cpu and not leaf.requires_grad


def keep_resident(context: DeviceContext, others: dict[int, Any]) -> tuple[StreamMarker, Stream] | None:
    """Copy tensors that the source made on the device, which it may fill again in its next pull; mark where that ends.

    The source has enqueued its work on this thread's current stream. ``None`` if it made none.
    """
    resident = [i for i, leaf in others.items() if isinstance(leaf, Tensor) and leaf.device.type != "cpu"]
    if not resident:
        return None
    for i in resident:
        if is_plain(others[i]) and not others[i].requires_grad:
            others[i] = others[i].clone()
    stream = context.current_stream()
    return StreamMarker(context, stream, timing=False), stream


def apply(transfer: Destination, transform: Transform, pending: DeviceBatch, memories: Sequence[Tensor]) -> None:
    """Run the user's transform on the copy stream, and lend what comes out of it.

    Leaves that are not staged are moved there as well, but for those that require gradients: they would lose what made
    them.
    """
    buffer, copy_stream = pending.buffer, transfer.copy_stream
    assert buffer is not None
    buffer.leaves = buffer.leaves or view_leaves(pending.layout, memories)
    leaves = dict(zip(pending.staged, (leaf.detach() for leaf in buffer.leaves), strict=True))
    foreign = {leaf.untyped_storage().data_ptr() for leaf in pending.others.values() if is_plain(leaf)}
    if pending.made is not None:
        copy_stream.wait_event(pending.made[0].event)
    with transfer.context.on(copy_stream):
        try:
            leaves |= pending.others
            others = pending.others.items()
            moving = {i: leaf for i, leaf in others if not (isinstance(leaf, Tensor) and leaf.requires_grad)}
            leaves |= _move_all(moving, transfer.device, pending.unflatten, len(leaves))
            batch = transform(pending.unflatten([leaves[i] for i in range(len(leaves))]))
            made, pending.unflatten = flatten_batch(batch)
            made = [as_tensor(leaf) for leaf in made]
            made = [leaf.resolve_conj().resolve_neg() if is_plain(leaf) else leaf for leaf in made]
        finally:
            if pending.copy is not None:
                pending.copy[1].event.record(copy_stream)
            buffer.copied.record(copy_stream)
            if pending.made is not None:  # WAR: what the source made is dropped here, and its memory goes home
                pending.made[1].wait_event(buffer.copied)
    _lend(transfer, pending, made, foreign, memories)


def _lend(
    transfer: Destination,
    pending: DeviceBatch,
    made: Sequence[Any],
    foreign: Set[int],
    memories: Sequence[Tensor],
) -> None:
    """Lend what a transform has returned, but for tensors in storages that are not to be lent.

    What is no plain tensor (subclasses, sparse ones, objects) cannot be lent, and is copied when it is handed out.
    """
    buffer, home, pool = pending.buffer, transfer.copy_stream, transfer.pool
    assert buffer is not None
    # Not those of objects, which the transform may have changed.
    given = {id(leaf) for leaf in pending.others.values() if isinstance(leaf, Tensor)}
    pending.others = others = {}
    found: dict[int, list[int]] = {}  # by storage, the results that lie there
    for i, leaf in enumerate(made):
        lies_here = is_plain(leaf) and leaf.device == transfer.device
        storage = leaf.untyped_storage() if lies_here else None
        if storage is not None and storage.nbytes() and storage.data_ptr() not in foreign:
            found.setdefault(storage.data_ptr(), []).append(i)
        else:
            others[i] = leaf
    pending.hidden = [
        i for i, leaf in others.items() if id(leaf) not in given and _may_hide_memory(leaf, transfer.device)
    ]
    own = {memory.data_ptr(): number for number, memory in enumerate(memories)}
    lent = [own[pointer] for pointer in found if pointer in own]
    held = [number for number in range(len(memories)) if number not in lent] if pending.hidden else []
    pending.lease = lease = pool.lend(buffer, lent + held)
    pending.held = [pool.lend_bytes(lease, number) for number in held]
    if lease.is_back():
        pool.give_back(buffer)
    pending.tensors = tensors = {}
    for pointer, together in found.items():
        number, leaf = own.get(pointer), made[together[0]]
        if number is None and len(together) == 1:
            tensors[together[0]] = pool.lend_other(lease, leaf.detach(), home)  # without what made it
            continue
        memory = pool.lend_other(lease, whole_storage(leaf), home) if number is None else pool.lend_bytes(lease, number)
        tensors |= {i: see_alike(memory, made[i]) for i in together}


def complete(transfer: Destination, pending: DeviceBatch, stream: Stream) -> Any:
    """Make the batch of what was staged and of what was not, for the consumer's stream."""
    tensors: dict[int, Any] = dict(pending.tensors or {})
    if pending.made is not None:
        tensors |= _take_over(pending, pending.made, stream, transfer.context)
    others = pending.others.items()
    moving = {i: _copy(leaf) if i in pending.hidden else leaf for i, leaf in others if i not in tensors}
    tensors |= _move_all(moving, transfer.device, pending.unflatten, len(tensors) + len(moving))
    if pending.hidden:
        # WAR: what the transform has made is in memory of the copy stream, or seen in the buffer.
        marker = StreamMarker(transfer.context, stream, timing=False)  # others get its event when it is gone
        transfer.copy_stream.wait_event(marker.event)
    return pending.unflatten([tensors[i] for i in range(len(tensors))])


def _take_over(
    pending: DeviceBatch, made: tuple[StreamMarker, Stream], stream: Stream, context: DeviceContext
) -> dict[int, Tensor]:
    """Make tensors that the source made on the device the property of the consumer's stream.

    Handed out as they are, they would go back to the source's stream when the user drops them, and be overwritten
    there under the user's kernels. So they are copied, on the device, into memory of the consumer's stream.
    """
    marker, source_stream = made
    stream.wait_event(marker.event)  # RAW: what the source computed on the device
    if source_stream == stream:
        return {}
    resident = {
        i: leaf.clone()
        for i, leaf in pending.others.items()
        if isinstance(leaf, Tensor) and leaf.device == context.torch_device
    }
    # WAR: the source's stream may use that memory again only when it was read.
    marker = StreamMarker(context, stream, timing=False)
    source_stream.wait_event(marker.event)
    return resident


def _may_hide_memory(leaf: Any, device: torch.device) -> bool:
    return not is_plain(leaf) and (not isinstance(leaf, Tensor) or leaf.device == device)


def _copy(leaf: Any) -> Any:
    """The same in memory of the current stream, without what made it."""
    if not isinstance(leaf, Tensor):
        return copy.deepcopy(leaf)
    made = leaf.detach().clone()
    if type(made) is not type(leaf):
        made = made.as_subclass(type(leaf))
    made.__dict__.update(copy.deepcopy(leaf.__dict__))
    return made


def _move_all(leaves: dict[int, Any], device: torch.device, unflatten: Unflatten, count: int) -> dict[int, Any]:
    """Move some leaves of a batch, which has so many in all, by their own ``to``; an error says which."""
    moved = {}
    for i, leaf in leaves.items():
        try:
            moved[i] = _move(leaf, device)
        except Exception as error:
            with suppress(Exception):  # of types that users have registered
                name = name_leaf(unflatten([torch.empty(0, device="cpu")] * count), i)
                error.add_note(f"Raised when {name} was moved to {device} by its own ``to``.")
            raise
    return moved


def _move(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device)  # itself, when it is there
    leaf = copy.copy(leaf)  # its ``to`` may move it in place, and the source may have it for another batch or device
    try:
        return leaf.to(device, non_blocking=True)
    except TypeError:
        return leaf.to(device)
