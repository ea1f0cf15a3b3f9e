"""The way to a device, on a virtual one that runs everything as late, as early or as unevenly as a real one may."""

import random
import sys
import threading
import warnings
from array import array
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.data import register
from millstream.data.profiler import Profiler
from millstream.data.transfer import extras, staging
from millstream.data.transfer import to_gpu as device_transfer
from millstream.data.transfer.batch_layout import cut, describe_leaves, plan_layout
from millstream.data.transfer.buffers import BatchBuffer, BufferPool
from millstream.data.transfer.to_gpu import DeviceTransfer
from millstream.device.cuda_graphs.capturing import capture
from millstream.device.pools.events import EventPool
from millstream.errors import FallbackWarning, FeedError
from tests.clocks import HANG_S, until
from tests.data.conftest import feed_threads
from tests.device.virtual_device import VirtualDevice, VirtualEvent, make_virtual_context

MOODS = ["eager", "lazy", "random"]


def make_batch(number, num_leaves, size):
    return [torch.full((size + 3 * i,), (number * 7 + i) % 250 + 1, dtype=torch.uint8) for i in range(num_leaves)]


def settle(device):
    """Have every pinned block that was given back with an event come home."""
    device.synchronize()
    device.context.release_pinned(device.context.pinned(1))


def sizes_of(device):
    return sorted({raw.nbytes for raw in list(device.raw_of.values())})


def train(fed, device, batches, rng, *, switch=False, keep=0.3, stop_after=None, num_whole=0, closes=True):
    """Read every batch by kernels that run late, drop most of them at once; whether all saw what was sent.

    The pass that is looked at and left is behind ``num_whole`` that are gone through to their ends.
    """
    results, expected, kept = [], [], []
    streams = [device.default, device.context.streams[0], device.context.streams[1]]
    with device.on(device.default):
        for is_last in (*(False,) * num_whole, True):
            passing = iter(fed)
            for number in range(len(batches) if stop_after is None or not is_last else min(stop_after, len(batches))):
                if switch:
                    device.local.stream = rng.choice(streams)
                got = next(passing)
                if rng.random() < 0.5:
                    device.scribble(rng.choice(sizes_of(device)))  # a temporary in freed memory
                for leaf, sent in zip(got, batches[number], strict=True):
                    seen = []
                    device.read(leaf, seen)
                    results.append(seen)
                    expected.append(sent.numpy().tobytes())
                if rng.random() < keep:
                    kept.append((got, batches[number]))
                del got, leaf
                if switch and kept and rng.random() < 0.4:  # to memory of a stream that may be another than the present
                    del kept[rng.randrange(len(kept))]
                for _ in range(rng.randint(0, 3)):
                    device.scribble(rng.choice(sizes_of(device)))
                if rng.random() < 0.2:
                    device.run_some()
            assert is_last or next(passing, None) is None
            del passing
        if closes:
            fed.close()
    # What the user allocates after leaving must not be hit by copies that are still under way.
    after = [(device.allocate(size), size) for size in sizes_of(device) * 3]
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


@pytest.fixture(autouse=True)
def _sections(monkeypatch):
    monkeypatch.setattr(device_transfer, "CHUNK_BYTES", device_transfer.CHUNK_BYTES)  # restored after each test


