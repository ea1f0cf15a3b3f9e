"""What a loop gets from a feed is what it gets without one: each kind of source, run plainly and through a feed."""

import contextlib
import itertools
import json
import logging
import queue
import random
import sqlite3
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from millstream.data import feed, num_valid
from millstream.errors import FallbackWarning, FeedError
from tests.data.conftest import WAYS, WITH_WORKER, feed_threads

DRAWS = {
    "torch": lambda: torch.rand(2),
    "numpy": lambda: torch.from_numpy(np.random.rand(2)),
    "random": lambda: torch.tensor([random.random(), random.random()]),
}


def seed_all():
    torch.manual_seed(3), np.random.seed(3), random.seed(3)


class Drawing(Dataset):
    """Augments by a global generator, from some sample on."""

    def __init__(self, draw, first=0, n=24):
        self.draw, self.first, self.n = draw, first, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.draw() + i if i >= self.first else torch.full((2,), float(i))


# --- random numbers


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("loop_draws", [False, True])
def test_one_seed_gives_the_plain_loops_numbers(make_feed, draw, shuffle, loop_draws):
    def run(wrap):
        seed_all()
        loader, seen = wrap(DataLoader(Drawing(draw), batch_size=3, shuffle=shuffle)), []
        for _ in range(2):
            for batch in loader:
                seen.append(batch.clone())
                if loop_draws:
                    seen += [torch.rand(5), torch.from_numpy(np.random.rand(1)), torch.tensor(random.random())]
        return [*seen, torch.rand(1), torch.tensor(random.random())]

    plain, fed = run(lambda loader: loader), run(make_feed)
    assert all(torch.equal(a, b) for a, b in zip(plain, fed, strict=True))


@pytest.mark.parametrize("between", ["iter", "first", "left"])
def test_draws_come_in_the_order_of_the_program(make_feed, between):
    def run(wrap):
        seed_all()
        loader = wrap(DataLoader(Drawing(DRAWS["torch"]), batch_size=3, shuffle=True))
        passing, seen = iter(loader), []
        if between == "iter":
            seen.append(torch.rand(1))
        seen.append(next(passing).clone())
        if between == "first":
            seen.append(torch.rand(1))
        if between == "left":
            del passing
            passing = iter(loader)
        seen += [batch.clone() for batch in passing]
        return [*seen, torch.rand(1)]

    plain, fed = run(lambda loader: loader), run(make_feed)
    assert all(torch.equal(a, b) for a, b in zip(plain, fed, strict=True))


def test_a_loader_of_workers_draws_its_seed_when_the_loop_begins(make_feed):
    def run(wrap):
        torch.manual_seed(1)
        seen = [batch.clone() for batch in wrap(DataLoader(Drawing(DRAWS["torch"]), batch_size=6, num_workers=1))]
        return [*seen, torch.rand(1)]

    plain, fed = run(lambda loader: loader), run(make_feed)
    assert all(torch.equal(a, b) for a, b in zip(plain, fed, strict=True))


@pytest.mark.parametrize("make_feed", WAYS[:2], indirect=True)
def test_the_user_is_told_once_that_a_source_is_not_read_ahead(make_feed, caplog):
    fed = make_feed(DataLoader(Drawing(DRAWS["numpy"]), batch_size=3))
    with caplog.at_level(logging.WARNING, "millstream"):
        for _ in range(3):
            assert len(list(fed)) == 8
    assert len(caplog.records) == 1
    assert "generator of numpy" in caplog.text
    assert "num_workers" in caplog.text
    assert fed.stats().in_step == "numpy"


def test_a_shuffled_loader_is_read_ahead(make_feed):
    fed = make_feed(DataLoader(TensorDataset(torch.arange(40.0)), batch_size=4, shuffle=True))
    assert len(list(fed)) == 10
    assert fed.stats().in_step == ""


@pytest.mark.parametrize("make_feed", WAYS[:2], indirect=True)
@pytest.mark.parametrize("loop_draws", [False, True])
def test_a_source_that_first_draws_later_causes_one_warning_that_names_the_batch(make_feed, loop_draws):
    fed = make_feed(DataLoader(Drawing(DRAWS["torch"], first=15, n=300), batch_size=3))
    with pytest.warns(FallbackWarning, match=r"generator of torch at batch \d+, while it was read ahead") as told:
        for _ in range(2):
            for _ in fed:
                torch.rand(1) if loop_draws else None
    assert len(told) == 1
    assert loop_draws or "at batch 5," in str(told[0].message)


