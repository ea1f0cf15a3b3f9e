import collections
import dataclasses
import enum
import functools
import gc
import threading
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from millstream._torch.tensors import noted_lengths
from millstream.data import feed, register
from millstream.errors import ArgumentError, FeedError
from millstream.tree import batches
from millstream.tree.arrays import as_tensor
from millstream.tree.batches import flatten_batch, name_leaf


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
    leaves, unflatten = flatten_batch(batch)
    assert same(unflatten(leaves), batch)


@given(trees())
def test_any_tree_comes_back_with_other_tensors(batch):
    leaves, unflatten = flatten_batch(batch)
    other = unflatten([leaf + 1 for leaf in leaves])
    again, _ = flatten_batch(other)
    assert len(again) == len(leaves)
    assert all(torch.equal(x, leaf + 1) for x, leaf in zip(again, leaves, strict=True))


@given(trees())
def test_every_tensor_can_be_named(batch):
    for i, leaf in enumerate(flatten_batch(batch)[0]):
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
        leaves, unflatten = flatten_batch(batch)
        new = unflatten([torch.zeros(2)])
        assert type(new) is type(batch)
        assert new is not batch
        assert check(new)
        assert leaves[0] is x
        assert flatten_batch(batch)[0][0] is x, "the source's own container was changed"


class Suit(enum.Enum):
    HEARTS = 1


def test_what_holds_nothing_that_moves_is_used_as_it_is():
    words, empty = np.array(["a", "b"]), {"a": [1, (2, "b")]}
    batch = [torch.ones(1), words, empty, torch.Size([3]), Sample, Suit.HEARTS, {1, 2}, np.float32(3), range(3)]
    leaves, unflatten = flatten_batch(batch)
    new = unflatten(leaves)
    assert len(leaves) == 1
    assert all(new[i] is batch[i] for i in range(1, len(batch)))
    assert flatten_batch(empty)[1]([]) is empty


def test_a_type_that_is_not_known_is_named_until_it_is_registered(monkeypatch):
    monkeypatch.setattr(batches, "_registered", {})
    monkeypatch.setattr(batches, "_sorts", {})
    batch = {"x": [torch.ones(1), Sample(Opaque(torch.ones(2)))]}
    with pytest.raises(FeedError, match=r"batch\['x'\]\[1\].image is a .*Opaque, which feeds do not know"):
        flatten_batch(batch)
    register(Opaque)
    assert len(flatten_batch(batch)[0]) == 1
    register(Opaque, lambda opaque: ([opaque.tensor], lambda parts: Opaque(*parts)))
    leaves, unflatten = flatten_batch(batch)
    assert [leaf.numel() for leaf in leaves] == [1, 2]
    assert name_leaf(batch, 1) == "batch['x'][1].image (part 0 of the Opaque)"
    new = unflatten(["a", "b"])["x"][1].image
    assert type(new) is Opaque
    assert new.tensor == "b"
    with pytest.raises(ArgumentError, match="takes a type"):
        register("Opaque")


class Mover:
    def to(self, device):
        return self


def test_arrays_and_objects_with_to_are_leaves():
    class ArrayLike:
        def __array__(self, dtype=None, copy=None):
            return np.ones(2)

    leaves, unflatten = flatten_batch([np.ones(3), Mover(), ArrayLike(), np.array([1], dtype="datetime64[s]")])
    assert len(leaves) == 3
    assert unflatten([1, 2, 3])[:3] == [1, 2, 3]
    with pytest.raises(FeedError, match="MaskedArray"):
        flatten_batch(np.ma.array([1, 2], mask=[True, False]))


@dataclasses.dataclass
class Computed:
    x: torch.Tensor

    def __post_init__(self):
        self.alias, self.mask, self.same, self.name = self.x, self.x > 0, None, "x"
        self.same = self.mask

    @functools.cached_property
    def mean(self):
        return self.x.mean()


class Line(list):
    pass


class Two(tuple):
    pass


class Table(dict):
    pass