def run_once(virtual_feed, seed, mood, plant=None, *, prefetch=True, **options):
    rng = random.Random(seed)
    sizes = rng.choice([[64], [64, 100], [1, 64, 300, 5000], [70_000]])
    leaves = rng.choice([[1], [2], [1, 3], [18]])
    batches = [make_batch(i, rng.choice(leaves), rng.choice(sizes)) for i in range(rng.randint(1, 12))]
    device_transfer.CHUNK_BYTES = rng.choice(
        [sum(leaf.nbytes for leaf in batches[0]) // rng.randint(1, 9) + 1, 1 << 20]
    )
    fed, device = virtual_feed(batches, rng.randint(1, 4), mood, seed, prefetch=prefetch)
    device.context.streams.to_device  # noqa: B018 - made now, so that a fault can be planted in it
    if plant:
        plant(device)
    right = train(fed, device, batches, rng, **options)
    settle(device)
    assert device.context._arena.num_lent == 0
    assert device.context.events.num_lent == 0
    return right


# --- right under every order of events


@pytest.fixture(params=[True, False], ids=["", "inline"])
def prefetch(request):
    """Whether passes have a worker."""
    return request.param


@pytest.mark.parametrize("mood", MOODS)
def test_kernels_see_the_right_bytes_whenever_they_run(virtual_feed, mood, prefetch):
    for seed in range(30):
        assert run_once(virtual_feed, seed, mood, prefetch=prefetch), seed


@pytest.mark.parametrize("mood", MOODS)
def test_also_when_the_consumer_changes_streams(virtual_feed, mood, prefetch):
    for seed in range(30):
        assert run_once(virtual_feed, seed, mood, prefetch=prefetch, switch=True, keep=0.5), seed


@pytest.mark.parametrize("mood", MOODS)
def test_also_when_the_loop_is_left_early(virtual_feed, mood, prefetch):
    for seed in range(30):
        assert run_once(virtual_feed, seed, mood, prefetch=prefetch, stop_after=seed % 4), seed


@pytest.mark.parametrize("mood", MOODS)
def test_also_in_passes_that_take_over_the_slots_of_others(virtual_feed, mood, prefetch):
    for seed in range(24):
        options = {"switch": seed % 2, "keep": 0.4, "stop_after": (None, seed % 4)[seed % 3 == 0]}
        assert run_once(virtual_feed, seed, mood, prefetch=prefetch, num_whole=1 + seed % 3, **options), seed


@pytest.mark.parametrize("mood", MOODS)
def test_also_without_compiled_code(virtual_feed, mood, monkeypatch):
    monkeypatch.setattr(staging, "filler", lambda: None)
    for seed in range(20):
        assert run_once(virtual_feed, seed, mood), seed


def test_memory_does_not_go_back_while_helpers_write_to_it(monkeypatch):
    """An interrupt came before anybody knew of the slot."""
    ctx, _device = make_virtual_context("eager")
    leaves = [torch.ones(1 << 20)]
    pool = staging.StagingPool(ctx, 2)
    layout = plan_layout(describe_leaves(leaves))
    addresses = array("Q", [leaves[0].data_ptr()])
    pool.begin_fill(layout, *cut(layout, sys.maxsize), leaves, threading.Event(), addresses)
    (slot,) = pool._buffers
    assert slot.filling is not None
    unfinished = []
    monkeypatch.setattr(ctx, "release_pinned", lambda *_, **__: unfinished.append(slot.filling is not None))
    pool.close()
    assert unfinished == [False]


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_memory_does_not_go_back_under_a_copy_that_was_interrupted(virtual_feed, monkeypatch, when):
    fed, device = virtual_feed([torch.full((64,), float(i)) for i in range(5)], 2, "lazy", prefetch=False)
    copy = device.copy

    def interrupt(copies):
        if when != "before":
            copy(copies if when == "after" else copies._replace(after=()))
        raise KeyboardInterrupt

    passing = iter(fed)
    next(passing)
    monkeypatch.setattr(device, "copy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(passing)
    assert_nothing_is_overwritten(fed, device, passing)


@pytest.mark.parametrize("when", ["before", "after"])
def test_nor_under_one_that_was_prepared(virtual_feed, monkeypatch, when):
    fed, device = virtual_feed([torch.full((64,), float(i)) for i in range(40)], 2, "eager", prefetch=False)
    passing = iter(fed)
    for _ in range(30):
        next(passing)
    device.mood = "lazy"

    def interrupt(send):
        if when == "after":
            send()
        raise KeyboardInterrupt

    for slot in fed._engine.transfer.pool.buffers:
        assert slot.sends
        slot.sends = {opening: lambda send=send: interrupt(send) for opening, send in slot.sends.items()}
    with pytest.raises(KeyboardInterrupt):
        next(passing)
    assert_nothing_is_overwritten(fed, device, passing)


def assert_nothing_is_overwritten(fed, device, passing):
    device.run_some = lambda: None  # no time passes while the host asks
    pinned = fed._engine.transfer._pinned._buffers
    blocks = [each.memory.data_ptr() for each in pinned if each.busy and not each.copied.ticket.reached]
    fed.close()
    assert device.context.pinned(256).data_ptr() not in blocks  # the copy is still to read them
    mine = device.allocate(256)
    raw = device.raw(mine)
    device.default.enqueue(lambda: raw.fill(0xCC))
    while device.default.queue:  # this stream first, the copies as late as its waits allow
        ready, run = device.default.queue[0]
        device.run_until(ready)
        device.default.queue.remove((ready, run))
        run()
    device.synchronize()
    assert set(raw) == {0xCC}


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


def test_a_missing_wait_for_the_drop_is_caught(virtual_feed, monkeypatch):
    release = BufferPool._release

    def release_unseen(pool, lease):  # the buffer is filled again under the user's kernels
        release(pool, lease)
        lease.buffer.was_lent = False

    monkeypatch.setattr(BufferPool, "_release", release_unseen)
    outcomes = [run_once(virtual_feed, seed, mood) for seed in range(20) for mood in MOODS]
    assert not all(outcomes)


def test_a_slot_that_is_filled_while_it_is_held_is_caught(virtual_feed, monkeypatch):
    def take_back(pool, lease):  # the pool takes back what the user has kept
        lease.claims.clear()
        if lease.num_left:
            lease.num_left.clear()
            pool._release(lease)

    monkeypatch.setattr(BufferPool, "_detach", take_back)
    outcomes = [run_once(virtual_feed, seed, mood, keep=0.8) for seed in range(20) for mood in MOODS]
    assert not all(outcomes)


def test_copies_that_were_prepared_for_other_memory_are_caught(virtual_feed, monkeypatch):
    monkeypatch.setattr(
        BatchBuffer, "forget_layout", lambda buffer: setattr(buffer, "layout", None)
    )  # it keeps what was prepared
    assert not all(run_prepared(virtual_feed, seed, keep=0.5) for seed in range(30))


def test_copies_that_were_prepared_for_other_bytes_are_not_enqueued(virtual_feed):
    """As where a batch was staged in sections, and then whole because memory was short: its layout is the same."""
    fed, _ = virtual_feed([torch.ones(64) for _ in range(30)], 2, "eager")
    passing = iter(fed)
    for _ in range(20):
        next(passing)
    lane = fed._engine.transfer
    slot, pinned = lane.pool.buffers[0], next(each for each in lane._pinned._buffers if each.plan is not None)
    slot.sends[pinned.plan] = lambda: 0
    lane._pinned._open(pinned, slot.layout, *cut(slot.layout, sys.maxsize))
    assert pinned.plan not in slot.sends
    fed.close()


def run_prepared(virtual_feed, seed, **options):
    """Many batches of one form, and then a few of others, so that most copies are prepared ones."""
    rng = random.Random(seed)
    sizes = [64] * 20 + [rng.choice([64, 300, 5000]) for _ in range(20)]
    batches = [make_batch(i, 1, size) for i, size in enumerate(sizes)]
    fed, device = virtual_feed(batches, 2, rng.choice(MOODS), seed)
    right = train(fed, device, batches, rng, **options)
    settle(device)
    return right


@pytest.mark.parametrize("mood", MOODS)
def test_prepared_copies_carry_the_right_bytes(virtual_feed, mood):
    for seed in range(30):
        assert run_prepared(virtual_feed, seed, keep=0.1), seed


def test_a_prepared_copy_that_the_driver_refuses_is_made_by_pytorch(virtual_feed, monkeypatch, prefetch):
    monkeypatch.setattr(Profiler, "_draw_distance", lambda *_: 10**9)  # measured copies are not prepared
    batches = [make_batch(i, 1, 64) for i in range(40)]
    fed, device = virtual_feed(batches, 2, "eager", prefetch=prefetch)
    prepare, asked, copied = device.prepare_copy, [], []

    def prepare_one_that_fails(transfer):
        send = prepare(transfer)
        return lambda: asked.append(None) or (1 if len(asked) % 3 else send())

    def copy_for_real(transfer):
        copied.append(None)
        prepare(transfer)()

    monkeypatch.setattr(device, "prepare_copy", prepare_one_that_fails)
    monkeypatch.setattr(device, "copy", copy_for_real)
    assert train(fed, device, batches, random.Random(0), keep=0.0)
    settle(device)
    assert len(asked) > len(copied) >= 10


def test_a_batch_that_looks_like_the_one_before_takes_two_records(virtual_feed, monkeypatch):
    fed, device = virtual_feed([torch.ones(64) for _ in range(40)], 2, "eager", prefetch=False)
    records, prepared = [], []
    record, prepare = VirtualEvent.record, device.prepare_copy
    monkeypatch.setattr(Profiler, "_draw_distance", lambda *_: 10**9)
    monkeypatch.setattr(device, "prepare_copy", lambda *arguments: prepared.append(None) or prepare(*arguments))
    passing = iter(fed)
    for _ in range(30):
        next(passing)  # and drop it
    monkeypatch.setattr(VirtualEvent, "record", lambda self, stream: records.append(stream) or record(self, stream))
    prepared.clear()
    for _ in range(6):
        next(passing)
    # After the copy, and where it was dropped.
    assert Counter(records) == {device.context.streams.to_device: 6, device.default: 6}
    assert not prepared
    fed.close()


@pytest.mark.parametrize("late", [False, True])
def test_slots_are_free_when_a_copy_enqueued_later_is_over(late):
    """And not when one that was staged later is: a batch for which memory was short is sent late."""
    ctx, device = make_virtual_context("lazy")
    device.run_some = lambda: None  # no time passes while it is asked
    leaves = [torch.ones(64)]
    layout = plan_layout(describe_leaves(leaves))
    pool = staging.StagingPool(ctx, 3)

    def fill():
        slot = pool.begin_fill(layout, *cut(layout, sys.maxsize), leaves, threading.Event())
        slot.finish()
        return slot

    def send(slot):
        slot.busy, slot.turn = True, next(pool.turns)
        slot.copied.record(ctx.streams.to_device)

    first, second, third = fill(), fill(), fill()
    for slot in (second, third) if late else (first, second):
        send(slot)
    device.synchronize()
    send(first if late else third)
    queries = device.num_queries
    found = pool._find(layout.num_bytes)
    assert (found is first) is not late  # else it takes a new one
    is_read = [slot.busy and slot.turn > pool._over for slot in (first, second, third)]
    assert is_read == ([True, False, True] if late else [False, False, True])
    assert device.num_queries == queries + (2 if late else 1)
    device.synchronize()
    pool.close()


def test_a_missing_wait_at_the_end_is_caught(virtual_feed, monkeypatch):
    close = BufferPool.close

    def close_without_waiting(pool):  # undelivered memory is freed under its copy
        for buffer in pool.buffers:
            buffer.is_written = buffer.was_lent = False
        close(pool)

    monkeypatch.setattr(BufferPool, "close", close_without_waiting)
    outcomes = [run_once(virtual_feed, seed, "lazy", stop_after=seed % 4) for seed in range(60)]
    assert not all(outcomes)


def test_a_missing_wait_of_the_old_stream_is_caught(virtual_feed, monkeypatch):
    monkeypatch.setattr(EventPool, "order", lambda self, first, then: None)
    outcomes = [run_once(virtual_feed, seed, "lazy", switch=True, keep=0.5) for seed in range(60)]
    assert not all(outcomes)


# --- what it costs


def test_a_feed_keeps_to_what_a_few_batches_need(virtual_feed):
    fed, device = virtual_feed([make_batch(i, 3, 5000) for i in range(6)], 2, "random")
    for _ in range(30):
        for batch in fed:
            device.read(batch[0], [])
            del batch
        settle(device)
    assert device.num_pins == 1  # the whole pool at once, for all epochs
    assert len(device.streams) == 2  # the consumer's and the copy stream, for life
    assert device.num_raw == 2  # depth times a batch on the device, in one parcel each
    assert len(device.context.events._idle[False]) <= 3 + 2 * 2 + 2  # pinned slots, slots, and one in passing


def held(device):
    """How many pieces of the device's memory are not free."""
    return device.num_raw - sum(len(each) for sizes in device.free.values() for each in sizes.values())


def go_through(fed, device, until=None):
    for number, batch in enumerate(fed):
        device.read(batch[0], [])
        if number == until:
            break
        del batch
    settle(device)


@pytest.mark.parametrize("way", ["closed", "dropped", "context"])
def test_a_pass_takes_over_the_slots_of_the_one_before_until_the_feed_goes(virtual_feed, prefetch, way):
    fed, device = virtual_feed([make_batch(i, 1, 500) for i in range(6)])
    made = set()
    for _ in range(3):
        go_through(fed, device)
        made.add(fed._engine.transfer)
        assert held(device) == 2
    assert len(made) == 1
    made.clear()
    if way == "closed":
        fed.close()
    elif way == "context":
        device.context.close()
    if way != "context":
        del fed
        settle(device)
        assert device.context.events.num_lent == 0
        assert device.context._arena.num_lent == 0
    assert held(device) == 0


@pytest.mark.parametrize("why", ["large", "gone"])
def test_slots_do_not_wait_for_another_pass(virtual_feed, prefetch, why, monkeypatch):
    batches = [make_batch(i, 1, 500) for i in range(6)]
    if why == "large":
        monkeypatch.setattr(device_transfer, "MOST_KEPT_BYTES", 999)
    fed, device = virtual_feed(batches)
    if why == "gone":  # as in a loop over a feed that nobody else knows
        passing = iter(fed)
        del fed
        assert len(list(passing)) == 6
        del passing
        settle(device)
    else:
        go_through(fed, device)
    assert held(device) == 0
    assert device.context._arena.num_lent == 0


def test_slots_that_wait_keep_no_results_of_a_transform(virtual_feed, prefetch):
    fed, device = virtual_feed([make_batch(i, 1, 500) for i in range(6)], transform=lambda batch: device.allocate(7000))
    for batch in fed:
        del batch
    settle(device)
    assert held(device) == 2  # the slots
    for batch in fed:  # noqa: B007 - the last is held beyond the pass
        pass
    del batch
    settle(device)
    assert held(device) == 2


def test_a_pass_allocates_for_its_own_stream(virtual_feed, prefetch):
    batches = [make_batch(i, 1, 500) for i in range(4)]
    fed, device = virtual_feed(batches)
    streams, allocate = [], device.allocate
    device.allocate = lambda num_bytes: (streams.append(device.current_stream()), allocate(num_bytes))[1]
    for stream in (device.context.streams[0], device.context.streams[1]):
        with device.on(stream):
            streams.clear()
            kept = list(fed)
        assert set(streams) <= {stream}
        assert streams
        del kept


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_a_loop_that_keeps_nothing_allocates_nothing(virtual_feed, depth):
    fed, device = virtual_feed([make_batch(i, 3, 90_000) for i in range(30)], depth, "random")
    addresses = set()
    for i, batch in enumerate(fed):
        if i == depth + 3:
            before = device.num_raw, device.num_pins, len(device.streams)
        addresses.add(batch[0].data_ptr())
        device.read(batch[0], [])
    assert (device.num_raw, device.num_pins, len(device.streams)) == before
    assert device.num_raw == 3 * max(depth, 2)
    assert len(addresses) == max(depth, 2)
    assert fed.stats().num_kept == 0


def test_who_keeps_one_leaf_keeps_nothing_else(virtual_feed):
    batches = [[torch.full((100_000,), float(i)), torch.tensor([i])] for i in range(10)]
    fed, device = virtual_feed(batches, 2, "random")
    labels = [batch[1] for batch in fed]
    device.synchronize()
    assert [int(label) for label in labels] == list(range(10))
    large = [raw for raw in device.raw_of.values() if raw.nbytes > 1000]
    assert len(large) == 2
    assert fed.stats().num_kept >= 8


def test_a_batch_may_be_kept_by_what_was_made_from_it(virtual_feed):
    fed, device = virtual_feed([torch.full((4,), float(i)) for i in range(20)], 2, "lazy")
    views = [batch.view(2, 2)[1] for batch in fed]  # views of dropped tensors
    device.synchronize()
    assert [float(view[0]) for view in views] == list(range(20))


def test_the_host_does_not_wait_for_the_device(virtual_feed):
    fed, device = virtual_feed([make_batch(i, 2, 50) for i in range(2)], 2, "lazy")
    passing = iter(fed)
    got = [next(passing)]
    assert device.num_queries == 0
    assert any(stream.queue for stream in device.streams)
    assert int(got[0][0][0]) != 1  # nothing has arrived yet, and nobody has waited for it
    device.synchronize()
    assert int(got[0][0][0]) == 1


def test_a_copy_does_not_wait_for_the_step_that_it_should_run_beside():
    """Batch k+2 lands where batch k was: after step k, beside step k+1."""
    ctx, device = make_virtual_context("lazy")
    lane = DeviceTransfer(ctx, 2)

    def pass_on(i):
        load = lane.prepare(make_batch(i, 1, 64))
        assert lane.stage(load)
        assert lane.send(load, measured=False)
        return load

    loads = [pass_on(0), pass_on(1)]
    done = []
    batch = None
    for i in range(2):
        lane.ask()
        batch = lane.deliver(loads.pop(0))  # drops the batch before
        device.default.enqueue(lambda i=i: done.append(i), ready=lambda i=i: i == 0 or len(done) == 1)
    blocker = []
    device.default.enqueue(lambda: None, ready=lambda: bool(blocker))  # step 1 takes for ever
    third = pass_on(2)
    while device.run_one():
        pass
    assert done == [0, 1]
    assert third.ready.query()
    blocker.append(True)
    device.synchronize()
    assert int(batch[0][0]) == 8
    del batch
    lane.close()


def test_slots_grow_with_the_batches_and_reuse_what_they_leave(virtual_feed):
    sizes = [10, 100, 1_000, 10_000, 100_000, 1_000_000, 500, 1_000_000, 3]
    batches = [make_batch(i, 2, size) for i, size in enumerate(sizes)]
    fed, device = virtual_feed(batches, 2, "random")
    for _ in range(3):
        assert train(fed, device, batches, random.Random(0), closes=False)
    assert device.context.pinned_bytes <= 16 << 20  # three slots of two leaves of 1 MB, and what led up to them


def test_a_batch_without_any_bytes(virtual_feed):
    fed, device = virtual_feed([[torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int64)], "nothing", ()] * 4)
    got = list(fed)
    device.synchronize()
    assert [tuple(leaf.size()) for leaf in got[0]] == [(0, 3), (2, 0)]
    assert got[1:3] == ["nothing", ()]


def test_aliases_and_expanded_tensors_arrive_as_such(virtual_feed):
    x = torch.arange(6.0).view(2, 3)
    fed, device = virtual_feed([{"x": x, "again": x, "turned": x.t(), "wide": x[:, :1].expand(2, 500)}] * 3)
    for batch in fed:
        device.synchronize()
        assert torch.equal(batch["turned"], x.t())
        assert torch.equal(batch["wide"], x[:, :1].expand(2, 500))
        assert batch["wide"].stride()[1] == 0
        batch["x"][1, 2] = -1
        assert batch["again"][1, 2] == batch["turned"][2, 1] == -1
    assert device.num_raw == 2


def test_arrays_packed_sequences_and_jagged_tensors_arrive(virtual_feed):
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.zeros(2)])
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.zeros(4)], layout=torch.jagged)
    batch = {"a": np.arange(5), "p": packed, "j": jagged, "words": np.array(["x"])}
    fed, device = virtual_feed([batch] * 3, mood="eager")
    for got in fed:
        assert torch.equal(got["a"], torch.arange(5))
        assert torch.equal(got["p"].data, packed.data)
        assert [len(row) for row in got["j"].unbind()] == [1, 4]
        assert got["words"] is batch["words"]
    assert device.num_raw == 2


