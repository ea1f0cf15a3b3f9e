"""Sequences of many lengths padded to a few, by what PyTorch's own padding gives."""

from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader

import millstream as ms
from millstream.data import feed, num_valid
from millstream.data.lengths import Lengths
from millstream.errors import ArgumentError, FeedError

ROWS = st.lists(st.lists(st.integers(-9, 9), max_size=20), min_size=1, max_size=5)


def padded_like(rows, size, value=0):
    """What ``pad_sequence`` makes of the rows and one of the size that is left out again."""
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence([*tensors, torch.zeros(size, dtype=torch.int64)], batch_first=True, padding_value=value)[:-1]


@given(rows=ROWS, multiple=st.integers(1, 8), value=st.integers(-3, 3))
def test_padded_as_pytorch_pads(rows, multiple, value):
    longest = max(map(len, rows))
    size = next(size for size in range(multiple, 40, multiple) if size >= longest)
    expected = padded_like(rows, size, value)
    lengths = Lengths(None, multiple, value)
    for form in (rows, [torch.tensor(row, dtype=torch.int64) for row in rows], [np.array(r, np.int64) for r in rows]):
        padded, label = lengths.pad((form, "label"))
        assert label == "label"
        assert torch.equal(padded.values, expected)
        assert padded.lengths.tolist() == [*map(len, rows)]
        assert padded.mask().sum(1).tolist() == [*map(len, rows)]
    if all(rows):
        packed = pack_sequence([torch.tensor(row) for row in rows], enforce_sorted=False)
        assert torch.equal(lengths.pad((packed,))[0].values, expected)
        assert torch.equal(lengths.pad(packed).values, expected)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_what_a_tokenizer_returns_gets_a_mask(kind):
    tokens = [[5, 6, 7], [8]]
    batch = Lengths([4, 8], None, 0).pad(kind(input_ids=tokens, name=["a", "b"]))
    assert type(batch) is kind
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["name"] == ["a", "b"]
    assert set(batch) == {"input_ids", "attention_mask", "name"}


def test_a_mask_that_is_there_is_padded_with_zeros_and_other_keys_get_lengths():
    batch = {"input_ids": [[5, 6], [7]], "attention_mask": [[1, 1], [1]], "labels": [[5, 6], [7]]}
    padded = Lengths(3, None, 9).pad(batch)
    assert padded["input_ids"].tolist() == [[5, 6, 9], [7, 9, 9]]
    assert padded["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert set(padded) == set(batch)
    assert batch["input_ids"] == [[5, 6], [7]], "the loader's own batch is left alone"
    frames = {"frames": [torch.ones(2, 3), torch.ones(4, 3)]}
    padded = Lengths(5, None, 0).pad(frames)
    assert padded["frames"].shape == (2, 5, 3)
    assert padded["frames_lengths"].tolist() == [2, 4]


def test_values_by_key_pad_tensors_under_these_keys():
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "labels": torch.ones(2, 3), "pixels": torch.ones(2, 3)}
    padded = Lengths(None, 4, {"input_ids": 7, "labels": -100}).pad(batch)
    assert padded["input_ids"].tolist() == [[1, 1, 1, 7]] * 2
    assert padded["labels"].tolist() == [[1, 1, 1, -100]] * 2
    assert padded["pixels"] is batch["pixels"]


@pytest.mark.parametrize(
    "batch", [[torch.ones(3), torch.ones(2)], (torch.ones(3, 2), torch.ones(3)), {"x": [], "y": ["a"]}, 3, None]
)
def test_what_is_no_list_of_sequences_stays(batch):
    assert Lengths([8], None, 0).pad(batch) is batch


def test_every_batch_of_a_feed_has_one_of_the_lengths():
    rows = [torch.arange(n % 13 + 1) for n in range(40)]
    loader = DataLoader(rows, 3, collate_fn=lambda each: {"input_ids": list(each)})
    fed = feed(loader, "cpu", pad_to=[4, 8, 16], pad_last=True)
    seen = []
    for batch in fed:
        kept = batch["input_ids"][batch["attention_mask"].bool()]
        seen += kept.split(batch["attention_mask"].sum(1).tolist())[: num_valid(batch)]
        assert batch["input_ids"].shape[0] == 3
        assert batch["input_ids"].shape[1] in (4, 8, 16)
    assert [each.tolist() for each in seen] == [each.tolist() for each in rows]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pad_to": []}, "pad_to"),
        ({"pad_to": [0]}, "pad_to"),
        ({"pad_to": "128"}, "pad_to"),
        ({"pad_multiple": 0}, "pad_multiple"),
        ({"pad_to": 8, "pad_multiple": 8}, "exclude"),
        ({"pad_to": 8, "pad_value": "0"}, "pad_value"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        ms.feed([], "cpu", **arguments)


def test_a_sequence_that_is_too_long_is_named():
    fed = feed([{"tokens": [[1] * 9]}], "cpu", pad_to=[4, 8])
    with pytest.raises(FeedError, match=r"batch\['tokens'\] has a sequence of 9, and pad_to goes up to 8"):
        next(iter(fed))
    mixed = feed([{"tokens": [torch.ones(2), torch.ones(2, 3)]}], "cpu", pad_to=4)
    with pytest.raises(FeedError, match="differ"):
        next(iter(mixed))
