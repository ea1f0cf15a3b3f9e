import collections
import dataclasses
import gc
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from millstream.feed.structure import name_leaf, split


class Pair(NamedTuple):
    first: object
    second: object


@dataclasses.dataclass
class Sample:
    image: object
    label: object = 3
    num_made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        self.num_made += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: object


class Tagged(dict):
    tag = None


class Row(list):
    pass


class Encoding(collections.UserDict):
    pass


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


def tensors():
    return st.integers(0, 1000).map(lambda n: torch.tensor([n, n + 1]))


def trees():
    leaves = tensors() | st.integers() | st.text(max_size=3) | st.none() | st.booleans()
    keys = st.text(max_size=2) | st.integers()
    return st.recursive(
        leaves,
        lambda sub: st.one_of(
            st.lists(sub, max_size=3),
            st.lists(sub, max_size=3).map(tuple),
            st.lists(sub, max_size=3).map(Row),
            st.dictionaries(keys, sub, max_size=3),
            st.dictionaries(keys, sub, max_size=3).map(collections.OrderedDict),
            st.dictionaries(keys, sub, max_size=3).map(Encoding),
            st.tuples(sub, sub).map(lambda pair: Pair(*pair)),
            sub.map(Frozen),
            st.tuples(sub, sub).map(lambda pair: Sample(*pair)),
        ),
        max_leaves=12,
    )


def same(a, b):
    """Equal in types, shape and values (``==`` of containers would compare tensors by truth)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict | collections.UserDict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


@given(trees())
def test_any_tree_comes_back(batch):
    leaves, rebuild = split(batch)
    assert same(rebuild(leaves), batch)


@given(trees())
def test_any_tree_comes_back_with_other_tensors(batch):
    leaves, rebuild = split(batch)
    other = rebuild([leaf + 1 for leaf in leaves])
    again, _ = split(other)
    assert len(again) == len(leaves)
    assert all(torch.equal(x, leaf + 1) for x, leaf in zip(again, leaves, strict=True))


@given(trees())
def test_every_tensor_can_be_named(batch):
    for i, leaf in enumerate(split(batch)[0]):
        assert eval(name_leaf(batch, i), {"batch": batch}) is leaf


def test_names_of_a_packed_sequence_and_of_nothing():
    packed = pack_sequence([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    assert name_leaf({"x": packed}, 0) == "batch['x'].data"
    with pytest.raises(IndexError):
        name_leaf([1, 2], 0)


def test_types_with_a_life_of_their_own():
    x = torch.ones(2)
    tagged = Tagged(x=x)
    tagged.tag = "kept"
    row = Row([x])
    row.note = "kept"
    counts = collections.defaultdict(list, x=x)
    for batch, check in [
        (tagged, lambda new: new.tag == "kept"),
        (row, lambda new: new.note == "kept"),
        (counts, lambda new: new["absent"] == []),
        (Sample(x), lambda new: new.num_made == 1),
    ]:
        leaves, rebuild = split(batch)
        new = rebuild([torch.zeros(2)])
        assert type(new) is type(batch)
        assert new is not batch
        assert check(new)
        assert leaves[0] is x
        assert split(batch)[0][0] is x, "the source's own container was changed"


def test_what_holds_no_tensor_is_used_as_it_is():
    opaque, array, empty = Opaque(torch.ones(1)), np.ones(3), {"a": [1, (2, "b")]}
    batch = [torch.ones(1), opaque, array, empty, torch.Size([3]), Sample]
    leaves, rebuild = split(batch)
    new = rebuild(leaves)
    assert len(leaves) == 1
    assert all(new[i] is batch[i] for i in range(1, 6))
    assert split(empty)[1]([]) is empty


def test_a_packed_sequence_keeps_its_batch_sizes():
    packed = pack_sequence([torch.tensor([1.0]), torch.tensor([2.0, 3.0])], enforce_sorted=False)
    leaves, rebuild = split(packed)
    assert len(leaves) == 3
    new = rebuild([leaf.clone() for leaf in leaves])
    assert new.batch_sizes is packed.batch_sizes
    assert torch.equal(new.data, packed.data)
    assert torch.equal(new.unsorted_indices, packed.unsorted_indices)


def test_a_dataclass_with_a_field_that_is_not_set():
    @dataclasses.dataclass
    class Late:
        x: object
        y: object = dataclasses.field(init=False)

    leaves, rebuild = split(Late(torch.ones(1)))
    new = rebuild(leaves)
    assert not hasattr(new, "y")


@pytest.mark.parametrize(
    "wrap",
    [list, tuple, lambda x: {"x": x[0]}, lambda x: Encoding(x=x[0]), lambda x: Sample(x[0]), lambda x: Pair(x, 1)],
)
def test_rebuilding_keeps_no_tensor_of_the_source_alive(wrap):
    x = torch.ones(1)
    gone = weakref.ref(x)
    rebuild = split(wrap([x]))[1]
    del x
    gc.collect()
    assert gone() is None
    rebuild([torch.zeros(1)])
