"""What a feed can do beyond feeding: resume, shape batches and transform them."""

import copy
import gc
import json
import pickle
import time
import weakref

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from millstream.data import feed
from millstream.data.shaping import make_transform
from millstream.errors import ArgumentError, FeedError
from tests.data.conftest import WAYS
from tests.data.test_feed import Failing, numbers, values

# --- resuming


class Stateful:
    """As torchdata's StatefulDataLoader: its state is ahead of what was delivered, when a feed pulls from it."""

    def __init__(self, n):
        self.n, self.at, self.resume = n, 0, None

    def __iter__(self):
        self.at, self.resume = self.resume or 0, None
        while self.at < self.n:
            self.at += 1
            yield torch.tensor([float(self.at - 1)])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.resume = state["at"]


class Live(Stateful):
    """Its state is the very object that it continues with, as that of a dataset in torchdata's loader may be."""

    def __init__(self, n):
        super().__init__(n)
        self.state = {"at": 0}

    def state_dict(self):
        self.state["at"] = self.at
        return self.state

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.state = state


def test_a_state_is_that_of_its_batch_whatever_the_loader_does_with_it(make_feed):
    fed = make_feed(Live(9))
    passing = iter(fed)
    for _ in range(3):
        next(passing)
    state = fed.state_dict()
    again = make_feed(Live(9))
    again.load_state_dict(state)
    list(again)
    assert (state["position"], state["source"]) == (3, {"at": 3})


class Epochs:
    """Counts its passes, and may fail in one before the first batch."""

    def __init__(self):
        self.epoch, self.fails = 0, False

    def __iter__(self):
        if self.fails:
            raise OSError
        yield torch.tensor([float(self.epoch)])
        self.epoch += 1

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def test_a_state_taken_before_the_first_batch_of_a_pass_is_not_that_of_a_new_loader(make_feed):
    loader = Epochs()
    loader.load_state_dict({"epoch": 3})
    fed = make_feed(loader)
    passing = iter(fed)
    assert fed.state_dict()["source"] == {"epoch": 3}
    assert [batch.item() for batch in passing] == [3]
    loader.fails = True
    with pytest.raises(OSError):  # noqa: PT011 - it says nothing
        list(fed)
    again = make_feed(Epochs())
    again.load_state_dict(fed.state_dict())
    assert values(again) == [4]


def test_how_many_rows_are_full_is_asked_of_each_pass(make_feed):
    sizes = iter([8, 4, 4])

    class Loader:
        def __iter__(self):
            return iter(torch.arange(32.0).split(next(sizes)))

    fed = make_feed(Loader(), pad_last=True)
    assert [len(batch) for batch in fed] == [8] * 4
    assert [len(batch) for batch in fed] == [4] * 8
    again = make_feed(Loader(), pad_last=True)
    again.load_state_dict(fed.state_dict() | {"rows": 8})
    assert [len(batch) for batch in again] == [4] * 8


@pytest.mark.parametrize(
    "make_loader", [lambda: numbers(9), lambda: Stateful(9), lambda: Live(9)], ids=["any", "stateful", "live"]
)
@pytest.mark.parametrize("after", [0, 1, 4, 8, 9])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_run_goes_on_behind_the_batch_delivered_last(make_feed, make_loader, after, depth):
    fed = make_feed(make_loader(), depth)
    passing = iter(fed)
    got = [next(passing).item() for _ in range(after)]
    state = fed.state_dict()
    fed.close()
    again = make_feed(make_loader(), depth)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert got + values(again) == list(range(9))
    assert values(again) == list(range(9))  # the next pass is a whole one


def test_the_state_behind_a_whole_pass_is_the_beginning_of_the_next(make_feed):
    for loader in (numbers(3), Stateful(3)):
        fed = make_feed(loader)
        assert values(fed) == [0, 1, 2]
        state = fed.state_dict()
        assert state["position"] == 0
        fed.load_state_dict(state)
        assert values(fed) == [0, 1, 2]