@pytest.mark.parametrize("make_feed", WAYS[:2], indirect=True)
def test_a_loop_that_draws_is_not_taken_for_its_source(make_feed):
    fed = make_feed(DataLoader(TensorDataset(torch.arange(400.0)), batch_size=4))
    for _ in fed:
        torch.rand(3)  # no warning
    assert fed.stats().in_step == ""


# --- modes


@pytest.mark.parametrize("make_feed", WAYS[::2], indirect=True)
def test_modes_of_the_loop_reach_the_source(make_feed):
    encoder = torch.nn.Linear(8, 8)

    def run(wrap):
        loader = wrap(DataLoader([torch.ones(8)] * 12, batch_size=2, collate_fn=lambda b: encoder(torch.stack(b))))
        seen = []

        def look():
            seen.extend((z.requires_grad, z.dtype, z.is_inference()) for z in loader)

        for _ in range(2):
            look()
            with torch.no_grad():
                look()
            with torch.autocast("cpu", torch.bfloat16):
                look()
            with torch.inference_mode():
                look()
        for z in loader:  # and changed in the middle
            seen.append(z.requires_grad)
            torch.set_grad_enabled(len(seen) % 2 == 0) if wrap is plain else None
        torch.set_grad_enabled(True)
        return seen[:48]

    def plain(loader):
        return loader

    assert run(plain) == run(make_feed)


@pytest.mark.parametrize("make_feed", WAYS[:1], indirect=True)
def test_weights_that_change_are_cast_anew_under_autocast(make_feed):
    encoder = torch.nn.Linear(4, 4)
    loader = make_feed(DataLoader([torch.ones(4)] * 6, batch_size=1, collate_fn=lambda b: encoder(torch.stack(b))))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for number, z in enumerate(loader):
            if number == 0:
                encoder.weight.zero_(), encoder.bias.fill_(7)
            if number > 3:
                assert z.tolist() == [[7.0] * 4]


# --- buffers that are refilled


def refilled(num_buffers, kind):
    """A source that goes round some buffers."""
    buffers = [np.zeros(5, np.float32) for _ in range(num_buffers)]
    for i in range(30):
        buffer = buffers[i % num_buffers]
        buffer.fill(i)
        yield {"array": buffer, "tensor": torch.from_numpy(buffer), "dict": {"x": torch.from_numpy(buffer)[1:3]}}[kind]


def refilled_windows(num_buffers):
    """A source that writes and yields windows of one buffer, which overlap."""
    buffer = np.zeros(4 * num_buffers + 1, np.float32)
    shown = torch.from_numpy(buffer)
    for i in range(30):
        start = 2 * i % (4 * num_buffers - 3)
        buffer[start : start + 5] = i
        yield shown[start : start + 5]