def test_tensors_beside_fields_and_items_move_as_well():
    computed, line, pair, table = Computed(torch.ones(2)), Line([torch.ones(1)]), Two([torch.ones(1)]), Table(a=1)
    assert computed.mean == 1
    line.extra, pair.extra, table.extra = torch.ones(3), np.ones(4), torch.ones(5)
    batch = [computed, line, pair, table]
    leaves, unflatten = flatten_batch(batch)
    names = [name_leaf(batch, i) for i in range(len(leaves))]
    assert names == [
        f"batch{place}" for place in "[0].x [0].mask [0].mean [1][0] [1].extra [2][0] [2].extra [3].extra".split()
    ]
    watched = [weakref.ref(leaf) for leaf in leaves]
    del leaves, batch, computed, line, pair, table
    gc.collect()
    assert not any(watch() is not None for watch in watched)
    computed, line, pair, table = unflatten([*"abcdefgh"])
    found = [computed.x, computed.mask, computed.mean, line[0], line.extra, pair[0], pair.extra, table.extra]
    assert found == [*"abcdefgh"]
    assert (computed.alias, computed.same, computed.name, table) == ("a", "b", "x", {"a": 1})
    assert (type(line), type(pair), type(table)) == (Line, Two, Table)


def test_an_array_of_tensors_is_an_error_that_says_where():
    with pytest.raises(FeedError, match=r"batch\[1\] is an array of objects with tensors"):
        flatten_batch([torch.ones(1), np.array([torch.ones(2), None], dtype=object)])


class Words:
    def __array__(self, dtype=None, copy=None):
        return np.array(["a", None], dtype=object)


def test_what_is_seen_as_an_array_of_words_stays_and_one_without_a_type_in_torch_says_so(virtual_feed):
    words = Words()
    fed, _ = virtual_feed([[words, torch.ones(1)]], mood="eager")
    ((got, _),) = fed
    assert got is words
    batch = {"image": torch.ones(1), "y": [np.ones(2), np.ones(2, dtype=np.longdouble)]}
    for fed in (virtual_feed([batch])[0], feed([batch], "cpu")):
        with pytest.raises(
            FeedError, match=rf"batch\['y'\]\[1\] is of {np.dtype(np.longdouble)}, of which there are no"
        ):
            list(fed)


def test_arrays_of_bfloat16_become_tensors():
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    (leaf,), _ = flatten_batch([np.arange(6).astype(dtype)[::-2]])
    assert as_tensor(leaf).equal(torch.tensor([5, 3, 1], dtype=torch.bfloat16))


