"""What is done to whole batches: short ones padded or left out, dtypes cast, batches split for several devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    return next((rows for leaf in _split(batch)[0] if (rows := _count(leaf)) is not None), None)


def have_rows(batch: Any, rows: int) -> tuple[bool, ...]:
    """Of each leaf of a full batch, whether it has so many rows.

    Others may have as many as a short batch by chance: weights of three classes, beside the last three images.
    """
    return tuple(_count(leaf) == rows for leaf in _split(batch)[0])


def _count(leaf: Any) -> int | None:
    if _is_of_sequences(leaf):
        return int(leaf.batch_sizes[0]) if isinstance(leaf, PackedSequence) else leaf.size(0)
    shape: Any = getattr(leaf, "shape", ())
    return int(shape[0]) if len(shape) else None


def pad_rows(batch: Any, rows: int, full: int, rowed: Sequence[bool] | None = None) -> Any:
    """Lengthen tensors of ``rows`` rows to ``full`` by repeating the last one, which is valid data.

    Args:
        batch: It.
        rows: That it has.
        full: That it is to have.
        rowed: What ``have_rows`` says of a full batch. Without, or if that has another structure: all with ``rows``.

    Raises:
        FeedError: There are packed sequences or jagged tensors.
    """
    leaves, rebuild = _split(batch)
    return rebuild([_pad(leaf, rows, full, of) for leaf, of in zip(leaves, _fit(rowed, leaves), strict=True)])


def _pad(leaf: Any, rows: int, full: int, is_rowed: bool) -> Any:
    tensor = _see_rows(leaf, "padded", "pad it in the source")
    if tensor is None or len(tensor) != rows or not rows or not is_rowed:
        return leaf
    return torch.cat([tensor, tensor[-1:].expand(full - rows, *tensor.shape[1:])])


def _fit(rowed: Sequence[bool] | None, leaves: Sequence[Any]) -> Sequence[bool]:
    return rowed if rowed is not None and len(rowed) == len(leaves) else [True] * len(leaves)


def make_sharing(parts: int) -> Callable[[Any], list[Any]]:
    """Return what cuts one batch after another, see ``share_rows``; the first one says what has rows."""
    rowed: Sequence[bool] | None = None

    def share(batch: Any) -> list[Any]:
        nonlocal rowed
        if rowed is None and (rows := count_rows(batch)) is not None:
            rowed = have_rows(batch, rows)
        return share_rows(batch, parts, rowed)

    return share


def share_rows(batch: Any, parts: int, rowed: Sequence[bool] | None = None) -> list[Any]:
    """Cut a batch into parts of (nearly) equally many rows, the longer ones first; what has no such rows goes to all.

    With fewer rows than parts, the last parts have none. ``rowed`` as for ``pad_rows``.

    Raises:
        FeedError: There are packed sequences or jagged tensors.
    """
    rows = count_rows(batch)
    pieces: list[list[Any]] = []
    leaves, rebuild = _split(batch)
    for leaf, is_rowed in zip(leaves, _fit(rowed, leaves), strict=True):
        tensor = _see_rows(leaf, "divided among devices", "let deal=True give each device a whole batch")
        if tensor is not None and len(tensor) == rows and is_rowed:
            pieces.append(list(torch.tensor_split(tensor, parts)))
        else:
            pieces.append([leaf] * parts)
    return [rebuild([piece[i] for piece in pieces]) for i in range(parts)]


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