@pytest.mark.parametrize("kind", ["array", "tensor", "dict", "windows"])
@pytest.mark.parametrize("num_buffers", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_source_may_refill_its_buffers(make_feed, num_buffers, depth, kind):
    class Refilled:
        def __iter__(self):
            return refilled_windows(num_buffers) if kind == "windows" else refilled(num_buffers, kind)

    fed = make_feed(Refilled(), depth)
    for _ in range(2):
        seen = []
        for batch in fed:
            batch = batch["x"] if kind == "dict" else batch
            for _ in range(20):
                threading.Event().wait(0)  # the source may run ahead
            seen.append(sorted({*batch.tolist()}))
        assert seen == [[float(i)] for i in range(30)]


def test_slices_of_one_tensor_are_not_copied():
    data = torch.arange(40.0)

    class Slices:
        def __iter__(self):
            return iter(data.split(4))

    fed, parts = feed(Slices(), "cpu"), data.split(4)
    first = list(fed)
    assert all(map(torch.equal, first, parts))
    assert [batch.data_ptr() for batch in first[4:]] == [part.data_ptr() for part in parts[4:]]
    assert [batch.data_ptr() for batch in fed] == [part.data_ptr() for part in parts]


@WITH_WORKER
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_batches_of_refilled_buffers_may_be_kept(make_feed, num_buffers, draws):
    class Refilled:
        def __iter__(self):
            for batch in refilled(num_buffers, "tensor"):
                if draws:  # so that it is asked only when the loop waits
                    torch.rand(())
                yield batch

    fed = make_feed(Refilled(), 2)
    for _ in range(2):
        assert [batch.tolist() for batch in list(fed)] == [[float(i)] * 5 for i in range(30)]


def test_without_a_thread_batches_are_the_sources_own_on_the_cpu():
    buffer = torch.zeros(3)
    assert all(batch is buffer for batch in feed((buffer for _ in range(4)), "cpu", prefetch=False))


@pytest.mark.parametrize(
    ("make", "keeps_strides"),
    [
        (lambda data: data.mT, True),
        (lambda data: data[:, 1:3], True),
        (lambda data: data[:1].expand(4, 6), True),
        (lambda data: data[:0], True),
        (lambda data: data.flatten().unfold(0, 5, 2), False),
        (lambda data: data.to_sparse(), False),
    ],
    ids=["transposed", "columns", "expanded", "empty", "windows", "sparse"],
)
def test_a_copied_batch_is_like_the_sources(make, keeps_strides):
    data = make(torch.arange(24.0).view(4, 6))
    (batch,) = feed(iter([data]), "cpu")
    assert torch.equal(batch.to_dense(), data.to_dense())
    assert batch is not data
    if keeps_strides:
        assert batch.stride() == data.stride()


def test_windows_of_one_tensor_that_overlap_arrive_as_they_are():
    rows = torch.arange(60.0).view(3, 20)
    windows = [(rows[:, i : i + 5], rows[:, i + 1 : i + 6]) for i in range(0, 14, 2)]

    class Windows:
        def __iter__(self):
            return iter(windows)

    for batch, window in zip(feed(Windows(), "cpu"), windows, strict=True):
        assert all(map(torch.equal, batch, window))


# --- threads


@pytest.mark.parametrize("begins", ["in iter", "in next"])
def test_what_a_source_opens_serves_all_passes(make_feed, begins):
    class Rows(IterableDataset):
        db = None

        def open(self):
            if self.db is None:
                self.db = sqlite3.connect(":memory:")
            return (torch.tensor([x]) for (x,) in self.db.execute("values (1), (2), (3), (4)"))

        def __iter__(self):
            return self.open() if begins == "in iter" else (row for row in self.open())

    fed = make_feed(DataLoader(Rows(), batch_size=None))
    for _ in range(5):
        assert [batch.item() for batch in fed] == [1, 2, 3, 4]
    assert len(feed_threads()) == (not make_feed.inline)
    if not make_feed.inline:
        thread = threading.Thread(target=fed.loader.dataset.__dict__.pop, args=("db",))  # it closes where it was opened
        del thread
    fed.close()


# --- leaving


@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["generator", "iterator"])
def test_an_iterator_loses_nothing_when_the_loop_is_left(make_feed, after, kind):
    fed = make_feed((torch.tensor([i]) for i in range(9)) if kind == "generator" else iter([*torch.arange(9)]))
    seen = []
    while True:
        part = []
        for batch in fed:
            part.append(int(batch))
            if len(part) == after:
                break
        seen += part
        if len(part) < after:
            break
    assert seen == [*range(9)]


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("make_feed", WAYS[:2], indirect=True)
def test_leaving_while_the_source_waits_is_immediate_and_loses_nothing(make_feed, after):
    source = queue.Queue()

    class Pops(IterableDataset):
        def __iter__(self):
            while (item := source.get()) is not None:
                yield torch.tensor([item])

    fed, seen = make_feed(DataLoader(Pops(), batch_size=None)), []
    for i in range(after):
        source.put(i)
    for batch in fed:
        seen.append(batch.item())
        if len(seen) == after:
            break
    for i in range(after, 6):
        source.put(i)
    source.put(None)
    seen += [batch.item() for batch in fed]
    assert seen == [*range(6)]


# --- resuming


@pytest.mark.parametrize(
    ("after", "generator", "num_workers"), [(1, False, 0), (2, True, 1), (5, False, 1), (5, True, 0)]
)
def test_a_shuffled_loader_resumes_on_its_permutation(make_feed, after, generator, num_workers):
    def make():
        own = torch.Generator().manual_seed(4) if generator else None
        data = TensorDataset(torch.arange(32.0))
        return make_feed(DataLoader(data, batch_size=4, shuffle=True, generator=own, num_workers=num_workers))

    torch.manual_seed(11)
    fed = make()
    list(fed)  # an epoch before
    whole = []
    for (batch,) in fed:
        whole.append(batch.tolist())
        if len(whole) == after:
            state, rng = fed.state_dict(), torch.get_rng_state()
    torch.manual_seed(12)
    again = make()
    again.load_state_dict(state)
    torch.set_rng_state(rng)
    rest = []
    for (batch,) in again:
        if not rest:
            assert torch.equal(torch.get_rng_state(), rng)  # what was drawn to skip batches is undone
        rest.append(batch.tolist())
    assert whole[after:] == rest