class Mover:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Mover(self.x.to(device) + 1)


class Total:
    def __init__(self, x):
        self.x, self.total = x, float(x.sum())


class Doubled:
    def __init__(self, x):
        self.x = x.double()  # and keeps nothing of what it was given


def test_types_that_compute_when_they_are_made_see_the_batch(virtual_feed):
    register(Total, lambda batch: ([batch.x], lambda parts: Total(*parts)))
    register(Doubled, lambda batch: ([batch.x], lambda parts: Doubled(*parts)))
    sent = [torch.full((100,), float(i)) for i in range(8)]
    fed, _ = virtual_feed([Total(x) for x in sent], mood="eager")
    assert [batch.total for batch in fed] == [100.0 * i for i in range(8)]
    fed, _ = virtual_feed([Doubled(x) for x in sent], mood="eager")
    assert [float(batch.x[0]) for batch in fed] == [*range(8)]


def test_objects_with_to_are_moved_by_it(virtual_feed):
    fed, _ = virtual_feed([[Mover(torch.zeros(1)), torch.ones(1)]] * 3)
    assert [float(got[0].x) for got in fed] == [1, 1, 1]


@given(st.integers(0, 40), st.integers(1, 4))
def test_many_small_leaves_travel_in_one_copy(num_leaves, depth):
    ctx, device = make_virtual_context("eager")
    lane = DeviceTransfer(ctx, depth)
    copies = []
    device.copy = lambda given: copies.extend(source.numel() for _, source in given.pairs)
    device.prepare_copy = lambda *_: None
    load = lane.prepare([torch.ones(i + 1) for i in range(num_leaves)])
    lane.stage(load)
    lane.send(load, measured=False)
    lane.deliver(load)
    lane.close()
    assert len(copies) == min(num_leaves, 1)


