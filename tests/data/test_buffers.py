"""The buffer pool against a model: whoever may read a buffer's bytes, reads the right ones, whatever happens when."""

import sys
import threading
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millstream.data.transfer.batch_layout import describe_leaves, plan_layout, view_leaves
from millstream.data.transfer.buffers import BatchLease, BufferPool, SegmentLease
from millstream.device.drivers.driver import Copies
from tests.clocks import HANG_S
from tests.device.virtual_device import make_virtual_context

SIZES = [10, 300, 70_000]
POINTS = [(BufferPool, "drop"), (BufferPool, "_release")]


def forget(unraisable):
    """Keep nothing of it: a tensor's end would not come."""


class PoolModel(RuleBasedStateMachine):
    """The sender fills slots, the consumer gets and drops batches, the device runs some of what is queued.

    Each batch is a number, written by its copy into every byte. The model knows which batches the user holds.
    """

    @initialize(num_slots=st.integers(2, 4), mood=st.sampled_from(["lazy", "random", "eager"]), seed=st.integers(0, 9))
    def begin(self, num_slots, mood, seed):
        self.context, self.device = make_virtual_context(mood, seed)
        self.streams = [self.device.default, self.context.streams[0]]
        self.stream = self.streams[0]
        self.pool = BufferPool(self.context, num_slots, self.stream)
        self.copy_stream = self.context.streams.to_device
        self.number = 0
        self.under_way, self.held, self.reads = [], [], []

    def take(self):
        taken = self.pool.take()
        return None if taken is None else taken[0]

    @rule(sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=3), first=st.integers(0, 2))
    def send(self, sizes, first=0):
        slot = self.take()
        if slot is None:
            return
        self.number = self.number % 200 + 1
        layout = plan_layout(describe_leaves([torch.empty(size, dtype=torch.uint8) for size in sizes]))
        memories = self.pool.fit(slot, layout, self.copy_stream)
        for segment, memory in zip(layout.segments, memories, strict=True):
            source = torch.full((segment.num_bytes,), self.number, dtype=torch.uint8)
            waits = [slot.released] if slot.was_lent else []
            self.device.copy(Copies([(memory[: segment.num_bytes], source)], self.copy_stream, waits))
        slot.copied.record(self.copy_stream)
        slot.is_written, slot.was_lent = True, False
        numbers = [(first + i) % len(memories) for i in range(len(memories))]  # a transform returns them in any order
        loan = self.pool.lend(slot, numbers)
        lent = [self.pool.lend_bytes(loan, number) for number in range(len(memories))]
        self.under_way.append((loan, view_leaves(layout, lent), self.number, slot))

    @rule(drop_last=st.booleans())
    def ask(self, drop_last):
        with self.device.on(self.stream):
            self.pool.reclaim()
            if not self.under_way:
                return  # it waits
            loan, leaves, number, slot = self.under_way.pop(0)
            self.stream.wait_event(slot.copied)
            self.pool.hand_out(loan, self.stream)
            if drop_last and self.held:
                self.held.pop()
            self.held.append((leaves, number, self.stream))
            self.read()

    @precondition(lambda self: self.under_way)
    @rule()
    def lose(self):
        """An interrupt meets a batch on its way to the user."""
        self.under_way.pop(0)

    @precondition(lambda self: self.held)
    @rule()
    def read(self):
        """A kernel on the stream that a held batch belongs to, which looks at one of its leaves when it runs."""
        leaves, number, stream = self.held[-1]
        with self.device.on(stream):
            seen = []
            self.device.read(leaves[0], seen)
            self.reads.append((seen, bytes([number]) * leaves[0].numel()))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), leaf=st.integers(0, 9))
    def drop_a_leaf(self, which, leaf):
        leaves, _, _ = self.held[which % len(self.held)]
        if len(leaves) > 1:
            leaves.pop(leaf % len(leaves))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def drop(self, which):
        self.held.pop(which % len(self.held))

    @precondition(lambda self: self.held)
    @rule(point=st.integers(0, len(POINTS) - 1), before=st.booleans())
    def drop_with_ctrl_c(self, point, before):
        """Python reports an interrupt that meets a finalizer, and continues as if it had ended."""
        owner, name = POINTS[point]
        real, calls = getattr(owner, name), []

        def interrupted(*arguments):
            calls.append(None)
            if before or len(calls) > 1:
                raise KeyboardInterrupt
            real(*arguments)
            raise KeyboardInterrupt

        # The hook is the last to go: a collection may end others meanwhile.
        with mock.patch.object(sys, "unraisablehook", forget), mock.patch.object(owner, name, interrupted):
            self.held.pop()

    @rule(stream=st.integers(0, 1))
    def scribble(self, stream):
        """The user's own temporaries, in memory that was freed."""
        for size in sorted({raw.nbytes for raw in self.device.raw_of.values()}):
            with self.device.on(self.streams[stream]):
                self.device.scribble(size)

    @rule()
    def change_streams(self):
        # What is held belongs to the stream that it was got on, which must know of other streams' use: drop it.
        self.held.clear()
        self.stream = self.streams[1 - self.streams.index(self.stream)]

    @rule()
    def run(self):
        self.device.run_some()

    @invariant()
    def the_user_can_go_on(self):
        if hasattr(self, "pool") and not self.under_way and len(self.pool._lent) <= 1:
            assert len(self.pool._free) >= len(self.pool.buffers) - 1

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        self.pool.close()
        self.under_way.clear()
        after = []
        for size in sorted({raw.nbytes for raw in self.device.raw_of.values()} - {0}):
            for _ in range(3):
                tensor = self.device.allocate(size)
                raw = self.device.raw(tensor)
                self.device.default.enqueue(lambda raw=raw: raw.fill(0xAB))
                after.append((tensor, raw))
        self.device.synchronize()
        assert all(seen == [expected] for seen, expected in self.reads)
        assert all(bool((leaf == number).all()) for leaves, number, _ in self.held for leaf in leaves)
        assert all((raw == 0xAB).all() for _, raw in after)
        assert self.context.events.num_lent == 0


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_lease_whose_making_was_interrupted_ends_in_silence(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    SegmentLease.__new__(SegmentLease)
    assert not told


def test_an_interrupt_does_not_send_home_what_another_stream_still_reads():
    """Found by the model: a batch that the user has kept beyond the next is dropped, and Ctrl-C meets its finalizer."""
    model = PoolModel()
    model.begin(num_slots=2, mood="lazy", seed=0)
    model.change_streams()  # to one that the memory is not allocated for
    for _ in range(2):
        model.send(sizes=[10])
        model.run()
    for _ in range(3):
        model.ask(drop_last=False)
    for before in (False, True):
        model.drop_with_ctrl_c(point=0, before=before)
    model.scribble(stream=0)
    model.teardown()


@pytest.mark.parametrize("ends", ["asks", "closes"])
@pytest.mark.parametrize("what", ["kept", "made by a transform"])
def test_what_an_interrupt_kept_from_going_home_goes_later(what, ends):
    model = PoolModel()
    model.begin(num_slots=2, mood="eager", seed=0)
    pool, device = model.pool, model.device
    model.change_streams()
    if what == "kept":
        for _ in range(2):
            model.send(sizes=[10])
        for _ in range(3):
            model.ask(drop_last=False)
        model.held.pop()
    else:
        slot = model.take()
        loan = pool.lend(slot, [])
        memory = device.allocate(300)
        model.held.append([pool.lend_other(loan, memory, device.default)])
        pool.hand_out(loan, model.stream)
        del memory
    model.drop_with_ctrl_c(point=0, before=True)

    def held():
        return device.num_raw - sum(len(each) for sizes in device.free.values() for each in sizes.values())

    before = held()
    if ends == "asks":
        pool.reclaim()
        pool.idle()
        assert held() == before - 1
    else:
        pool.close()
        assert held() == 0
    pool.close()


@pytest.mark.parametrize("segments", [[0], [1], [1, 0], [2, 0, 1], [0, 2]])
def test_a_slot_comes_back_with_the_last_of_its_segments_whatever_their_numbers(segments):
    loan = BatchLease(None, None, segments)
    assert [loan.num_left.pop() == 0 for _ in segments] == [False] * (len(segments) - 1) + [True]
    assert loan.is_back()


def test_the_event_of_a_slot_that_is_dropped_while_the_pool_is_closed_is_lent_to_nobody_else(monkeypatch):
    """The finalizer has claimed the batch by then, and not yet recorded where its use ends."""
    ctx, _ = make_virtual_context("lazy")
    pool, layout = BufferPool(ctx, 2, ctx.current_stream()), plan_layout(describe_leaves([torch.ones(64)]))
    slot, _ = pool.take()
    pool.fit(slot, layout, ctx.streams.to_device)
    slot.copied.record(ctx.streams.to_device)
    slot.is_written = True
    leaves, loan = pool.lend_leaves(slot, layout), slot.lease
    released = slot.released
    pool.hand_out(loan, ctx.current_stream())
    is_there, go_on, is_capturing = threading.Event(), threading.Event(), ctx.is_capturing

    def pause():
        if threading.current_thread() is dropping:
            is_there.set()
            assert go_on.wait(HANG_S)
        return is_capturing()

    pool._is_capturing = pause
    held = [leaves]
    del leaves
    dropping = threading.Thread(target=held.clear)
    dropping.start()
    assert is_there.wait(HANG_S)
    pool.close()
    lent = [ctx.events.acquire() for _ in range(4)]
    assert not any(event is released for event in lent)
    go_on.set()
    dropping.join()
