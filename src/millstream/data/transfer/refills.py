"""A source on the CPU that yields memory again which it has yielded before, so that pulls overwrite earlier batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from millstream.data.transfer.batch_layout import extent_bytes, is_plain, narrow_repeats
from millstream.tree.arrays import as_tensor
from millstream.tree.batches import flatten_batch

MAX_SPREAD = 4
"""A tensor that spans more than so many times its own bytes gets other strides when it is copied."""


class RefillWatch:
    """Notices a source that yields memory again which it has yielded before, and copies its batches then.

    The first pulls of a pass are remembered as long as it takes for every buffer to come round once. Until that is over
    for the first time batches are copied, too: the loop may keep them, and when one comes again it is too late.

    Args:
        look_back: How many batches may be pulled and not done with.

    Attributes:
        refills: Whether it was seen to do so.
        copies: Whether its batches are to be copied: it refills, or that is not known.
        is_watching: Whether batches are still to be looked at, or copied.
    """

    def __init__(self, look_back: int) -> None:
        self._look_back = look_back
        self.refills = False
        self.copies = self.is_watching = True
        self._seen: list[tuple[list[Tensor], list[tuple[int, int]]]] = []  # alive, so that no address means two things

    def begin_pass(self) -> RefillWatch:
        """A new pass: sources may yield the same memory in each."""
        self._seen, self.is_watching = [], True
        return self

    def look(self, batch: Any) -> bool:
        """Return whether this batch is the first that shares memory with one before."""
        leaves = _tensors(batch)
        spans = [_span(leaf) for leaf in leaves]
        before = [span for _, seen in self._seen for span in seen]
        self.refills = any(start < last and first < end for start, end in spans for first, last in before)
        self._seen.append((leaves, spans))
        self.is_watching = self.refills or len(self._seen) <= self._look_back
        self.copies = self.refills or (self.copies and self.is_watching)
        if self.refills or not self.is_watching:
            self._seen = []
        return self.refills


def _tensors(batch: Any) -> list[Any]:
    return [leaf for leaf in map(as_tensor, flatten_batch(batch)[0]) if isinstance(leaf, Tensor)]


def _span(leaf: Tensor) -> tuple[int, int]:
    if not (is_plain(leaf) and leaf.is_cpu and leaf.numel()):
        return 0, 0
    start = leaf.data_ptr()
    return start, start + extent_bytes(leaf.dtype, tuple(leaf.size()), leaf.stride())


def copy_batch(batch: Any) -> Any:
    """The same batch in memory of its own."""
    leaves, unflatten = flatten_batch(batch)
    return unflatten([_copy(as_tensor(leaf)) for leaf in leaves])


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.requires_grad:
        return leaf
    if not is_plain(leaf):
        return leaf.clone()
    # With the same strides, so that a compiled step serves the batches that are not copied, too.
    once = narrow_repeats(leaf)
    if _overlaps(once) or extent_bytes(once.dtype, tuple(once.size()), once.stride()) > MAX_SPREAD * once.nbytes:
        return leaf.clone()
    new = torch.empty_strided(once.size(), once.stride(), dtype=once.dtype, device=once.device)
    return new.copy_(once).expand(leaf.size())


def _overlaps(leaf: Tensor) -> bool:
    """Return whether elements may share memory."""
    end = 0
    for stride, size in sorted(zip(leaf.stride(), leaf.size(), strict=True)):
        if size > 1:
            if stride <= end:
                return True
            end += stride * (size - 1)
    return False
