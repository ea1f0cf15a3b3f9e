"""The way to a device, on a virtual one that runs everything as late, as early or as unevenly as a real one may."""

import random
import threading
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import FallbackWarning, FeedError
from millstream.feed.copy_lane import CopyLane
from millstream.feed.layout import MANY_SMALL_LEAVES
from tests.device.virtual_device import make_virtual_context
from tests.feed.conftest import feed_threads

MOODS = ["eager", "lazy", "random"]


def make_batch(number, num_leaves, size):
    return [torch.full((size + 3 * i,), (number * 7 + i) % 250 + 1, dtype=torch.uint8) for i in range(num_leaves)]


def settle(device):
    """Have every pinned block that was given back with an event come home."""
    device.synchronize()
    device.context.release_pinned(device.context.pinned(1))


def train(fed, device, batches, rng, *, switch=False, keep=0.3, stop_after=None):
    """Read every batch by kernels that run late, drop most of them at once; the bytes that the kernels saw."""
    results, expected, kept = [], [], []
    streams = [device.default, device.context.stream(0), device.context.stream(1)]
    with device.on(device.default):
        passing = iter(fed)
        for number in range(len(batches)):
            if switch:
                device.local.stream = rng.choice(streams)
            if number == stop_after:
                break
            got = next(passing)
            if rng.random() < 0.5:
                device.scribble(rng.choice([leaf.numel() for leaf in got]))  # a temporary in freed memory
            for leaf, sent in zip(got, batches[number], strict=True):
                seen = []
                device.read(leaf, seen)
                results.append(seen)
                expected.append(sent.numpy().tobytes())
            if rng.random() < keep:
                kept.append((got, batches[number]))
            del got, leaf
            for _ in range(rng.randint(0, 3)):
                device.scribble(rng.choice([leaf.numel() for leaf in rng.choice(batches)]))
            if rng.random() < 0.2:
                device.run_some()
        del passing
    # What the user allocates after leaving must not be hit by copies that are still under way.
    after = [(device.allocate(size), size) for size in {leaf.numel() for batch in batches for leaf in batch}]
    for tensor, _ in after:
        raw = device.raw(tensor)
        device.default.enqueue(lambda raw=raw: raw.fill(0xAB))
    device.synchronize()
    seen = [result[0] for result in results]
    late = [
        leaf.numpy().tobytes() == sent.numpy().tobytes()
        for got, batch in kept
        for leaf, sent in zip(got, batch, strict=True)
    ]
    untouched = [tensor.numpy().tobytes() == b"\xab" * size for tensor, size in after]
    return seen == expected and all(late) and all(untouched)


def run_once(virtual_feed, seed, mood, plant=None, **options):
    rng = random.Random(seed)
    sizes = rng.choice([[64], [64, 100], [1, 64, 300, 5000]])
    leaves = rng.choice([[1], [2], [1, 3], [MANY_SMALL_LEAVES + 2]])
    batches = [make_batch(i, rng.choice(leaves), rng.choice(sizes)) for i in range(rng.randint(1, 12))]
    fed, device = virtual_feed(batches, rng.randint(1, 4), mood, seed)
    device.context.copy_stream  # noqa: B018 - made now, so that a fault can be planted in it
    if plant:
        plant(device)
    right = train(fed, device, batches, rng, **options)
    settle(device)
    assert device.context._arena.num_lent == 0
    assert device.context._lent_events == {}
    return right


# --- right under every order of events


@pytest.mark.parametrize("mood", MOODS)
def test_kernels_see_the_right_bytes_whenever_they_run(virtual_feed, mood):
    for seed in range(60):
        assert run_once(virtual_feed, seed, mood), seed


@pytest.mark.parametrize("mood", MOODS)
def test_also_when_the_consumer_changes_streams(virtual_feed, mood):
    for seed in range(60):
        assert run_once(virtual_feed, seed, mood, switch=True, keep=0), seed


@pytest.mark.parametrize("mood", MOODS)
def test_also_when_the_loop_is_left_early(virtual_feed, mood):
    for seed in range(60):
        assert run_once(virtual_feed, seed, mood, stop_after=seed % 4), seed


# --- each wait is needed: without it some order gives wrong bytes


def deaf(name):
    def plant(device):
        for stream in device.streams:
            stream.deaf = stream.name.startswith(name)

    return plant


def lie(device):
    device.lies = True


@pytest.mark.parametrize(
    "plant",
    [
        deaf("default"),  # the consumer's stream does not wait for the copy
        deaf("urgent"),  # the copy does not wait for kernels that still use the memory
        lie,  # a slot is refilled while its copy has not read it
    ],
    ids=["hand-over", "allocation", "slot"],
)
def test_a_missing_wait_is_caught(virtual_feed, plant):
    outcomes = [run_once(virtual_feed, seed, mood, plant) for seed in range(15) for mood in MOODS]
    assert not all(outcomes)