def test_resuming_behind_an_error_and_twice(make_feed):
    fed, got = make_feed(DataLoader(Failing(3))), []
    with pytest.raises(LookupError):
        got.extend(batch.item() for batch in fed)
    assert got == [0, 1, 2]
    state = fed.state_dict()
    assert state["position"] == 3
    again = make_feed(numbers(8))
    again.load_state_dict(state)
    passing = iter(again)
    assert [next(passing).item(), next(passing).item()] == [3, 4]
    more = make_feed(numbers(8))
    more.load_state_dict(again.state_dict())
    assert values(more) == [5, 6, 7]


def test_who_resumed_and_got_nothing_resumes_again(make_feed):
    class Away:
        is_back = False

        def __iter__(self):
            if not self.is_back:
                raise ConnectionError("the storage does not answer")
            return iter(numbers(5))

    class AwayAtFirst(Away):
        def __iter__(self):
            if not self.is_back:
                yield torch.zeros(1)
                raise ConnectionError("the storage does not answer")
            yield from numbers(5)

    for loader in (Away(), AwayAtFirst()):
        fed = make_feed(loader)
        state = {"version": 1, "position": 3, "source": None, "rows": None}
        fed.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(ConnectionError):
                values(fed)
            assert fed.state_dict() == state
        loader.is_back = True
        assert values(fed) == [3, 4]
        assert values(fed) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "state",
    [
        {},
        None,
        {"version": 1, "position": 3},
        {"version": 1, "position": 3, "source": None},
        {"version": 2, "position": 3, "source": None, "rows": None},
        {"version": 1, "position": -1, "source": None, "rows": None},
        {"version": 1, "position": "3", "source": None, "rows": None},
        {"version": 1, "position": True, "source": None, "rows": None},
        {"version": 1, "position": 3, "source": None, "rows": 1.5},
        {"version": 1, "position": 3, "source": None, "rows": 4, "rowed": 1},
        {"version": 1, "position": 3, "source": None, "rows": 4, "size": [1]},
    ],
)
def test_what_is_no_state_changes_nothing(make_feed, state):
    fed = make_feed(numbers(5))
    passing = iter(fed)
    next(passing)
    before = fed.state_dict()
    with pytest.raises(ArgumentError, match="not the state of a feed"):
        fed.load_state_dict(state)
    assert fed.state_dict() == before
    assert [batch.item() for batch in passing] == [1, 2, 3, 4]


def test_a_pass_that_has_delivered_nothing_has_the_sources_state_behind_one_that_was_left_too(make_feed):
    fed = make_feed(Stateful(6), 1)
    passing = iter(fed)
    assert fed.state_dict()["source"] is not None
    next(passing)
    passing = iter(fed)
    state = fed.state_dict()
    assert state["position"] == 0
    assert state["source"] is not None


def test_an_iterator_is_not_made_to_skip_twice(make_feed):
    fed = make_feed(iter(numbers(9)), 1)
    fed.load_state_dict({"version": 1, "position": 3, "source": None, "rows": None})
    iter(fed)
    assert values(fed) == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, lambda fed: pickle.loads(pickle.dumps(fed))])
def test_a_copy_of_a_feed_is_one_of_its_own(make_feed, make_copy):
    fed = make_feed(numbers(5))
    passing = iter(fed)
    next(passing)
    other = make_copy(fed)
    assert [batch.item() for batch in other] == [*range(5)]
    assert [batch.item() for batch in passing] == [1, 2, 3, 4]
    next(iter(fed))
    fed.load_state_dict(fed.state_dict())
    assert [batch.item() for batch in make_copy(fed)] == [1, 2, 3, 4] == [batch.item() for batch in fed]


class Wrapper:
    """As accelerate's: it has the methods in any case."""

    def __init__(self, loader):
        self.base_dataloader = loader

    def __iter__(self):
        return iter(self.base_dataloader)

    def state_dict(self):
        return self.base_dataloader.state_dict()

    def load_state_dict(self, state):
        self.base_dataloader.load_state_dict(state)