WORKERS = {"inline": {}, "new": {"num_workers": 1}, "kept": {"num_workers": 1, "persistent_workers": True}}


@pytest.mark.parametrize(
    ("generator", "epoch", "shuffle", "prefetch"),
    [
        (False, 0, True, False),
        (True, 1, True, False),
        (True, 2, True, True),
        (False, 1, True, True),
        (True, 0, False, True),
        (False, 2, False, True),
    ],
)
def test_a_resumed_epoch_has_its_rows_whichever_workers_are_kept(generator, epoch, shuffle, prefetch):
    def make(workers):
        own = torch.Generator().manual_seed(4) if generator else None
        return DataLoader(TensorDataset(torch.arange(12)), 2, shuffle, generator=own, **WORKERS[workers])

    def rows(batches):
        return [batch.tolist() for (batch,) in batches]

    for workers in ("kept", "new"):
        torch.manual_seed(11)
        loader = make(workers)
        epochs = [rows(loader) for _ in range(4)]
        after = torch.get_rng_state()
        torch.manual_seed(11)
        fed = feed(make(workers), "cpu", prefetch=prefetch)
        for _ in range(epoch):
            list(fed)
        seen = rows(itertools.islice(fed, 2))
        state, rng = json.loads(json.dumps(fed.state_dict())), torch.get_rng_state()
        list(fed)  # its loader has moved on
        feeds = {into: feed(make(into), "cpu", prefetch=prefetch) for into in WORKERS} | {"same loader": fed}
        for into, again in feeds.items():
            torch.manual_seed(12)
            again.load_state_dict(state)
            torch.set_rng_state(rng)
            batches = iter(again)
            rest = rows([next(batches)])
            assert torch.equal(torch.get_rng_state(), rng)  # what was drawn to skip batches is undone
            assert seen + rest + rows(batches) == epochs[epoch], into
            if into in (workers, "same loader"):
                assert [rows(again) for _ in range(epoch + 1, 4)] == epochs[epoch + 1 :]
                assert torch.equal(torch.get_rng_state(), after)


class Wrapper:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


class Lazy:
    def __init__(self, make_iterator):
        self.make_iterator = make_iterator

    def __iter__(self):
        return self.make_iterator()