def test_batches_of_a_source_under_inference_mode_can_be_trained_with(virtual_feed):
    def source():
        for i in range(12):
            with torch.inference_mode(i % 8 > 3):  # it is on in the worker while the generator waits
                yield make_batch(i, 1, 8)

    fed, device = virtual_feed(source())
    batches = list(fed)
    device.synchronize()
    assert not any(batch[0].is_inference() for batch in batches)
    assert [int(batch[0][0]) for batch in batches] == [i * 7 + 1 for i in range(12)]


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


def test_when_memory_is_short_the_consumer_learns_it_and_loses_nothing(virtual_feed):
    batches = [make_batch(i, 1, 64) for i in range(10)]
    fed, device = virtual_feed(batches, 3, "eager")
    passing = iter(fed)
    kept = [next(passing) for _ in range(2)]
    device.free_bytes = 0
    with pytest.raises(torch.OutOfMemoryError):
        kept.extend(passing)
    at = len(kept)
    with pytest.raises(torch.OutOfMemoryError):
        next(passing)
    device.free_bytes = None
    kept += passing  # nothing was lost: the batch that had no room comes first
    assert at < 10
    assert [int(batch[0][0]) for batch in kept] == [i * 7 + 1 for i in range(10)]


@pytest.mark.parametrize("options", [{}, {"transform": lambda batch: [each * 2 for each in batch]}])
def test_a_batch_in_sections_arrives_whole(virtual_feed, options):
    device_transfer.CHUNK_BYTES = 4096
    batches = [[torch.randint(0, 99, (50_000,), dtype=torch.uint8), torch.arange(9_000) * i] for i in range(9)]
    fed, device = virtual_feed(batches, 2, "eager" if "transform" in options else "random", **options)
    got = list(fed)
    device.synchronize()
    factor = 2 if "transform" in options else 1
    pairs = [pair for one, other in zip(got, batches, strict=True) for pair in zip(one, other, strict=True)]
    assert all(torch.equal(arrived, sent * factor) for arrived, sent in pairs)


