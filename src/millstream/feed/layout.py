"""Where each tensor of a batch lies in a staging slot, and what is copied together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT_BYTES = 256
"""Each leaf starts on this boundary: what CUDA allocations guarantee, and more than any dtype asks for."""

SMALL_LEAF_BYTES = 64 << 10
"""Below this a copy is mostly its fixed cost (64 KiB cross PCIe 5 at 14 GB/s, 1 MiB at 46), so small leaves may travel
together."""

MANY_SMALL_LEAVES = 16
"""From this number of small leaves on they travel together. Fewer get an allocation each, as ``tensor.to(device)``
would make: a user who keeps one of them then keeps nothing else, and no two inputs of a model share memory."""


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """What a tensor looks like.

    Attributes:
        dtype: Its type.
        size: Its sizes.
        stride: Its strides in elements; dense (no two elements share memory, no gaps).
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Memory the tensor takes."""
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Parcel:
    """A range of the slot that one copy carries into one allocation on the device.

    Attributes:
        start: First byte in the slot.
        num_bytes: Length.
    """

    start: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the leaves of a batch lie. Successive batches that look alike share one object: compare by identity.

    Attributes:
        specs: What each leaf looks like.
        parcels: What is copied together; parcels do not overlap.
        position: For each leaf its parcel and its first byte in it.
        num_bytes: Length of the slot.
    """

    specs: tuple[LeafSpec, ...]
    parcels: tuple[Parcel, ...]
    position: tuple[tuple[int, int], ...]
    num_bytes: int


def describe_leaf(leaf: Tensor) -> LeafSpec:
    """Say how ``leaf`` will look on the device: as ``leaf.to(device)`` would make it.

    The strides of a dense tensor (contiguous, channels last, transposed, ...) are kept; an expanded or sliced one
    becomes dense in the same order of dimensions.
    """
    stride = leaf.stride() if leaf.is_contiguous() else torch.empty_like(leaf, device="meta").stride()
    return LeafSpec(leaf.dtype, tuple(leaf.size()), stride)


def plan_layout(specs: Sequence[LeafSpec]) -> Layout:
    """Give each leaf a place: many small ones share a parcel, every other has its own.

    Args:
        specs: The leaves, in the order of the batch.
    """
    small = [i for i, spec in enumerate(specs) if spec.num_bytes < SMALL_LEAF_BYTES]
    groups = [small] if len(small) >= MANY_SMALL_LEAVES else [[i] for i in small]
    groups += [[i] for i, spec in enumerate(specs) if spec.num_bytes >= SMALL_LEAF_BYTES]
    parcels: list[Parcel] = []
    position: dict[int, tuple[int, int]] = {}
    start = 0
    for group in groups:
        end = start
        for i in group:
            begin = _align(end)
            position[i] = (len(parcels), begin - start)
            end = begin + specs[i].num_bytes
        parcels.append(Parcel(start, end - start))
        start = _align(end)
    return Layout(tuple(specs), tuple(parcels), tuple(position[i] for i in range(len(specs))), start)


def view_leaf(memory: Tensor, start: int, spec: LeafSpec) -> Tensor:
    """See bytes of ``memory`` as a tensor.

    The result is not a view in the sense of autograd: it has its own version counter, so that writing into one leaf
    does not make autograd believe that its neighbours changed.

    Args:
        memory: A uint8 tensor of one dimension.
        start: First byte in it; a multiple of the dtype's size.
        spec: What to see there.
    """
    offset = (int(memory.storage_offset()) + start) // spec.dtype.itemsize
    empty = torch.empty(0, dtype=spec.dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), offset, spec.size, spec.stride)


def view_leaves(layout: Layout, parcels: Sequence[Tensor]) -> list[Tensor]:
    """See the memory of a layout's parcels as its leaves."""
    return [
        view_leaf(parcels[parcel], start, spec)
        for (parcel, start), spec in zip(layout.position, layout.specs, strict=True)
    ]


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
