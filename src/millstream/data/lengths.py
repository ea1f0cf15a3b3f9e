"""Sequences of many lengths padded to a few: each length is a shape, and each shape a plan, a graph and its memory.

What is padded is told by its form, not by chance: a list within a batch of tensors or arrays that differ in their first
dimension at most, a list of lists of numbers (what a tokenizer returns), a ``PackedSequence``; and under the keys of a
dict for which the user gives values, tensors of rows that have a length in dimension 1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from millstream.errors import ArgumentError, FeedError
from millstream.tree.arrays import as_tensor

Value = float | bool


class Padded(NamedTuple):
    """Sequences of one batch, padded at their ends.

    Attributes:
        values: ``[sequences, padded length, ...]``.
        lengths: ``[sequences]``, int64: how many elements of each are data.
    """

    values: Tensor
    lengths: Tensor

    def mask(self) -> Tensor:
        """``[sequences, padded length]``, bool: true where there are data."""
        return torch.arange(self.values.shape[1], device=self.lengths.device) < self.lengths[:, None]


class Lengths:
    """Pads what is ragged in a batch.

    Args:
        sizes: The lengths to pad to.
        multiple: Or: pad to multiples of this.
        value: What to pad with; for dicts, values by key.

    Raises:
        ArgumentError: One of them is something else.
    """

    def __init__(
        self, sizes: int | Sequence[int] | None, multiple: int | None, value: Value | Mapping[str, Value]
    ) -> None:
        self._sizes = _check_sizes(sizes)
        if multiple is not None and not _is_size(multiple):
            raise ArgumentError(f"pad_multiple is {multiple!r}; it must be an integer of at least 1.")
        if self._sizes and multiple is not None:
            raise ArgumentError("pad_to and pad_multiple exclude each other: lengths are listed, or multiples.")
        values = value.values() if isinstance(value, Mapping) else (value,)
        if not all(isinstance(each, int | float) for each in values):
            raise ArgumentError(f"pad_value is {value!r}; it must be a number, or a dict of numbers by key.")
        self._multiple, self._value = multiple, value
        self.is_needed = bool(self._sizes) or multiple is not None

    def pad(self, batch: Any) -> Any:
        """The batch with its sequences padded; with lengths beside them.

        Raises:
            FeedError: A sequence is longer than the largest length, or sequences of one list differ in more.
        """
        return self._pad_parts(batch, "batch") if self.is_needed else batch

    def _pad_parts(self, node: Any, name: str) -> Any:
        if isinstance(node, Mapping):
            return self._pad_mapping(node, name)
        if type(node) is tuple or type(node) is list:
            parts = [self._pad_leaf(part, f"{name}[{index}]", None) for index, part in enumerate(node)]
            changed = any(part is not given for part, given in zip(parts, node, strict=True))
            return type(node)(parts) if changed else node
        if isinstance(node, PackedSequence):
            return self._pad_leaf(node, name, None)
        return node

    def _pad_mapping(self, node: Mapping[Any, Any], name: str) -> Any:
        made: dict[Any, Any] | None = None
        for key, given in node.items():
            part = self._pad_leaf(given, f"{name}[{key!r}]", key)
            if part is given:
                continue
            made = cast(dict[Any, Any], copy.copy(node)) if made is None else made
            if not isinstance(part, Padded):
                made[key] = part
                continue
            made[key] = part.values
            if "attention_mask" in node:
                continue
            if key == "input_ids":
                made["attention_mask"] = part.mask().long()
            else:
                made[f"{key}_lengths"] = part.lengths
        return node if made is None else made

    def _pad_leaf(self, node: Any, name: str, key: Any) -> Any:
        if isinstance(node, PackedSequence):
            padded, lengths = pad_packed_sequence(node, batch_first=True, padding_value=self._value_for(key))
            return Padded(self._lengthen(padded, name, key), lengths)
        if type(node) is list and (sequences := _as_sequences(node, name)) is not None:
            return self._join(sequences, name, key)
        if isinstance(self._value, Mapping) and key in self._value:
            tensor = as_tensor(node)
            return self._lengthen(tensor, name, key) if isinstance(tensor, Tensor) and tensor.dim() > 1 else node
        return self._pad_parts(node, name)

    def _join(self, sequences: list[Tensor], name: str, key: Any) -> Padded:
        lengths = [len(sequence) for sequence in sequences]
        first = sequences[0]
        shape = (len(sequences), self._size_for(max(lengths), name), *first.shape[1:])
        values = first.new_full(shape, self._value_for(key))
        for row, sequence in zip(values, sequences, strict=True):
            row[: len(sequence)] = sequence
        return Padded(values, torch.tensor(lengths))

    def _lengthen(self, tensor: Tensor, name: str, key: Any) -> Tensor:
        size = self._size_for(tensor.shape[1], name)
        if size == tensor.shape[1]:
            return tensor
        values = tensor.new_full((len(tensor), size, *tensor.shape[2:]), self._value_for(key))
        values[:, : tensor.shape[1]] = tensor
        return values

    def _value_for(self, key: Any) -> Value:
        if isinstance(self._value, Mapping):
            return self._value.get(key, 0)
        return 0 if key == "attention_mask" else self._value

    def _size_for(self, length: int, name: str) -> int:
        if self._multiple is not None:
            return max(-(-length // self._multiple), 1) * self._multiple
        size = next((size for size in self._sizes if size >= length), None)
        if size is None:
            raise FeedError(
                f"{name} has a sequence of {length}, and pad_to goes up to {self._sizes[-1]}: add a larger length, or "
                "cut sequences in the loader."
            )
        return size


def _check_sizes(sizes: int | Sequence[int] | None) -> list[int]:
    if sizes is None:
        return []
    listed = [sizes] if isinstance(sizes, int) else [*sizes] if isinstance(sizes, Sequence) else []
    if not listed or not all(map(_is_size, listed)):
        raise ArgumentError(f"pad_to is {sizes!r}; it must be a length of at least 1, or a list of such.")
    return sorted({*listed})


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _as_sequences(node: list[Any], name: str) -> list[Tensor] | None:
    """The sequences of a list; ``None`` if it is something else."""
    if not node:
        return None
    if all(type(each) is list and all(isinstance(item, int | float) for item in each) for each in node):
        dtype = torch.float32 if any(isinstance(item, float) for each in node for item in each) else torch.int64
        return [torch.tensor(each, dtype=dtype) for each in node]
    sequences = [as_tensor(each) for each in node]
    if not all(isinstance(each, Tensor) and each.dim() and each.layout is torch.strided for each in sequences):
        return None
    if len({(each.dtype, each.shape[1:]) for each in sequences}) > 1:
        raise FeedError(f"{name} is a list of sequences that differ in dtype, or in more than their first dimension.")
    return sequences