def test_no_copy_waits_for_the_step_before_where_a_transform_makes_batches(virtual_feed, monkeypatch):
    """Although that step's batch was dropped before the next one was asked for, and its memory is the copy stream's."""
    fed, device = virtual_feed(
        ([torch.ones(10)] for _ in range(8)), 2, "lazy", transform=lambda batch: [batch[0] * 2], prefetch=False
    )
    may_run = [False] * 8
    passing = iter(fed)
    for number in range(8):
        batch = next(passing)
        while device.run_one():  # all but the step before
            pass
        assert number < 2 or not device.context.streams.to_device.queue, "memory was allocated for the first two"
        may_run[:number] = [True] * number
        device.default.enqueue(lambda: None, ready=lambda number=number: may_run[number])
        del batch
    may_run[:] = [True] * 8
    fed.close()
    settle(device)
    assert device.context.events.num_lent == 0


def test_what_the_source_made_on_the_device_is_read_before_its_memory_is_used_again(virtual_feed, monkeypatch):
    """By a transform, which reads it on the copy stream, and of which nobody knows whether it keeps any of it."""
    device = None

    def fill(memory, value):
        raw = device.raw(memory)
        device.current_stream().enqueue(lambda: raw.fill(value))
        return memory

    def transform(memory):
        made, come_from = device.allocate(64), device.raw(memory)
        raw = device.raw(made)
        device.current_stream().enqueue(lambda: raw.__setitem__(slice(None), come_from))
        return made

    source = (fill(device.allocate(64), i + 1) for i in range(30))
    fed, device = virtual_feed(source, 2, "lazy", transform=transform)
    monkeypatch.setattr(extras, "can_be_staged", lambda leaf: device._find_raw(leaf) is None)
    monkeypatch.setattr(
        extras,
        "keep_resident",
        lambda *_: (
            extras.StreamMarker(device.context, device.current_stream(), timing=False),
            device.current_stream(),
        ),
    )
    got = []
    for batch in fed:
        device.read(batch, got)
    device.synchronize()
    assert [set(each) for each in got] == [{i + 1} for i in range(30)]


