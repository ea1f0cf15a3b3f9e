import itertools
import threading
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.device.handles import NullEvent
from millstream.device.pools.pinned_arena import ALIGNMENT_BYTES, MIN_CHUNK_BYTES, FreeRanges, PinnedArena
from millstream.errors import ArgumentError, DeviceError, FallbackWarning


class SlowEvent(NullEvent):
    def __init__(self):
        super().__init__()
        self.reached = False
        self.waited = False

    def query(self):
        return self.reached

    def synchronize(self):
        self.waited = self.reached = True


class Pinner:
    def __init__(self, limit=None):
        self.sizes = []
        self.limit = limit

    def __call__(self, num_bytes):
        if self.limit is not None and num_bytes > self.limit:
            raise RuntimeError("CUDA error: out of memory")
        self.sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)


def make_arena(limit=None):
    pinner, recycled = Pinner(limit), []
    return PinnedArena(pinner, recycled.append), pinner, recycled


def span(block):
    start = block.untyped_storage().data_ptr() + block.storage_offset()
    return start, start + block.numel()


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 7)), max_size=60))
def test_free_ranges_against_a_bitmap(requests):
    ranges, bitmap, taken = FreeRanges(256), [True] * 256, []
    for size, drop in requests:
        start = ranges.take(size)
        if start is None:
            assert not any(all(bitmap[i : i + size]) for i in range(256 - size + 1))
        else:
            assert all(bitmap[start : start + size])
            bitmap[start : start + size] = [False] * size
            taken.append((start, size))
        if drop < len(taken):
            start, length = taken.pop(drop)
            ranges.give_back(start, length)
            bitmap[start : start + length] = [True] * length
        assert ranges.num_bytes == sum(bitmap)
    for start, size in taken:
        ranges.give_back(start, size)
    assert ranges.take(256) == 0  # all neighbours have joined again


@given(st.lists(st.tuples(st.integers(0, 3 << 20), st.booleans()), max_size=30))
def test_lent_blocks_are_disjoint_and_aligned(requests):
    arena, pinner, _ = make_arena()
    lent = []
    for size, give_back in requests:
        block = arena.take(size)
        assert block.numel() == size
        assert block.storage_offset() % ALIGNMENT_BYTES == 0
        lent.append(block)
        spans = sorted(span(b) for b in lent if b.numel())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        if give_back:
            arena.give_back(lent.pop(0), None)
    assert arena.num_lent == len(lent)
    assert all(size & (size - 1) == 0 and size >= MIN_CHUNK_BYTES for size in pinner.sizes)


def test_a_warm_arena_pins_nothing():
    arena, pinner, _ = make_arena()
    for _ in range(5):
        blocks = [arena.take(size) for size in (100, 3_000_000, 0, 700_000, 3_000_000)]
        for block in blocks:
            arena.give_back(block, None)
    first = len(pinner.sizes)
    for _ in range(50):
        for block in [arena.take(size) for size in (3_000_000, 700_000, 100, 3_000_000, 0)]:
            arena.give_back(block, None)
    assert len(pinner.sizes) == first


def test_reserved_blocks_share_one_chunk():
    arena, pinner, _ = make_arena()
    blocks = [arena.take(38_000_000, reserve_bytes=3 * 38_000_000) for _ in range(3)]
    assert pinner.sizes == [128 << 20]  # three chunks of their own would take 192 MiB
    assert len({span(b) for b in blocks}) == 3


def test_a_block_in_flight_is_not_lent_again():
    arena, pinner, recycled = make_arena()
    event = SlowEvent()
    block = arena.take(MIN_CHUNK_BYTES // 2)
    arena.give_back(block, event)
    other = arena.take(MIN_CHUNK_BYTES // 2)
    assert span(other) != span(block)
    assert recycled == []
    event.reached = True
    arena.give_back(other, None)
    assert {span(arena.take(MIN_CHUNK_BYTES // 2)), span(arena.take(MIN_CHUNK_BYTES // 2))} == {
        span(block),
        span(other),
    }
    assert recycled == [event]
    assert len(pinner.sizes) == 1


def test_a_full_arena_waits_for_a_copy_before_it_grows():
    arena, pinner, recycled = make_arena()
    event = SlowEvent()
    block = arena.take(MIN_CHUNK_BYTES)
    arena.give_back(block, event)
    assert span(arena.take(MIN_CHUNK_BYTES)) == span(block)
    assert event.waited
    assert recycled == [event]
    assert len(pinner.sizes) == 1


def test_what_is_not_lent_cannot_be_given_back():
    arena, _, _ = make_arena()
    block = arena.take(10)
    with pytest.raises(DeviceError, match="not a pinned block"):
        arena.give_back(torch.empty(10, dtype=torch.uint8), None)
    arena.give_back(block, None)
    with pytest.raises(DeviceError, match="given back before"):
        arena.give_back(block, None)


def test_a_negative_size():
    with pytest.raises(ArgumentError, match="-1"):
        make_arena()[0].take(-1)


def test_when_the_reserve_is_refused_the_block_alone_is_pinned():
    arena, pinner, _ = make_arena(limit=2 << 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena.take(2_000_000, reserve_bytes=6_000_000)
    assert pinner.sizes == [2 << 20]


def test_when_pinning_is_refused_memory_is_pageable_and_one_warning_says_so():
    arena, _, _ = make_arena(limit=0)
    with pytest.warns(FallbackWarning, match=r"refuses to pin 2,097,152 bytes.*out of memory.*ulimit"):
        block = arena.take(2_000_000)
    block.fill_(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = arena.take(2_000_000)
    assert other.numel() == 2_000_000
    assert int(block[0]) == int(block[-1]) == 3


def test_give_back_may_come_from_a_finalizer_in_the_middle_of_take():
    arena, pinner, _ = make_arena()
    kept = arena.take(100)

    def pin(num_bytes):  # take calls this while it holds its lock
        arena.give_back(kept, None)
        return pinner(num_bytes)

    arena._pin = pin
    block = arena.take(2 * MIN_CHUNK_BYTES)
    assert block.numel() == 2 * MIN_CHUNK_BYTES
    assert arena.num_lent == 1


def test_many_threads():
    arena, _, _ = make_arena()
    wrong = []

    def work(number):
        for i in range(200):
            block = arena.take(1000 + number * 37)
            block.fill_((number + i) % 251)
            if not bool((block == (number + i) % 251).all()):
                wrong.append((number, i))
            arena.give_back(block, None)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert arena.num_bytes == MIN_CHUNK_BYTES