ARRAYS = {
    "plain": np.arange(6.0).reshape(2, 3),
    "transposed": np.arange(6).reshape(2, 3).T,
    "read-only": np.broadcast_to(np.arange(3.0), (2, 3)),
    "backwards": np.arange(5)[::-1],
    "big endian": np.arange(4, dtype=">i4"),
    "half": np.arange(3, dtype=np.float16),
    "no dimension": np.array(3.5),
    "unsigned": np.arange(3, dtype=np.uint16),
    "empty": np.empty((0, 3), dtype=np.int8),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_become_tensors(array):
    tensor = as_tensor(array)
    assert np.array_equal(tensor.numpy(), array)
    if array.flags.writeable and array.dtype.isnative and array.size and min(array.strides, default=0) >= 0:
        assert tensor.data_ptr() == array.ctypes.data
    mover = Mover()
    assert as_tensor(mover) is mover


@pytest.mark.parametrize("transposed", [False, True])
def test_a_jagged_tensor_comes_apart_and_together(transposed):
    rows = (
        [torch.arange(6.0).view(2, 3), torch.arange(10.0).view(2, 5)] if transposed else [torch.ones(1), torch.ones(4)]
    )
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    leaves, unflatten = flatten_batch({"x": nested})
    assert name_leaf({"x": nested}, 1) == "batch['x'].offsets()"
    new = unflatten([leaf.clone() for leaf in leaves])["x"]
    assert all(torch.equal(a, b) for a, b in zip(new.unbind(), rows, strict=True))


def test_sets_and_deques_of_tensors():
    x, y = torch.zeros(1), torch.ones(1)
    leaves, unflatten = flatten_batch([{x}, collections.deque([y], maxlen=3)])
    new_set, new_deque = unflatten([1, 2])
    assert (new_set, list(new_deque), new_deque.maxlen) == ({1}, [2], 3)
    assert len(leaves) == 2


def test_a_packed_sequence_keeps_its_batch_sizes():
    packed = pack_sequence([torch.tensor([1.0]), torch.tensor([2.0, 3.0])], enforce_sorted=False)
    leaves, unflatten = flatten_batch(packed)
    assert len(leaves) == 3
    new = unflatten([leaf.clone() for leaf in leaves])
    assert new.batch_sizes is packed.batch_sizes
    assert torch.equal(new.data, packed.data)
    assert torch.equal(new.unsorted_indices, packed.unsorted_indices)


def test_a_dataclass_with_a_field_that_is_not_set():
    @dataclasses.dataclass
    class Late:
        x: object
        y: object = dataclasses.field(init=False)

    leaves, unflatten = flatten_batch(Late(torch.ones(1)))
    new = unflatten(leaves)
    assert not hasattr(new, "y")


@pytest.mark.parametrize(
    "wrap",
    [list, tuple, lambda x: {"x": x[0]}, lambda x: Encoding(x=x[0]), lambda x: Sample(x[0]), lambda x: Pair(x, 1)],
)
def test_unflattening_keeps_no_tensor_of_the_source_alive(wrap):
    x = torch.ones(1)
    gone = weakref.ref(x)
    unflatten = flatten_batch(wrap([x]))[1]
    del x
    gc.collect()
    assert gone() is None
    unflatten([torch.zeros(1)])


class NamedPair(tuple):
    def __new__(cls, left, right):
        made = super().__new__(cls, (left, right))
        made.name = "pair"
        return made


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("image", "label")
    image: torch.Tensor
    label: int


def test_containers_with_a_will_of_their_own():
    for batch in (NamedPair(torch.ones(1), 2), Slotted(torch.ones(1), 2)):
        leaves, unflatten = flatten_batch(batch)
        made = unflatten([leaf + 1 for leaf in leaves])
        assert type(made) is type(batch)
        values = made if isinstance(made, tuple) else (made.image, made.label)
        assert (values[0].item(), values[1]) == (2.0, 2)
    made = flatten_batch(NamedPair(torch.ones(1), 2))[1]([torch.zeros(1)])
    assert made.name == "pair"
    limits = torch.return_types.max((torch.ones(2), torch.zeros(2)))
    assert type(flatten_batch(limits)[1]([torch.ones(1), torch.ones(1)])) is type(limits)


class AttributeDict(dict):
    def __init__(self, *arguments, **items):
        super().__init__(*arguments, **items)
        self.__dict__ = self


class FrozenDict(dict):
    def __setitem__(self, key, value):
        raise TypeError("It cannot be changed.")


class FrozenSelf(FrozenDict):
    def __copy__(self):
        return self


class TensorDict(dict):
    note = None

    def __setitem__(self, key, value):
        assert isinstance(value, torch.Tensor)
        super().__setitem__(key, value)


@pytest.mark.parametrize("kind", [AttributeDict, FrozenDict, FrozenSelf, TensorDict])
def test_dicts_with_a_will_of_their_own(kind):
    x = torch.ones(1)
    leaves, unflatten = flatten_batch(kind(x=x))
    made = unflatten([torch.zeros(1)])
    assert type(made) is kind
    assert made["x"].item() == 0
    assert kind is not AttributeDict or made.x is made["x"]
    assert leaves[0] is x
    gone = weakref.ref(x)
    del x, leaves, made
    gc.collect()
    assert gone() is None


def test_a_dict_that_checks_its_values_keeps_its_attributes():
    batch = TensorDict(x=torch.ones(1))
    batch.note = "kept"
    assert flatten_batch(batch)[1]([torch.zeros(1)]).note == "kept"


class Noted(Pair):
    def __new__(cls, first):
        made = super().__new__(cls, first, 2)
        made.note = "kept"
        return made


def test_a_named_tuple_keeps_its_attributes():
    made = flatten_batch(Noted(torch.ones(1)))[1]([torch.zeros(1)])
    assert (type(made), made.first.item(), made.second, made.note) == (Noted, 0, 2, "kept")


def test_classes_of_attrs_and_pydantic():
    for make in (make_attrs, make_frozen_attrs, make_model):
        batch = make(torch.ones(1))
        made = flatten_batch(batch)[1]([torch.zeros(1)])
        assert type(made) is type(batch)
        assert (made.image.item(), made.label) == (0, 3)
        assert name_leaf(batch, 0) == "batch.image"


def make_attrs(image):
    attrs = pytest.importorskip("attrs")
    return attrs.make_class("Slotted", {"image": attrs.field(), "label": attrs.field(default=3)}, slots=True)(image)


def make_frozen_attrs(image):
    attrs = pytest.importorskip("attrs")
    return attrs.make_class("Frozen", {"image": attrs.field(), "label": attrs.field(default=3)}, frozen=True)(image)


def make_model(image):
    pydantic = pytest.importorskip("pydantic")
    config = pydantic.ConfigDict(arbitrary_types_allowed=True, frozen=True)
    return pydantic.create_model("Model", __config__=config, image=(torch.Tensor, ...), label=(int, 3))(image=image)


def test_a_field_of_records_is_an_array():
    records = np.zeros(3, dtype=[("flag", "u1"), ("x", "<f4")])
    records["x"] = [1, 2, 3]
    assert as_tensor(records["x"]).tolist() == [1.0, 2.0, 3.0]


def test_jagged_tensors_that_fit_each_other_still_do():
    first = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    other = torch.nested.nested_tensor([torch.ones(1, 3)], layout=torch.jagged)
    leaves, unflatten = flatten_batch([first, {"x": first * 2}, other])
    a, b, c = unflatten([leaf.clone() for leaf in leaves])
    assert (a + b["x"]).values().eq(3).all()
    assert c.shape[0] == 1


def test_a_list_of_another_type_that_is_made_twice():
    leaves, unflatten = flatten_batch(collections.deque([torch.ones(1)], maxlen=3))
    assert [len(unflatten(leaves)) for _ in range(2)] == [1, 1]


class WithPrivateSlot:
    __slots__ = ("__secret",)

    def keep(self, secret):
        self.__secret = secret
        return self

    def tell(self):
        return self.__secret


@dataclasses.dataclass(slots=True)
class WithFieldsToo(WithPrivateSlot):
    image: torch.Tensor


def test_slots_with_private_names_come_along():
    leaves, unflatten = flatten_batch(WithFieldsToo(torch.ones(2)).keep("told"))
    assert unflatten([leaves[0] + 1]).tell() == "told"


def test_what_a_pydantic_model_has_beside_its_fields_moves_too():
    pydantic = pytest.importorskip("pydantic")

    class Model(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow", arbitrary_types_allowed=True)
        image: torch.Tensor
        _hidden: torch.Tensor | None = pydantic.PrivateAttr(default=None)
        _other: object = pydantic.PrivateAttr(default_factory=threading.Lock)

    model = Model(image=torch.ones(2), more=torch.ones(3))
    model._hidden = torch.ones(4)
    leaves, unflatten = flatten_batch(model)
    assert sorted(leaf.numel() for leaf in leaves) == [2, 3, 4]
    made = unflatten([leaf + 1 for leaf in leaves])
    assert [each.sum().item() for each in (made.image, made.more, made._hidden)] == [4, 6, 8]
    assert made._other is model._other
    made.more, made._hidden = None, None
    assert model.more.numel() == 3
    assert model._hidden.numel() == 4


def test_jagged_tensors_keep_what_they_know_of_their_lengths():
    """After a transform their offsets are on the device: to ask there would make the host wait."""
    values, offsets = torch.ones(6, 2, device="meta"), torch.tensor([0, 2, 6], device="meta")
    jagged = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=2, max_seqlen=4)
    leaves, unflatten = flatten_batch(jagged)
    assert noted_lengths(unflatten(leaves)) == (2, 4)
    assert noted_lengths(torch.nested.nested_tensor_from_jagged(values, offsets)) == (None, None)


class ByAttribute(dict):
    __getattr__ = dict.__getitem__


class MakesEntries(collections.defaultdict):
    def __getattr__(self, name):
        return self[name]


@dataclasses.dataclass
class Proxy:
    image: torch.Tensor

    def __getattr__(self, name):
        return getattr(self.image, name)


@pytest.mark.parametrize(
    "make", [lambda x: ByAttribute(image=x), lambda x: MakesEntries(dict, image=x), lambda x: Proxy(x)]
)
def test_ways_of_the_users_to_find_attributes_are_not_asked(make):
    node = make(torch.ones(2))
    leaves, unflatten = flatten_batch(node)
    made = unflatten([leaf + 1 for leaf in leaves])
    assert made.image.tolist() == [2, 2]
    if isinstance(node, dict):
        assert [*node] == [*made] == ["image"]