def test_a_transform_gets_all_of_a_batch_on_the_device(virtual_feed):
    class Graph:
        def __init__(self, nodes):
            self.nodes, self.is_moved = nodes, False

        def to(self, *_, **__):
            moved = Graph(self.nodes)
            moved.is_moved = True
            return moved

    seen = []

    def transform(graph):
        seen.append(graph.is_moved)
        graph.nodes = graph.nodes * 10
        return graph

    graphs = [Graph(torch.ones(2)) for _ in range(3)]
    fed, _ = virtual_feed(graphs, 2, "eager", transform=transform)
    for _ in range(2):
        assert [graph.nodes.tolist() for graph in fed] == [[10, 10]] * 3
    assert all(seen)
    assert all(graph.nodes.sum() == 2 for graph in graphs)


def test_what_must_be_packed_is_not_cut(virtual_feed):
    device_transfer.CHUNK_BYTES = 4096
    batches = [[(torch.arange(20_000) + i).view(100, 200)[:, ::2], torch.ones(9_000)] for i in range(5)]
    fed, device = virtual_feed(batches, 2, "random")
    got = list(fed)
    device.synchronize()
    assert all(torch.equal(one[0], other[0]) for one, other in zip(got, batches, strict=True))


def test_sections_need_no_more_pinned_memory_than_a_few_of_them(virtual_feed, monkeypatch):
    device_transfer.CHUNK_BYTES = 4096
    monkeypatch.setattr(staging, "SLACK_BYTES", 5 * 4096)
    fed, device = virtual_feed([[torch.full((400_000,), i, dtype=torch.uint8)] for i in range(4)], 2, "random")
    for i, batch in enumerate(fed):
        device.synchronize()
        assert bool((batch[0] == i).all())
    assert (
        sum(slot.memory.numel() for slot in fed._engine.transfer._pinned._buffers if slot.memory is not None)
        <= 5 * 4096
    )


