"""The layout of a batch in a buffer, and what is copied together.

Leaves are packed into one stretch of pinned memory. Small ones share a *segment*, which one copy carries into one
allocation on the device; each larger leaf is a segment of its own. The line between them serves the user who keeps the
labels of every batch: they must not keep the images with them.

Memory that leaves share is sent once: an expanded tensor without its repetitions, and tensors that overlap in one
storage as the stretch that they cover. On the device they share it again.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from millstream._torch.tensors import reinterpret

ALIGNMENT_BYTES = 256
"""Each leaf starts on this boundary: what CUDA allocations guarantee, and more than any dtype asks for."""

SMALL_LEAF_BYTES = 64 << 10
"""Below this a copy is mostly its fixed cost (64 KiB cross PCIe 5 at 14 GB/s, 1 MiB at 46), so that leaves share one;
and ten leaves that one of them keeps alive cost the user less than a megabyte."""


class LeafSpec(NamedTuple):
    """The form of a tensor, and its offset in its piece.

    Attributes:
        dtype: Its type.
        size: Its sizes.
        stride: Its strides in elements; 0 where it repeats its memory.
        piece: Number of the piece of memory that it lies in; leaves that share memory lie in the same one.
        offset: First byte in the piece.
        num_bytes: Bytes from its first element to the end of its last.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    piece: int
    offset: int
    num_bytes: int


class CopySegment(NamedTuple):
    """A range of the buffer that one copy carries into one allocation on the device.

    Attributes:
        start: First byte in the buffer.
        num_bytes: Length.
    """

    start: int
    num_bytes: int


class Chunk(NamedTuple):
    """A range of the buffer that is staged and sent by itself.

    Attributes:
        num_bytes: Its length.
        sources: What it has of the layout's sources: number, first byte in the source, first byte here, and length.
        copies: What it has of the segments, in the same form.
    """

    num_bytes: int
    sources: tuple[tuple[int, int, int, int], ...]
    copies: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, eq=False)
class BatchLayout:
    """The layout of a batch's leaves. Successive batches of one form share one object: compare by identity.

    Attributes:
        specs: What each leaf looks like.
        segments: What is copied together; segments do not overlap.
        position: For each leaf its segment and its first byte in it.
        sources: For each piece the leaf that it starts with, and its length in bytes.
        shared: Those of the leaves in ``sources`` whose piece holds others, too, so that it is copied byte by byte.
        num_bytes: Length of the buffer.
        typed: Segments and the dtypes that they are seen as.
        views: For each leaf its place in ``typed``, its sizes and strides, and its first element.
    """

    specs: tuple[LeafSpec, ...]
    segments: tuple[CopySegment, ...]
    position: tuple[tuple[int, int], ...]
    sources: tuple[tuple[int, int], ...]
    shared: frozenset[int]
    num_bytes: int
    typed: tuple[tuple[int, torch.dtype], ...]
    views: tuple[tuple[int, tuple[int, ...], tuple[int, ...], int], ...]


def describe_leaves(leaves: Sequence[Tensor]) -> tuple[LeafSpec, ...]:
    """Say how plain host tensors will look on the device, and which of them share memory there."""
    storages = [leaf.untyped_storage().data_ptr() for leaf in leaves]
    return describe_apart(leaves) if len(set(storages)) == len(storages) else _describe_aliases(leaves, storages)


def describe_apart(leaves: Sequence[Tensor]) -> tuple[LeafSpec, ...]:
    """The same for tensors that are not to share memory."""
    return tuple(_describe(leaf, piece) for piece, leaf in enumerate(leaves))