def test_a_missing_wait_at_the_end_is_caught(virtual_feed, monkeypatch):
    close = CopyLane.close

    def close_without_waiting(lane, left):  # undelivered memory is freed under its copy
        for load in left:
            load.landing = None
        close(lane, left)

    monkeypatch.setattr(CopyLane, "close", close_without_waiting)
    outcomes = [run_once(virtual_feed, seed, "lazy", stop_after=seed % 4) for seed in range(60)]
    assert not all(outcomes)


def test_a_missing_wait_of_the_old_stream_is_caught(virtual_feed, monkeypatch):
    monkeypatch.setattr(CopyLane, "_hold_back", lambda self, old, new: None)
    outcomes = [run_once(virtual_feed, seed, "lazy", switch=True, keep=0) for seed in range(60)]
    assert not all(outcomes)


# --- what it costs


def test_a_feed_keeps_to_what_a_few_batches_need(virtual_feed):
    fed, device = virtual_feed([make_batch(i, 3, 5000) for i in range(6)], 2, "random")
    for _ in range(30):
        for batch in fed:
            device.read(batch[0], [])
            del batch
        settle(device)
    assert device.num_pins == 1  # the whole ring at once, for all epochs
    assert len(device.streams) == 2  # the consumer's and the copy stream, for life
    assert device.num_raw <= 3 * (2 + 3)  # three leaves; two batches on the way, one handed out, one being dropped
    assert len(device.context._idle_events[False]) <= 3 + 4 + 2  # one per slot, one per landing


def test_the_host_does_not_wait_for_the_device(virtual_feed):
    fed, device = virtual_feed([make_batch(i, 2, 50) for i in range(2)], 2, "lazy")
    got = list(fed)
    assert device.num_queries == 0
    assert any(stream.queue for stream in device.streams)
    assert int(got[0][0][0]) != 1  # nothing has arrived yet, and nobody has waited for it
    device.synchronize()
    assert int(got[0][0][0]) == 1


def test_copies_of_like_batches_are_started_before_they_are_asked_for():
    ctx, _ = make_virtual_context("eager")
    lane, stopped = CopyLane(ctx, 2), threading.Event()

    def stage(i):
        load = lane.stage(make_batch(i, 1, 64), stopped)
        lane.send(load)
        return load

    first, second = stage(0), stage(1)
    assert first.landing is second.landing is None  # nobody has asked for anything yet
    lane.deliver([first, second])
    third = stage(2)
    assert third.landing is not None
    lane.deliver([second, third])
    fourth = stage(3)
    assert fourth.landing is not None
    assert lane._num_open == 2
    lane.close([third, fourth])


def test_a_prepared_landing_is_used_by_a_batch_that_missed_it():
    ctx, device = make_virtual_context("eager")
    lane, stopped = CopyLane(ctx, 2), threading.Event()
    first, second, third = (lane.stage(make_batch(i, 1, 64), stopped) for i in range(3))
    lane.deliver([first, second])
    made = device.num_raw
    lane.deliver([second, third])  # the worker did not send it: it had looked for a landing a moment too early
    assert third.landing is not None
    assert device.num_raw <= made + 1
    assert lane._num_open == 2
    lane.close([third])


def test_no_memory_is_taken_ahead_for_batches_that_all_differ(virtual_feed):
    fed, _ = virtual_feed([make_batch(i, 1, 64 + i) for i in range(8)], 3)
    passing = iter(fed)
    for _ in range(8):
        next(passing)
        assert not passing.session._lane._landings


def test_slots_grow_with_the_batches_and_reuse_what_they_leave(virtual_feed):
    sizes = [10, 100, 1_000, 10_000, 100_000, 1_000_000, 500, 1_000_000, 3]
    batches = [make_batch(i, 2, size) for i, size in enumerate(sizes)]
    fed, device = virtual_feed(batches, 2, "random")
    for _ in range(3):
        assert train(fed, device, batches, random.Random(0))
    assert device.context.pinned_bytes <= 16 << 20  # three slots of two leaves of 1 MB, and what led up to them


def test_a_batch_without_any_bytes(virtual_feed):
    fed, device = virtual_feed([[torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int64)], "nothing", ()])
    got = list(fed)
    device.synchronize()
    assert [tuple(leaf.size()) for leaf in got[0]] == [(0, 3), (2, 0)]
    assert got[1:] == ["nothing", ()]


# --- tensors of all sorts