def test_slots_are_made_ready_for_each_section_once(virtual_feed, monkeypatch):
    """It takes as long as to begin to fill them, and to send them."""
    device_transfer.CHUNK_BYTES = 4096
    fed, device = virtual_feed([[torch.full((8000,), i, dtype=torch.uint8)] for i in range(30)], 2, "lazy")
    copies, openings = [], []
    for cls, name, calls in ((VirtualDevice, "prepare_copy", copies), (staging.StagingPool, "_prepare", openings)):
        method = getattr(cls, name)
        spy = lambda *args, method=method, calls=calls, **options: calls.append(args) or method(*args, **options)  # noqa: E731
        monkeypatch.setattr(cls, name, spy)
    monkeypatch.setattr(Profiler, "_draw_distance", lambda *_: 10**9)  # measured copies are not prepared
    for i, batch in enumerate(fed):
        device.synchronize()
        assert bool((batch[0] == i).all())
        del batch
    assert len({(slot, section) for _, slot, _, section in openings}) == len(openings) > 2
    ends = [tuple(end.data_ptr() for end in pair) for _, ((pair,), *_) in copies]
    assert len({*ends}) == len(ends) > 2


def test_a_section_is_staged_while_the_one_before_is_sent(virtual_feed, monkeypatch):
    device_transfer.CHUNK_BYTES = 4096
    fed, _ = virtual_feed([[torch.ones(12_000, dtype=torch.uint8)]], 2, "lazy")
    done = []
    for cls, name in ((staging.StagingPool, "begin_fill"), (DeviceTransfer, "finish"), (DeviceTransfer, "_copy")):
        method = getattr(cls, name)
        spy = lambda *args, method=method, name=name, **options: done.append(name) or method(*args, **options)  # noqa: E731
        monkeypatch.setattr(cls, name, spy)
    list(fed)
    first = done.index("_copy")
    assert done[first - 2 : first] == ["finish", "begin_fill"]
    assert done.count("begin_fill") == done.count("_copy") == 3


def test_a_batch_in_sections_is_staged_whole_when_memory_is_short(virtual_feed):
    """Its source may be gone when there is room again."""
    device_transfer.CHUNK_BYTES = 4096

    def source():
        leaf = torch.empty(50_000, dtype=torch.uint8)
        for i in range(10):
            yield [leaf.fill_(i)]

    fed, device = virtual_feed(source(), 3, "eager")
    passing = iter(fed)
    kept = [next(passing) for _ in range(2)]
    device.free_bytes = 0
    with pytest.raises(torch.OutOfMemoryError):
        kept.extend(passing)
    device.free_bytes = None
    kept += passing
    device.synchronize()
    assert all(bool((batch[0] == i).all()) for i, batch in enumerate(kept))
    assert len(kept) == 10


def test_a_slot_that_was_left_to_the_consumer_is_never_taken_for_one_that_is_free(virtual_feed):
    """Its last copy is over for long, when the consumer begins to send it. The worker fills slots meanwhile."""
    fed, device = virtual_feed([torch.full((64,), float(i)) for i in range(30)], 2, "eager")
    passing = iter(fed)
    kept = [next(passing) for _ in range(10)]
    device.free_bytes = 0
    with pytest.raises(torch.OutOfMemoryError):
        kept.extend(passing)
    pool, seen = fed._engine.transfer._pinned, []
    is_left = [slot for slot in pool._buffers if slot.left]

    def count_turns(turns=pool.turns):
        for turn in turns:
            seen.append([slot.left or slot.turn > pool._over for slot in is_left])
            yield turn

    pool.turns = count_turns()
    device.free_bytes = None
    kept += passing
    assert is_left
    assert seen[0] == [True] * len(is_left)
    assert [int(batch[0]) for batch in kept] == [*range(30)]
    fed.close()


