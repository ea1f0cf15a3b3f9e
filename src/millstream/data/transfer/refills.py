"""A source on the CPU that yields memory again which it has yielded before, so that pulls overwrite earlier batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from millstream.data.transfer.layout import extent_bytes
from millstream.tree import as_tensor, tree_flatten


class RefillWatch:
    """Notices a source that yields memory again which it has yielded before, and copies its batches then.

    The first pulls of a pass are remembered as long as it takes for every buffer to come round once; no batch can have
    been overwritten by then that the loop may still use, since the first two are pulled in step. Windows of one tensor
    that overlap are no refills as long as what they show does not change.

    Args:
        look_back: How many batches may be pulled and not done with.

    Attributes:
        refills: Whether it was seen to do so.
        is_watching: Whether batches are still to be looked at, or copied.
    """

    def __init__(self, look_back: int) -> None:
        self._look_back = look_back
        self.refills = False
        self.is_watching = True
        self._seen: list[list[_Seen]] = []

    def begin_pass(self) -> RefillWatch:
        """A new pass: sources may yield the same memory in each."""
        self._seen, self.is_watching = [], True
        return self

    def look(self, batch: Any) -> bool:
        """Whether this batch is the first that shares memory with one before."""
        leaves = [_Seen(*found) for found in enumerate(_tensors(batch))]
        self.refills = any(leaf.refills(before) for leaf in leaves for seen in self._seen for before in seen)
        self._seen.append(leaves)
        self.is_watching = self.refills or len(self._seen) <= self._look_back
        if self.refills or not self.is_watching:
            self._seen = []
        return self.refills


class _Seen:
    """A leaf of one of the first batches, kept alive so that no address means two things.

    Args:
        index: Which leaf of its batch.
        leaf: The tensor.
    """

    def __init__(self, index: int, leaf: Tensor) -> None:
        self.index, self.leaf = index, leaf
        self.start, self.end = _span(leaf)
        self.storage, size = None, 0
        if self.end:
            storage = leaf.untyped_storage()
            self.storage, size = storage.data_ptr(), storage.nbytes()
        self.was = leaf.detach().clone() if size > leaf.nbytes else None  # of a window, what it showed

    def refills(self, before: _Seen) -> bool:
        """Whether this one's memory is that of an earlier one, filled anew."""
        if self.start >= before.end or before.start >= self.end:
            return False
        if self.storage != before.storage or (self.index, self.start) == (before.index, before.start):
            return True
        return before.was is None or not torch.equal(_bytes(before.leaf), _bytes(before.was))


def _tensors(batch: Any) -> list[Any]:
    return [leaf for leaf in map(as_tensor, tree_flatten(batch)[0]) if isinstance(leaf, Tensor)]


def _bytes(leaf: Tensor) -> Tensor:
    return leaf.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _span(leaf: Tensor) -> tuple[int, int]:
    if leaf.layout is not torch.strided or leaf.is_nested or not leaf.is_cpu or not leaf.numel():
        return 0, 0
    start = leaf.data_ptr()
    return start, start + extent_bytes(leaf.dtype, tuple(leaf.size()), leaf.stride())


def copy_batch(batch: Any) -> Any:
    """The same batch in memory of its own."""
    leaves, unflatten = tree_flatten(batch)
    return unflatten([_copy(as_tensor(leaf)) for leaf in leaves])


def _copy(leaf: Any) -> Any:
    is_plain = isinstance(leaf, Tensor) and not leaf.requires_grad
    return leaf.clone() if is_plain else leaf
