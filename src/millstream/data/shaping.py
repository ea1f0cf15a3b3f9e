"""Shape whole batches: pad lengths, pad short ones, cast dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from millstream.data.lengths import Lengths
from millstream.data.sources.position import Position
from millstream.data.transfer.transfer import Transform
from millstream.errors import ArgumentError, FeedError
from millstream.tree.arrays import as_tensor
from millstream.tree.batches import Unflatten, find_name, flatten_batch


class Shaper:
    """Makes all batches of as many rows as the first which has any, and their sequences of few lengths.

    Args:
        pad_last: Lengthen those with fewer rows.
        lengths: Pads sequences.
    """

    def __init__(self, *, pad_last: bool, lengths: Lengths) -> None:
        self._pads_last, self._lengths = pad_last, lengths
        self.is_needed = pad_last or lengths.is_needed

    def shape(self, position: Position, batch: Any) -> tuple[Any, int | None]:
        """Return what is to become of a batch, and how many of its rows are data, if it has any.

        Args:
            position: Remembers what a full batch has.
            batch: It.
        """
        batch = self._lengths.pad(batch)
        if not self._pads_last or (rows := count_rows(batch)) is None:
            return batch, None
        if not position.rows:  # a batch without any tells nothing
            position.rows, position.rowed = rows, have_rows(batch, rows)
        full = position.rows
        return batch if rows >= full else pad_rows(batch, rows, full, position.rowed), rows


def count_rows(batch: Any) -> int | None:
    """Length of the first dimension of the first tensor or array that has one; ``None`` if there is none.

    Of packed sequences and jagged tensors, it is the number of sequences.
    """
    leaves = (leaf for leaf in _split(batch)[0] if type(leaf) not in (list, tuple))
    return next((rows for leaf in leaves if (rows := _count(leaf)) is not None), None)


def have_rows(batch: Any, rows: int) -> tuple[bool, ...]:
    """Of each leaf of a full batch, and each list that has an item for each row, whether it has so many.

    Others may have as many as a short batch by chance: weights of three classes, beside the last three images.
    """
    return tuple(_count(leaf) == rows for leaf in _split(batch, rows)[0])


def _count(leaf: Any) -> int | None:
    if type(leaf) in (list, tuple):
        return len(leaf)
    if _is_of_sequences(leaf):
        return int(leaf.batch_sizes[0]) if isinstance(leaf, PackedSequence) else leaf.size(0)
    shape: Any = getattr(leaf, "shape", ())
    return int(shape[0]) if len(shape) else None


def pad_rows(batch: Any, rows: int, full: int, rowed: Sequence[bool] | None = None) -> Any:
    """Lengthen what has ``rows`` rows to ``full`` by repeating the last one, which is valid data.

    Args:
        batch: It.
        rows: That it has.
        full: That it is to have.
        rowed: What ``have_rows`` says of a full batch. Without, or if that has another structure: all with ``rows``.

    Raises:
        FeedError: Packed sequences, jagged or sparse tensors have these rows.
    """
    leaves, unflatten = _split_like(batch, rows, rowed)
    padded = []
    for leaf, is_rowed in zip(leaves, _fit(rowed, leaves), strict=True):
        needs_rows = is_rowed and rows > 0 and _count(leaf) == rows
        if needs_rows and (_is_of_sequences(leaf) or (isinstance(leaf, Tensor) and leaf.layout is not torch.strided)):
            kind = type(leaf).__name__ if _is_of_sequences(leaf) else f"tensor of the layout {leaf.layout}"
            raise FeedError(f"{find_name(batch, leaf)} is a {kind}, which cannot be padded; pad it in the source.")
        padded.append(_pad(leaf, full - rows) if needs_rows else leaf)
    return unflatten(padded)


def _pad(leaf: Any, missing: int) -> Any:
    if type(leaf) in (list, tuple):
        return leaf + leaf[-1:] * missing
    tensor = as_tensor(leaf)
    return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])]) if isinstance(tensor, Tensor) else leaf


def _fit(rowed: Sequence[bool] | None, leaves: Sequence[Any]) -> Sequence[bool]:
    return rowed if rowed is not None and len(rowed) == len(leaves) else [True] * len(leaves)


def _split_like(batch: Any, rows: int | None, rowed: Sequence[bool] | None) -> tuple[list[Any], Unflatten]:
    """The leaves that a full batch has, too, if they can be told: a list may have as many items as rows by chance."""
    found = _split(batch, rows)
    if rowed is not None and len(found[0]) != len(rowed):
        others = _split(batch)
        return others if len(others[0]) == len(rowed) else found
    return found


def _split(batch: Any, rows: int | None = None) -> tuple[list[Any], Unflatten]:
    """The leaves that have rows: those that a packed sequence is made of have steps.

    A list of plain values is one, too, and with ``rows`` a list or tuple that has an item for each row.
    """

    def is_whole(node: Any) -> bool:
        if type(node) not in (list, tuple) or node is batch:
            return _is_of_sequences(node)
        return all(isinstance(each, _PLAIN) for each in node) or (rows is not None and _is_by_row(node, rows))

    return flatten_batch(batch, is_whole=is_whole)


_PLAIN = (str, bytes, int, float, complex, type(None))


def _is_by_row(node: Any, rows: int) -> bool:
    """Return whether a list has an item for each row, and is not one of columns that by chance are as many."""
    return len(node) == rows and not all(getattr(each, "shape", ())[:1] == (rows,) for each in node)


def _is_of_sequences(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence) or (isinstance(leaf, Tensor) and leaf.is_nested)


# --- how many rows are data ------------------------------------------------------------------------------------------

_NUM_VALID = "_num_valid"


def set_num_valid(batch: Any, num_valid: int) -> None:
    """Note in the tensors of a delivered batch how many of its rows are data."""
    for leaf in flatten_batch(batch)[0]:
        if isinstance(leaf, Tensor):
            setattr(leaf, _NUM_VALID, num_valid)


def num_valid(batch: Any) -> int | None:
    """Rows of a delivered batch that are data and not padding; ``None`` unless ``pad_last`` was given.

    Args:
        batch: As a feed has delivered it, also one that was kept.
    """
    return next((getattr(leaf, _NUM_VALID) for leaf in flatten_batch(batch)[0] if hasattr(leaf, _NUM_VALID)), None)


# --- on the device ---------------------------------------------------------------------------------------------------


def check_switches(**given: Any) -> None:
    """Check options that are on or off.

    Raises:
        ArgumentError: One of them is something else.
    """
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"{name} is {value!r}; it must be True or False.")


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
    check_switches(channels_last=channels_last)
    if transform is not None and not callable(transform):
        raise ArgumentError(f"transform is {transform!r}; it must be a function of a batch.")
    if cast is None and not channels_last:
        return transform
    return partial(_apply, cast, channels_last, transform)  # of functions of this module: a feed can be pickled


def _apply(cast: torch.dtype | None, channels_last: bool, transform: Transform | None, batch: Any) -> Any:
    leaves, unflatten = flatten_batch(batch)
    batch = unflatten([_convert(leaf, cast, channels_last) for leaf in leaves])
    return batch if transform is None else transform(batch)


def _convert(leaf: Any, cast: torch.dtype | None, channels_last: bool) -> Any:
    if not isinstance(leaf, Tensor) or leaf.is_mkldnn:
        return leaf
    dtype = cast if cast is not None and leaf.is_floating_point() else leaf.dtype
    if leaf.layout is not torch.strided:
        return leaf.to(dtype=dtype)
    layout = torch.channels_last if channels_last and leaf.dim() == 4 else torch.preserve_format
    return leaf.to(dtype=dtype, memory_format=layout)
