"""What is done to whole batches: short ones padded or left out, dtypes cast, batches split for several devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from millstream.errors import ArgumentError, FeedError
from millstream.feed.lane import Transform
from millstream.feed.structure import Rebuild, as_tensor, split


def count_rows(batch: Any) -> int | None:
    """Length of the first dimension of the first tensor or array that has one; ``None`` if there is none.

    Of packed sequences and jagged tensors, it is the number of sequences.
    """
    for leaf in _split(batch)[0]:
        if _is_of_sequences(leaf):
            return int(leaf.batch_sizes[0]) if isinstance(leaf, PackedSequence) else leaf.size(0)
        shape: Any = getattr(leaf, "shape", ())
        if len(shape):
            return int(shape[0])
    return None


def pad_rows(batch: Any, rows: int, full: int) -> Any:
    """Lengthen every tensor of ``rows`` rows to ``full`` by repeating its last one, which is valid data.

    Raises:
        FeedError: There are packed sequences or jagged tensors.
    """
    leaves, rebuild = _split(batch)
    return rebuild([_pad(leaf, rows, full) for leaf in leaves])


def _pad(leaf: Any, rows: int, full: int) -> Any:
    tensor = _see_rows(leaf, "padded", "pad it in the source")
    if tensor is None or len(tensor) != rows or not rows:
        return leaf
    return torch.cat([tensor, tensor[-1:].expand(full - rows, *tensor.shape[1:])])


def share_rows(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into parts of (nearly) equally many rows, the longer ones first; what has no such rows goes to all.

    With fewer rows than parts, the last parts have none.

    Raises:
        FeedError: There are packed sequences or jagged tensors.
    """
    rows = count_rows(batch)
    pieces: list[list[Any]] = []
    for leaf in _split(batch)[0]:
        tensor = _see_rows(leaf, "divided among devices", "let deal=True give each device a whole batch")
        if tensor is not None and len(tensor) == rows:
            pieces.append(list(torch.tensor_split(tensor, parts)))
        else:
            pieces.append([leaf] * parts)
    return [_split(batch)[1]([piece[i] for piece in pieces]) for i in range(parts)]


def _split(batch: Any) -> tuple[list[Any], Rebuild]:
    """The leaves that have rows: those that a packed sequence is made of have steps."""
    return split(batch, is_whole=_is_of_sequences)


def _is_of_sequences(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence) or (isinstance(leaf, Tensor) and leaf.is_nested)


def _see_rows(leaf: Any, what: str, instead: str) -> Tensor | None:
    """A leaf as a tensor that has rows; ``None`` if it has none."""
    if _is_of_sequences(leaf) or (isinstance(leaf, Tensor) and leaf.layout is not torch.strided):
        kind = type(leaf).__name__ if _is_of_sequences(leaf) else f"tensor of the layout {leaf.layout}"
        raise FeedError(f"A {kind} cannot be {what}; {instead}.")
    tensor = as_tensor(leaf)
    return tensor if isinstance(tensor, Tensor) and tensor.dim() else None


def deal(batches: Iterator[Any], parts: int, take_state: Callable[[], Any]) -> Iterator[tuple[list[Any], Any]]:
    """Take ``parts`` batches at a time, the last time perhaps fewer, and the source's state behind them.

    That of a source that has ended would be where it begins anew.
    """
    group: list[Any] = []
    state = None
    try:
        for batch in batches:
            group.append(batch)
            del batch
            state = take_state()
            if len(group) == parts:
                yield group, state
                group = []
    except Exception:
        if group:
            yield group, state  # what came before the error
        raise
    if group:
        yield group, state


def make_transform(cast: torch.dtype | None, channels_last: bool, transform: Transform | None) -> Transform | None:
    """One function for all that is done to a batch on the device; ``None`` when that is nothing.

    Args:
        cast: What floating tensors become.
        channels_last: Whether tensors of four dimensions get that layout.
        transform: What the user does after that.

    Raises:
        ArgumentError: One of them is something else.
    """
    if cast is not None and not isinstance(cast, torch.dtype):
        raise ArgumentError(f"cast is {cast!r}; it must be a dtype, such as torch.bfloat16.")
    if transform is not None and not callable(transform):
        raise ArgumentError(f"transform is {transform!r}; it must be a function of a batch.")
    if cast is None and not channels_last:
        return transform
    return partial(_apply, cast, channels_last, transform)  # of functions of this module: a feed can be pickled


def _apply(cast: torch.dtype | None, channels_last: bool, transform: Transform | None, batch: Any) -> Any:
    leaves, rebuild = split(batch)
    batch = rebuild([_convert(leaf, cast, channels_last) for leaf in leaves])
    return batch if transform is None else transform(batch)


def _convert(leaf: Any, cast: torch.dtype | None, channels_last: bool) -> Any:
    if not isinstance(leaf, Tensor) or leaf.is_mkldnn:
        return leaf
    dtype = cast if cast is not None and leaf.is_floating_point() else leaf.dtype
    if leaf.layout is not torch.strided:
        return leaf.to(dtype=dtype)
    layout = torch.channels_last if channels_last and leaf.dim() == 4 else torch.preserve_format
    return leaf.to(dtype=dtype, memory_format=layout)