def test_what_wraps_a_loader_without_a_state_has_none(make_feed):
    fed = make_feed(Wrapper(DataLoader(range(5))))
    passing = iter(fed)
    got = [int(next(passing)) for _ in range(2)]
    state = fed.state_dict()
    del passing
    again = make_feed(Wrapper(DataLoader(range(5))))
    again.load_state_dict(state)
    assert got + [int(batch) for batch in again] == [*range(5)] == [int(batch) for batch in again]


def test_a_state_that_is_none(make_feed):
    with pytest.raises(ArgumentError, match="not the state of a feed"):
        make_feed([]).load_state_dict({"model": 1})


# --- short batches


def rows(*lengths):
    return [{"x": torch.full((n, 3), float(n)), "y": np.arange(n), "n": n, "all": torch.zeros(7)} for n in lengths]


def test_a_short_batch_is_padded_with_its_last_row(make_feed):
    fed = make_feed(rows(4, 4, 2), pad_last=True)
    valid = []
    for _ in range(2):
        for batch in fed:
            valid.append(fed.num_valid)
            assert batch["x"].shape == (4, 3)
            assert batch["all"].shape == (7,)
            assert batch["y"].tolist() == ([0, 1, 1, 1] if batch["n"] == 2 else [0, 1, 2, 3])
    assert valid == [4, 4, 2] * 2


def test_a_batch_without_rows_does_not_say_how_many_a_full_one_has(make_feed):
    fed = make_feed(rows(0, 4, 2), pad_last=True)
    assert [len(batch["x"]) for batch in fed] == [0, 4, 4]


def test_a_resumed_run_knows_how_long_a_full_batch_is(make_feed):
    fed = make_feed(rows(4, 4, 2), pad_last=True)
    passing = iter(fed)
    next(passing), next(passing)
    again = make_feed(rows(4, 4, 2), pad_last=True)
    again.load_state_dict(fed.state_dict())
    assert [len(batch["x"]) for batch in again] == [4]


def weighted(*lengths):
    """Beside rows, what by chance has as many as a short batch."""
    return [{"x": torch.ones(n, 1), "weights": torch.arange(3.0)} for n in lengths]


def test_what_has_no_rows_is_as_it_is_beside_as_many_rows(make_feed):
    fed = make_feed(weighted(4, 4, 3), pad_last=True)
    states = []
    for batch in fed:
        states.append(fed.state_dict())
        assert (len(batch["x"]), len(batch["weights"])) == (4, 3)
    again = make_feed(weighted(4, 4, 3), pad_last=True)
    again.load_state_dict(json.loads(json.dumps(states[1])))
    assert [(len(batch["x"]), len(batch["weights"])) for batch in again] == [(4, 3)]
    # Of another structure nobody knows.
    fed = make_feed([*weighted(4), {**weighted(3)[0], "more": torch.ones(1)}], pad_last=True)
    assert [(len(batch["x"]), len(batch["weights"])) for batch in fed] == [(4, 3), (4, 4)]


def sequences(*lengths):
    rows = [torch.ones(length, 2) for length in lengths]
    return {
        "packed": pack_sequence(rows, enforce_sorted=False),
        "jagged": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
    }


@pytest.mark.parametrize("kind", ["packed", "jagged"])
def test_rows_of_sequences_are_sequences(make_feed, kind):
    batches = [[sequences(2, 3, 2)[kind]], [sequences(1, 1, 1)[kind]], [sequences(9, 9)[kind]]]
    assert len(list(make_feed(batches[:1] * 2, pad_last=True))) == 2
    with pytest.raises(FeedError, match=r"batch\[0\] is a .* cannot be padded"):
        list(make_feed(batches, pad_last=True))


# --- transforms


class Named(torch.Tensor):
    pass


class Holder:
    def __init__(self, x):
        self.x = x

    def to(self, *arguments, **options):
        return self


def make_sparse(batch):
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(torch.arange(4)[None], batch, (4,))