WRAPPERS = {
    "class": Wrapper,
    "generator": lambda loader: (batch for batch in Wrapper(loader)),
    "closure": lambda loader: Lazy(lambda: iter(loader)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("generator", [False, True])
def test_a_wrapped_loader_resumes_whichever_workers_are_kept(wrap, epoch, generator):
    def make(workers):
        own = torch.Generator().manual_seed(4) if generator else None
        return DataLoader(TensorDataset(torch.arange(12)), 2, shuffle=True, generator=own, **WORKERS[workers])

    torch.manual_seed(11)
    loader = make("kept")
    for _ in range(epoch):
        list(loader)
    fed = feed(wrap(loader), "cpu")
    whole = []
    for (batch,) in fed:
        whole.append(batch.tolist())
        if len(whole) == 2:
            state = json.loads(json.dumps(fed.state_dict()))
    for into in WORKERS:
        torch.manual_seed(12)
        again = feed(wrap(make(into)), "cpu")
        again.load_state_dict(state)
        assert whole == whole[:2] + [batch.tolist() for (batch,) in again], into


class Draws:
    """A batch sampler that draws in ``__iter__``, or for each batch."""

    def __init__(self, at_once):
        self.at_once = at_once

    def __iter__(self):
        if self.at_once:
            return iter(torch.randperm(12).view(6, 2).tolist())
        return (torch.randint(12, (2,)).tolist() for _ in range(6))


@pytest.mark.parametrize("at_once", [True, False])
def test_what_would_resume_in_another_order_is_refused(at_once):
    def make(**workers):
        return feed(DataLoader(TensorDataset(torch.arange(12)), batch_sampler=Draws(at_once), **workers), "cpu")

    fed = make()
    whole = []
    for (batch,) in fed:
        whole.append(batch.tolist())
        if len(whole) == 2:
            state, rng = fed.state_dict(), torch.get_rng_state()
    again = make()
    again.load_state_dict(state)
    torch.set_rng_state(rng)
    assert whole[2:] == [batch.tolist() for (batch,) in again]
    other = make(num_workers=1)
    other.load_state_dict(state)
    with pytest.raises(FeedError, match=r"DataLoader cannot be resumed: .* num_workers"):
        next(iter(other))


def loader_of(rows, batch_size, **options):
    return DataLoader(TensorDataset(torch.arange(rows)), batch_size=batch_size, **options)


@pytest.mark.parametrize(
    ("other", "now"),
    [
        (loader_of(12, 3), "4 batches with batch_size=3"),
        (loader_of(16, 2, shuffle=True), "8 batches with batch_size=2"),
        (loader_of(18, 3), "6 batches with batch_size=3"),  # as many batches, of other rows
        ([torch.zeros(2)] * 5, "5 batches"),
    ],
)
def test_a_pass_of_another_size_is_refused(other, now):
    fed = feed(loader_of(12, 2), "cpu")
    batches = iter(fed)
    next(batches)
    state = json.loads(json.dumps(fed.state_dict()))
    again = feed(other, "cpu")
    again.load_state_dict(state)
    with pytest.raises(FeedError, match=f"had 6 batches with batch_size=2, and this one has {now}, .* batch 2 begins"):
        next(iter(again))
    again = feed(loader_of(12, 2), "cpu")
    again.load_state_dict(state)
    assert [batch.tolist() for (batch,) in again] == [[row, row + 1] for row in range(2, 12, 2)]


def test_what_tells_no_size_is_resumed_by_counting():
    fed = feed((torch.full((1,), float(number)) for number in range(3)), "cpu")
    next(iter(fed))
    again = feed((torch.full((1,), float(number)) for number in range(5)), "cpu")
    again.load_state_dict(fed.state_dict())
    assert [batch.item() for batch in again] == [1, 2, 3, 4]


class Rows(IterableDataset):
    def __iter__(self):
        return iter(range(6))


def test_a_warning_tells_that_the_random_numbers_of_kept_workers_are_not_in_a_state():
    def make():
        return feed(DataLoader(Rows(), batch_size=2, **WORKERS["kept"]), "cpu")

    fed = make()
    for epoch in range(2):
        batches = iter(fed)
        next(batches)
        state = fed.state_dict()
        list(batches)
        again = make()
        again.load_state_dict(state)
        with pytest.warns(FallbackWarning, match="persistent_workers") if epoch else contextlib.nullcontext():
            assert [batch.tolist() for batch in again] == [[2, 3], [4, 5]]


# --- a loader still


def test_what_the_loader_has_the_feed_has(make_feed):
    loader = DataLoader(TensorDataset(torch.arange(20.0)), batch_size=8)
    loader.set_epoch = lambda epoch: setattr(loader, "epoch", epoch)
    fed = make_feed(loader)
    assert len(fed.dataset) == 20
    assert fed.batch_size == 8
    assert fed.sampler is loader.sampler
    fed.set_epoch(3)
    assert (loader.epoch, fed.epoch) == (3, 3)
    with pytest.raises(AttributeError, match="Neither the feed nor its DataLoader has an attribute 'batchsize'"):
        _ = fed.batchsize


def test_padding_lengthens_lists_with_an_item_per_row_and_tells_with_the_batch(make_feed):
    def make(n):
        return {
            "x": torch.arange(n * 2.0).view(n, 2),
            "names": [f"n{i}" for i in range(n)],
            "boxes": tuple(torch.ones(i, 4) for i in range(n)),
            "shape": [2, 3, 5],
            "pair": [torch.zeros(n), torch.ones(n)],
        }

    batches = list(make_feed([make(4), make(4), make(3)], pad_last=True))
    last = batches[-1]
    assert last["names"] == ["n0", "n1", "n2", "n2"]
    assert [len(box) for box in last["boxes"]] == [0, 1, 2, 2]
    assert last["shape"] == [2, 3, 5]
    assert [len(each) for each in (last["x"], *last["pair"])] == [4, 4, 4]
    assert [num_valid(batch) for batch in batches] == [4, 4, 3]
