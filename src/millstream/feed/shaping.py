"""What is done to whole batches: short ones padded or left out, dtypes cast, batches split for several devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from millstream.feed.lane import Transform
from millstream.feed.structure import as_tensor, split


def count_rows(batch: Any) -> int | None:
    """Length of the first dimension of the first tensor or array that has one; ``None`` if there is none."""
    for leaf in split(batch)[0]:
        shape: Any = getattr(leaf, "shape", ())
        if len(shape):
            return int(shape[0])
    return None


def pad_rows(batch: Any, rows: int, full: int) -> Any:
    """Lengthen every tensor of ``rows`` rows to ``full`` by repeating its last one, which is valid data."""
    leaves, rebuild = split(batch)

    def pad(leaf: Any) -> Any:
        tensor = as_tensor(leaf)
        if not isinstance(tensor, Tensor) or not tensor.dim() or len(tensor) != rows or not rows:
            return leaf
        return torch.cat([tensor, tensor[-1:].expand(full - rows, *tensor.shape[1:])])

    return rebuild([pad(leaf) for leaf in leaves])


def share_rows(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into parts of (nearly) equally many rows, the longer ones first; what has no such rows goes to all.

    With fewer rows than parts, the last parts have none.
    """
    rows = count_rows(batch)
    pieces: list[list[Any]] = []
    for leaf in split(batch)[0]:
        tensor = as_tensor(leaf)
        if isinstance(tensor, Tensor) and tensor.dim() and len(tensor) == rows:
            pieces.append(list(torch.tensor_split(tensor, parts)))
        else:
            pieces.append([leaf] * parts)
    return [split(batch)[1]([piece[i] for piece in pieces]) for i in range(parts)]


def deal(batches: Iterator[Any], parts: int) -> Iterator[list[Any]]:
    """Take ``parts`` batches at a time; the last time perhaps fewer."""
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        del batch
        if len(group) == parts:
            yield group
            group = []
    if group:
        yield group


def make_transform(cast: torch.dtype | None, channels_last: bool, transform: Transform | None) -> Transform | None:
    """One function for all that is done to a batch on the device; ``None`` when that is nothing.

    Args:
        cast: What floating tensors become.
        channels_last: Whether tensors of four dimensions get that layout.
        transform: What the user does after that.
    """
    if cast is None and not channels_last:
        return transform

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return leaf
        dtype = cast if cast is not None and leaf.is_floating_point() else leaf.dtype
        layout = torch.channels_last if channels_last and leaf.dim() == 4 else torch.preserve_format
        return leaf.to(dtype=dtype, memory_format=layout)

    def apply(batch: Any) -> Any:
        leaves, rebuild = split(batch)
        batch = rebuild([convert(leaf) for leaf in leaves])
        return batch if transform is None else transform(batch)

    return apply