def name(batch):
    made = batch.as_subclass(Named)
    made.note = "mine"
    return made


@pytest.mark.parametrize(
    ("transform", "see"),
    [
        (name, lambda made: made),
        (torch.nn.Parameter, lambda made: made),
        (
            make_sparse,
            torch.Tensor.to_dense,
        ),
        (Holder, lambda made: made.x),
        (lambda batch: [np.ones(3), batch, Holder(batch * 2)], lambda made: made[1]),
    ],
    ids=["subclass", "parameter", "sparse", "object", "among others"],
)
def test_what_a_transform_hides_in_its_result_is_the_users_too(make_feed, transform, see):
    fed = make_feed([torch.full((4,), float(i)) for i in range(8)], transform=transform)
    held = list(fed)
    assert [see(each)[0].item() for each in held] == list(range(8))
    if transform is name:
        assert {(type(each), each.note) for each in held} == {(Named, "mine")}


class Movable(Holder):
    place = "host"

    def to(self, *arguments, **options):
        moved = Movable(self.x)
        moved.place = "device"
        return moved


def fill(batch):
    batch[0].x = batch[1]
    return batch[0]


@pytest.mark.parametrize("make_feed", ["virtual", "virtual, inline"], indirect=True)
def test_objects_that_a_transform_fills_or_makes_are_the_users_and_moved(make_feed):
    held = list(make_feed([(Holder(None), torch.full((4,), float(i))) for i in range(8)], transform=fill))
    assert [each.x[0].item() for each in held] == list(range(8))
    made = list(make_feed([torch.ones(1)] * 3, transform=lambda batch: Movable(batch * 2)))
    assert [(each.place, each.x.item()) for each in made] == [("device", 2.0)] * 3


def test_parts_of_one_new_buffer_seen_as_several_types(make_feed):
    def transform(batch):
        buffer = torch.zeros(13, dtype=torch.uint8)
        buffer[4:] = int(batch)
        return buffer[:4].view(torch.float32), buffer[4:]

    for number, (first, rest) in enumerate(make_feed(numbers(4), transform=transform)):
        assert (first.item(), rest.tolist()) == (0.0, [number] * 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_image_stays_when_its_label_is_dropped(make_feed, dtype):
    source = [(torch.full((1 << 16,), i, dtype=torch.uint8), torch.tensor([float(i)])) for i in range(12)]
    for number, (image, label) in enumerate(make_feed(source, transform=make_transform(dtype, False, None))):
        del label
        gc.collect()
        assert image.unique().tolist() == [number]


@pytest.mark.parametrize("make_feed", WAYS[:2], indirect=True)
def test_a_transform_that_raises_stopiteration_does_not_end_the_pass(make_feed):
    def transform(batch):
        return next(iter([])) if batch.item() == 2 else batch

    fed, got = make_feed(numbers(5), transform=transform), []
    with pytest.raises(FeedError, match="StopIteration"):
        got.extend(batch.item() for batch in fed)
    assert got == [0, 1]
    assert fed.state_dict()["position"] == 2


def test_a_transform_sees_each_batch_and_its_result_is_delivered(make_feed):
    batches = [{"x": torch.full((2, 2), float(i)), "y": torch.tensor([i]), "name": str(i)} for i in range(20)]

    def transform(batch):
        return {"scaled": batch["x"] * 2 + 1, "y": batch["y"], "turned": batch["x"].t(), "name": batch["name"]}

    kept = []
    for i, batch in enumerate(make_feed(batches, transform=transform)):
        assert bool((batch["scaled"] == 2 * i + 1).all())
        assert (int(batch["y"]), batch["name"]) == (i, str(i))
        assert batch["turned"].stride() == (1, 2)
        if i % 3 == 0:
            kept.append((i, batch))
    assert all(bool((batch["turned"] == i).all()) and bool((batch["scaled"] == 2 * i + 1).all()) for i, batch in kept)


FORMS = {
    "as it came": lambda x: x,
    "a part": lambda x: x[1:, 2:],
    "twice": lambda x: (x, x),
    "two views of it": lambda x: (x[0], x.t()),
    "two views of what is new": lambda x: (x + 1).unbind(),
    "one view of what is new": lambda x: (x + 1)[:, ::2],
    "new, of other bytes": lambda x: x.to(torch.float8_e5m2),
    "seen otherwise": lambda x: x.view(torch.int32),
    "a repeated row": lambda x: (x[:1] + 1).expand(5, -1),
    "conjugated, and not yet computed": lambda x: torch.complex(x, x).conj(),
    "nothing": lambda x: x[:0],
}


@pytest.mark.parametrize("transform", FORMS.values(), ids=FORMS)
def test_whatever_comes_out_of_a_transform_arrives(make_feed, transform):
    batches = [[torch.arange(12.0).view(3, 4) + i, torch.tensor([i])] for i in range(6)]

    def both(batch):
        return transform(batch[0]), batch[1]

    kept = []
    for batch, sent in zip(make_feed(batches, transform=both), batches, strict=True):
        kept.append((batch, both(sent)))  # so that every other one leaves the pool
        if len(kept) == 3:
            kept.pop(0)
        for got, wanted in kept:
            for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted), strict=True):
                assert torch.equal(a.float() if a.is_floating_point() else a, b.float() if b.is_floating_point() else b)
                assert (a.dtype, a.size(), a.stride()) == (b.dtype, b.size(), b.stride())