ODD = {
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.arange(3).view(3, 1).expand(3, 4),
    "sliced": torch.arange(24).view(4, 6)[::2, 1::2],
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.randn(5).bfloat16(),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "negative view": torch.randn(3, dtype=torch.complex64).conj().imag,
    "sparse": torch.eye(3).to_sparse(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "needs gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("leaf", ODD.values(), ids=ODD)
def test_tensors_of_all_sorts_arrive_as_to_would_bring_them(virtual_feed, leaf):
    fed, device = virtual_feed([{"odd": leaf, "plain": torch.ones(3)}] * 4)
    for batch in fed:
        device.synchronize()
        got = batch["odd"]
        assert type(got) is type(leaf)
        assert got.layout == leaf.layout
        assert got.requires_grad == leaf.requires_grad
        if leaf.layout is torch.strided:
            expected = torch.empty_like(leaf)
            assert (got.dtype, got.size(), got.stride()) == (expected.dtype, expected.size(), expected.stride())
            assert torch.equal(got, leaf)
        else:
            assert torch.equal(got.to_dense(), leaf.to_dense())


@given(st.integers(0, 40), st.integers(1, 4))
def test_many_small_leaves_travel_in_one_copy(num_leaves, depth):
    ctx, device = make_virtual_context("eager")
    lane = CopyLane(ctx, depth)
    copies = []
    device.copy = lambda destination, source, stream: copies.append(source.numel())
    load = lane.stage([torch.ones(i + 1) for i in range(num_leaves)], threading.Event())
    lane.deliver([load])
    lane.close([])
    assert len(copies) == (num_leaves if num_leaves < MANY_SMALL_LEAVES else 1)


def test_batches_made_under_inference_mode_can_be_trained_with(virtual_feed):
    fed, device = virtual_feed([make_batch(i, 1, 8) for i in range(8)])
    passing = iter(fed)
    with torch.inference_mode():
        first = [next(passing) for _ in range(4)]
    rest = list(passing)  # among them batches whose memory was prepared above
    device.synchronize()
    assert not any(batch[0].is_inference() for batch in first + rest)
    assert [int(batch[0][0]) for batch in first + rest] == [i * 7 + 1 for i in range(8)]


# --- when something fails


def test_when_memory_is_short_nothing_is_taken_ahead(virtual_feed):
    batches = [make_batch(i, 1, 64) for i in range(10)]
    fed, device = virtual_feed(batches, 3, "eager")
    passing = iter(fed)
    kept = [next(passing) for _ in range(2)]
    device.free_bytes = 0
    with pytest.raises(torch.OutOfMemoryError):
        kept.extend(passing)
    at = len(kept)
    device.free_bytes = None
    kept += passing  # nothing was lost: the batch that had no room comes first
    assert at < 10
    assert [int(batch[0][0]) for batch in kept] == [i * 7 + 1 for i in range(10)]


def test_asking_for_a_batch_inside_a_capture_is_refused_and_loses_nothing(virtual_feed):
    fed, device = virtual_feed([make_batch(i, 1, 64) for i in range(3)], 2, "eager")
    passing = iter(fed)
    device.capturing = True
    with pytest.raises(FeedError, match="being captured"):
        next(passing)
    device.capturing = False
    assert [int(batch[0][0]) for batch in passing] == [1, 8, 15]


def test_nothing_unsafe_happens_while_another_thread_captures(virtual_feed):
    fed, device = virtual_feed([make_batch(i, 1, 64) for i in range(40)], 2, "random")
    forbidden = []
    lock = device.context.capture_lock
    capturing = threading.Event()

    def watch(name):
        original = getattr(device, name)

        def call(*args, **kwargs):
            if capturing.is_set():
                forbidden.append(name)
            return original(*args, **kwargs)

        setattr(device, name, call)

    for name in ("allocate", "pin", "copy"):
        watch(name)
    device.on_query = lambda: forbidden.append("query") if capturing.is_set() else None
    done = threading.Event()

    def capture():
        while not done.is_set():
            with lock:
                capturing.set()
                done.wait(1e-4)
                capturing.clear()

    thread = threading.Thread(target=capture)
    thread.start()
    got = list(fed)
    done.set()
    thread.join()
    assert len(got) == 40
    assert forbidden == []


def test_when_pinning_is_refused_batches_still_arrive(virtual_feed):
    batches = [make_batch(i, 2, 64) for i in range(10)]
    fed, device = virtual_feed(batches, 2, "random")
    device.refuse_to_pin = True
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert train(fed, device, batches, random.Random(0))
    assert [w.category for w in seen] == [FallbackWarning]


def test_closing_the_context_ends_the_feed(virtual_feed):
    fed, device = virtual_feed([make_batch(i, 1, 64) for i in range(40)], 2, "random")
    passing = iter(fed)
    next(passing)
    device.context.close()
    assert feed_threads() == []
    with pytest.raises(FeedError, match="context was closed"):
        next(passing)