def plan_layout(specs: Sequence[LeafSpec]) -> BatchLayout:
    """Give each piece a place: small ones share a segment, every other has its own.

    Args:
        specs: The leaves, in the order of the batch.
    """
    size_of: dict[int, int] = {}
    for spec in specs:
        size_of[spec.piece] = max(size_of.get(spec.piece, 0), spec.offset + spec.num_bytes)
    small = [piece for piece, num_bytes in size_of.items() if num_bytes < SMALL_LEAF_BYTES]
    groups = [small] if small else []
    groups += [[piece] for piece, num_bytes in size_of.items() if num_bytes >= SMALL_LEAF_BYTES]
    segments: list[CopySegment] = []
    place: dict[int, tuple[int, int]] = {}
    start = 0
    for group in groups:
        end = start
        for piece in group:
            place[piece] = (len(segments), end - start)
            end = _align(end + max(size_of[piece], 1))  # memory of no bytes has no address
        segments.append(CopySegment(start, end - start))
        start = end
    position = tuple((place[spec.piece][0], place[spec.piece][1] + spec.offset) for spec in specs)
    first = {spec.piece: i for i, spec in reversed(list(enumerate(specs))) if spec.offset == 0}
    sources = tuple((first[piece], num_bytes) for piece, num_bytes in size_of.items())
    leaves_of = Counter(spec.piece for spec in specs)
    shared = frozenset(i for piece, i in first.items() if leaves_of[piece] > 1)
    typed: dict[tuple[int, torch.dtype], int] = {}
    views = tuple(
        (typed.setdefault((segment, spec.dtype), len(typed)), spec.size, spec.stride, first // spec.dtype.itemsize)
        for (segment, first), spec in zip(position, specs, strict=True)
    )
    return BatchLayout(tuple(specs), tuple(segments), position, sources, shared, start, tuple(typed), views)


def cut(layout: BatchLayout, most_bytes: int) -> tuple[Chunk, ...]:
    """Divide a layout into chunks of about one length, and of no more than ``most_bytes`` if that is aligned."""
    starts = [
        layout.segments[segment].start + start for segment, start in (layout.position[i] for i, _ in layout.sources)
    ]
    sources = [(start, num_bytes) for start, (_, num_bytes) in zip(starts, layout.sources, strict=True)]
    num_chunks = max(-(-layout.num_bytes // most_bytes), 1)
    length = max(_align(-(-layout.num_bytes // num_chunks)), 1)
    bounds = [(start, min(start + length, layout.num_bytes)) for start in range(0, max(layout.num_bytes, 1), length)]
    return tuple(
        Chunk(end - start, tuple(_overlaps(sources, start, end)), tuple(_overlaps(layout.segments, start, end)))
        for start, end in bounds
    )


def _overlaps(ranges: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield which ranges, given by first byte and length, reach into another: number, where in both, and how far."""
    for number, (first, num_bytes) in enumerate(ranges):
        low, high = max(first, start), min(first + num_bytes, end)
        if low < high or start <= first == high:  # an empty one, too
            yield number, low - first, low - start, high - low


def view_leaves(layout: BatchLayout, segments: Sequence[Tensor]) -> list[Tensor]:
    """See the memory of a layout's segments as its leaves.

    They are not views in the sense of autograd: each has its own version counter, so that writing into one leaf does
    not make autograd believe that its neighbours changed.

    Args:
        layout: What to see there.
        segments: For each segment a uint8 tensor of one dimension that starts with it, its length a multiple of
            ``ALIGNMENT_BYTES``.
    """
    typed = [segments[segment].view(dtype) for segment, dtype in layout.typed]
    return [reinterpret(typed[k], size, stride, first) for k, size, stride, first in layout.views]


def view_leaf(memory: Tensor, start: int, spec: LeafSpec) -> Tensor:
    """See bytes of a uint8 tensor, from ``start`` on, as one leaf."""
    return reinterpret(memory.view(spec.dtype), spec.size, spec.stride, start // spec.dtype.itemsize)


def see_source(leaf: Tensor, num_bytes: int) -> Tensor:
    """The bytes of host memory from the first element of a leaf on, whether or not all of them are of its storage."""
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(leaf.data_ptr()), dtype=torch.uint8)


def is_plain(leaf: Any) -> bool:
    """Return whether it is a tensor that is all said by its bytes, dtype, sizes and strides."""
    return type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_nested


def narrow_repeats(tensor: Tensor) -> Tensor:
    """A view of ``tensor`` without the repetitions of its expanded dimensions."""
    if 0 not in tensor.stride() or 0 in tensor.size():
        return tensor
    size = [1 if stride == 0 else size for size, stride in zip(tensor.size(), tensor.stride(), strict=True)]
    return tensor.as_strided(size, tensor.stride())


def _describe(leaf: Tensor, piece: int) -> LeafSpec:
    """A leaf by itself: as ``leaf.to(device)`` would make it, but for its repetitions.

    The strides of a dense tensor (contiguous, channels last, transposed, ...) are kept; a sliced one becomes dense in
    the same order of dimensions.
    """
    size, stride = leaf.size(), leaf.stride()
    if leaf.is_contiguous():  # nearly always, and there may be hundreds
        return LeafSpec(leaf.dtype, size, stride, piece, 0, leaf.nbytes)
    dense = torch.empty_like(narrow_repeats(leaf), device="meta").stride()
    repeats = [old == 0 and length > 1 for old, length in zip(stride, size, strict=True)]
    stride = tuple(0 if repeat else new for repeat, new in zip(repeats, dense, strict=True))
    return LeafSpec(leaf.dtype, size, stride, piece, 0, extent_bytes(leaf.dtype, size, stride))


def _describe_aliases(leaves: Sequence[Tensor], storages: Sequence[int]) -> tuple[LeafSpec, ...]:
    """Leaves of which some have a storage in common.

    Those that overlap travel as the stretch that they cover, if that is no longer than all of them.
    """
    spans = []
    for i, leaf in enumerate(leaves):
        start = int(leaf.storage_offset()) * leaf.element_size()
        spans.append((storages[i], start, start + extent_bytes(leaf.dtype, tuple(leaf.size()), leaf.stride()), i))
    groups: list[list[int]] = []
    ends = (-1, -1)
    for storage, start, end, i in sorted(spans):
        if groups and storage == ends[0] and start < ends[1]:
            groups[-1].append(i)
            ends = storage, max(ends[1], end)
        else:
            groups.append([i])
            ends = storage, end
    specs: dict[int, LeafSpec] = {}
    for group in groups:
        start, end = min(spans[i][1] for i in group), max(spans[i][2] for i in group)
        alone = [_describe(leaves[i], i) for i in group]
        exact = all(not (leaves[i].is_conj() or leaves[i].is_neg()) for i in group)
        aligned = all((spans[i][1] - start) % leaves[i].element_size() == 0 for i in group)
        if len(group) == 1 or end - start > sum(spec.num_bytes for spec in alone) or not (exact and aligned):
            specs.update(zip(group, alone, strict=True))
            continue
        for i in group:
            leaf, offset = leaves[i], spans[i][1] - start
            length = spans[i][2] - spans[i][1]
            specs[i] = LeafSpec(leaf.dtype, tuple(leaf.size()), leaf.stride(), group[0], offset, length)
    return tuple(specs[i] for i in range(len(leaves)))


def extent_bytes(dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    if 0 in size:
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))) * dtype.itemsize


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