@pytest.mark.parametrize("make_feed", WAYS[1::2], indirect=True)
def test_what_a_transform_has_recorded_for_gradients_does_not_stay(make_feed):
    weight, made = torch.ones(3, requires_grad=True), []

    def transform(x):
        with torch.enable_grad():
            twice = x * 2
            made.append(weakref.ref(twice))
            return twice * weight

    for batch in make_feed([torch.ones(3) for _ in range(4)], transform=transform):
        assert not batch.requires_grad
        assert made.pop(0)() is None


def test_a_transform_that_keeps_nothing_of_the_slot_gives_it_back_at_once(virtual_feed):
    fed, device = virtual_feed(
        [torch.full((100,), float(i)) for i in range(30)], mood="eager", transform=lambda x: x + 1
    )
    kept = list(fed)
    assert [float(x[0]) for x in kept] == list(range(1, 31))
    assert device.num_raw == 2


def test_a_transform_that_fails_is_the_users_error(make_feed):
    def transform(batch):
        if batch.item() == 2:
            raise ZeroDivisionError("in the transform")
        return batch

    passing = iter(make_feed(numbers(5), transform=transform))
    assert [next(passing).item(), next(passing).item()] == [0, 1]
    with pytest.raises(ZeroDivisionError, match="in the transform"):
        next(passing)
    with pytest.raises(StopIteration):
        next(passing)


def test_repetitions_take_no_bytes(make_feed):
    batch = torch.ones(1).expand(10**6)
    for fed in (make_feed([batch], max_bytes=1000), feed([batch], "cpu", max_bytes=1000)):
        assert [got.shape for got in fed] == [batch.shape]


def test_casting_and_channels_last(make_feed):
    batch = {"image": torch.randn(2, 3, 4, 4), "label": torch.arange(2), "scalar": torch.tensor(1.5)}
    transform = make_transform(torch.bfloat16, True, lambda batch: batch | {"seen": batch["image"].dtype})
    for got in make_feed([batch] * 4, transform=transform):
        assert got["image"].dtype == got["scalar"].dtype == got["seen"] == torch.bfloat16
        assert got["image"].is_contiguous(memory_format=torch.channels_last)
        assert got["label"].dtype == torch.int64
        assert torch.equal(got["image"], batch["image"].bfloat16())
    assert make_transform(None, False, None) is None
    (got,) = feed([batch], "cpu", cast=torch.float64)
    assert got["image"].dtype == torch.float64


