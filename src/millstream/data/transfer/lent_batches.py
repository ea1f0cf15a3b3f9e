"""The tensors of a batch over a buffer's memory, made in compiled code: see ``_native/batches.cpp``.

Without compiled code, PyTorch's own ways make them, each in several steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from millstream import _native
from millstream._torch.tensors import place_of_implementation
from millstream.data.transfer.batch_layout import BatchLayout

Lend = Callable[[object, list[Any]], None]
"""Given an owner of a segment's memory, puts the leaves in it among those of a batch. They keep the owner."""


def prepare_lending(layout: BatchLayout, memories: Sequence[Tensor]) -> Sequence[Lend]:
    """Return what lends each segment of a layout; empty where there is no compiled code. It keeps no memory alive.

    Args:
        layout: Of the batches.
        memories: Of the segments.
    """
    tensors, place = _native.load("tensors"), place_of_implementation()
    if tensors is None or place is None:
        return ()
    leaves: list[list[tuple[Any, ...]]] = [[] for _ in memories]
    ends = [0] * len(memories)
    for i, (typed, size, stride, first) in enumerate(layout.views):
        segment, dtype = layout.typed[typed]
        leaves[segment].append((i, torch.empty(0, dtype=dtype, device="cpu"), tuple(size), tuple(stride), first))
        ends[segment] = max(ends[segment], layout.position[i][1] + layout.specs[i].num_bytes)
    return [
        functools.partial(
            tensors.lend_segment,
            tensors.prepare_segment(memory.data_ptr(), end, memory.get_device(), place, those),
        )
        for memory, end, those in zip(memories, ends, leaves, strict=True)
    ]
