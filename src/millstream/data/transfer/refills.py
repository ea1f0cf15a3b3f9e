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
    been overwritten by then that the loop may still use, since the first two are pulled in step.

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
        self._seen: list[tuple[list[Tensor], list[tuple[int, int]]]] = []  # alive, so that no address means two things

    def begin_pass(self) -> RefillWatch:
        """A new pass: sources may yield the same memory in each."""
        self._seen, self.is_watching = [], True
        return self

    def look(self, batch: Any) -> bool:
        """Whether this batch is the first that shares memory with one before."""
        leaves = _tensors(batch)
        spans = [_span(leaf) for leaf in leaves]
        before = [span for _, seen in self._seen for span in seen]
        self.refills = any(start < last and first < end for start, end in spans for first, last in before)
        self._seen.append((leaves, spans))
        self.is_watching = self.refills or len(self._seen) <= self._look_back
        if self.refills or not self.is_watching:
            self._seen = []
        return self.refills


def _tensors(batch: Any) -> list[Any]:
    return [leaf for leaf in map(as_tensor, tree_flatten(batch)[0]) if isinstance(leaf, Tensor)]


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