# --- bytes


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_bytes_are_under_way_than_allowed(make_feed, depth):
    pulled = []

    def source():
        for i in range(20):
            pulled.append(i)
            yield torch.full((64,), float(i))  # 256 bytes

    passing = iter(make_feed(source(), depth, max_bytes=2 * 256))
    for i in range(20):
        assert float(next(passing)[0]) == i
        assert len(pulled) - (i + 1) <= min(depth, 2) + 1
    del passing


def test_a_limit_below_one_batch_is_an_error_in_its_place(make_feed):
    passing = iter(make_feed([torch.ones(16), torch.ones(4096)], max_bytes=1000))
    assert len(next(passing)) == 16
    with pytest.raises(ArgumentError, match=r"16,384 bytes does not fit .* max_bytes=1,000"):
        next(passing)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"transform": 3}, "transform is 3"),
        ({"transform": 3, "channels_last": True}, "transform is 3"),
        ({"cast": "bfloat16"}, "cast is 'bfloat16'"),
        ({"pad_last": "x"}, "pad_last is 'x'; it must be True or False"),
        ({"prefetch": "no"}, "prefetch is 'no'; it must be True or False"),
        ({"channels_last": 1}, "channels_last is 1; it must be True or False"),
    ],
)
def test_options_that_are_none(options, message):
    with pytest.raises(ArgumentError, match=message):
        feed([], "cpu", **options)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        *[(name, "option of the DataLoader") for name in ("batch_size", "num_workers", "prefetch_factor", "shuffle")],
        *[(name, "A feed needs none") for name in ("pin_memory", "non_blocking")],
    ],
)
def test_options_of_loaders_and_copies_are_sent_where_they_belong(name, told):
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'\. .*{told}"):
        feed([], "cpu", **{name: 2})


def test_what_is_no_loader_is_named():
    dataset = TensorDataset(torch.randn(4, 2))
    for device in ("cpu", 0, torch.device("cpu")):
        with pytest.raises(ArgumentError, match="wrong way round"):
            feed(device, DataLoader(dataset))
    with pytest.raises(ArgumentError, match=r"a dataset .*batch_size=None"):
        feed(dataset, "cpu")
    with pytest.raises(ArgumentError, match=r"the text 'data/train'.*expected a DataLoader"):
        feed("data/train", "cpu")


def test_a_feed_that_casts_can_be_pickled():
    fed = feed([torch.ones(2, 3, 4, 4)], "cpu", cast=torch.float16, channels_last=True)
    (batch,) = pickle.loads(pickle.dumps(fed))
    assert batch.dtype == torch.float16
    assert batch.is_contiguous(memory_format=torch.channels_last)


def test_sparse_tensors_are_cast_and_cannot_be_padded():
    sparse = torch.eye(4).to_sparse()
    (batch,) = feed([sparse], "cpu", cast=torch.float16)
    assert batch.dtype == torch.float16
    assert torch.equal(batch.to_dense().float(), torch.eye(4))
    (own,) = feed([torch.eye(4).to_mkldnn()], "cpu", cast=torch.float16)  # which has its own numbers, and stays so
    assert own.is_mkldnn
    with pytest.raises(FeedError, match=r"batch\[1\] is a tensor of .*sparse_coo, which cannot be padded"):
        list(feed([[torch.ones(4), sparse], [torch.ones(2), torch.eye(2).to_sparse()]], "cpu", pad_last=True))
    weights = torch.eye(2).to_sparse()  # which have as many rows as the last batch by chance
    *_, last = feed([[torch.ones(4), weights], [torch.ones(2), weights]], "cpu", pad_last=True)
    assert last[1] is weights


def test_on_the_cpu_a_slow_transform_is_not_called_staging():
    fed = feed([torch.ones(3)] * 12, "cpu", transform=lambda batch: time.sleep(0.004) or batch)
    assert len(list(fed)) == 12
    stats = fed.stats()
    assert stats.shares["stage"] > 0.3
    assert "transform= or cast=" in str(stats)
    assert "pinned" not in str(stats)