@pytest.mark.parametrize("num_short", [1, 3])
def test_batches_staged_for_later_are_not_overwritten_by_those_that_come_in_sections(virtual_feed, num_short):
    device_transfer.CHUNK_BYTES = 4096
    are_under_way = threading.Event()

    def source():
        leaf = torch.empty(50_000, dtype=torch.uint8)
        for i in range(-2, 8):  # the first two are pulled in step, and small
            if i == num_short:
                device.free_bytes = None
            if i == 3:
                are_under_way.set()
            yield [leaf.fill_(i) if i >= 0 else leaf[:10]]

    fed, device = virtual_feed(source(), 3, "eager")
    passing = iter(fed)
    next(passing)
    device.free_bytes = 4096
    next(passing)
    assert are_under_way.wait(HANG_S)
    got = [batch[0].clone() for batch in passing]
    device.synchronize()
    assert [each.unique().tolist() for each in got] == [[i] for i in range(8)]


def test_as_it_is_when_its_transform_runs_out_of_memory(virtual_feed):
    device_transfer.CHUNK_BYTES = 4096
    failures = iter([False, False, True])

    def transform(batch):
        batch[0].add_(1)  # in place, so that it must not be given the same bytes again
        if next(failures, False):
            raise torch.OutOfMemoryError
        return batch

    leaf = torch.empty(50_000, dtype=torch.uint8)
    fed, device = virtual_feed(([leaf.fill_(i)] for i in range(6)), 2, "eager", transform=transform)
    got = [batch[0].clone() for batch in fed]
    device.synchronize()
    assert [int(each[0]) for each in got] == [int(each[-1]) for each in got] == [*range(1, 7)]


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


def test_a_batch_that_is_dropped_inside_a_capture_comes_back_later(virtual_feed):
    fed, device = virtual_feed([make_batch(i, 1, 64) for i in range(6)], 2, "eager")
    passing = iter(fed)
    batch = next(passing)
    device.capturing = True
    recorded = len(device.default.queue)
    del batch
    assert len(device.default.queue) == recorded  # the event would have become a part of the graph
    device.capturing = False
    assert [int(batch[0][0]) for batch in passing] == [8, 15, 22, 29, 36]


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


def test_arrays_that_overlap_are_staged_without_compiled_code(virtual_feed, monkeypatch):
    monkeypatch.setattr(staging, "filler", lambda: None)
    array = np.arange(6.0)
    batch = [torch.from_numpy(array[:3]), torch.from_numpy(array), torch.from_numpy(array)[1::2]]
    ((first, whole, odd),) = virtual_feed([batch], mood="eager")[0]
    assert [each.tolist() for each in (first, whole, odd)] == [[0, 1, 2], [0, 1, 2, 3, 4, 5], [1, 3, 5]]


def test_a_transform_that_calls_an_engine_and_a_loop_that_captures_do_not_wait_for_each_other(
    virtual_feed, monkeypatch
):
    """An engine takes the lock of graphs, and then that of captures."""

    class Graph:
        def capture_begin(self, *_, **__):
            pass

        def capture_end(self):
            pass

    def transform(batch):
        is_inside.set()
        if is_capturing_soon.is_set() and not device.context.graphs.lock._is_owned():
            assert has_lock.wait(HANG_S)  # taken now, it would be the second of two
        with device.context.graphs.lock:
            return batch

    def capture_while_it_is_inside():
        is_inside.wait()
        with device.context.graphs.lock:
            has_lock.set()
            with capture(device.context, Graph()):
                done.set()

    is_inside, is_capturing_soon, has_lock, done = (threading.Event() for _ in range(4))
    got = []
    fed, device = virtual_feed([torch.ones(64)] * 6, transform=transform, mood="eager")
    passing = iter(fed)
    next(passing)
    is_inside.clear()
    is_capturing_soon.set()
    for work in (capture_while_it_is_inside, lambda: got.extend(passing)):
        threading.Thread(target=work, daemon=True).start()
    assert done.wait(HANG_S)
    until(lambda: len(got) == 5)


@pytest.mark.parametrize("keeps_error", [False, True])
def test_a_transform_that_raises_in_every_pass_takes_no_buffer_along(virtual_feed, prefetch, keeps_error):
    def transform(batch):
        if fails and batch[0] == 2:
            raise LookupError("of the user's")
        return batch * 2

    batches = [torch.full((3,), float(i)) for i in range(5)]
    fed, _ = virtual_feed(batches, mood="eager", transform=transform, prefetch=prefetch)
    fails, errors = True, []
    for _ in range(4):
        with pytest.raises(LookupError) as caught:
            list(fed)
        errors.append(caught if keeps_error else None)
    pool = fed._engine.transfer.pool
    assert len(pool._free) == len(pool.buffers)
    fails = False
    assert [batch[0].item() for batch in fed] == [0.0, 2.0, 4.0, 6.0, 8.0]
