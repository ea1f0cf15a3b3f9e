"""The channel against a model of it (one thread, timeouts of zero), and with real threads."""

import contextlib
import itertools
import threading
import traceback

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from millstream.errors import ArgumentError
from millstream.feed import Channel, ChannelClosed
from tests.feed.interrupts import interrupt_everywhere

DEADLINE_S = 20


def run_threads(*works):
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    return threads


def join(threads):
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)


def wait_until(condition):
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it never came true")


# --- the model: a list, two bounds and a flag


class ChannelModel(RuleBasedStateMachine):
    things = Bundle("things")

    @initialize(capacity=st.integers(0, 4), max_bytes=st.none() | st.integers(0, 10))
    def begin(self, capacity, max_bytes):
        self.channel = Channel(capacity, max_bytes)
        self.model, self.closed, self.error = [], False, None
        self.names = itertools.count()

    @rule(num_bytes=st.integers(0, 12))
    def send(self, num_bytes):
        name, channel = next(self.names), self.channel
        total = sum(size for _, size in self.model)
        if channel.max_bytes is not None and num_bytes > channel.max_bytes:
            expected = ArgumentError
        elif self.closed:
            expected = ChannelClosed
        elif len(self.model) >= channel.capacity or (
            channel.max_bytes is not None and total + num_bytes > channel.max_bytes
        ):
            expected = TimeoutError
        else:
            channel.send(name, num_bytes, timeout=0)
            self.model.append((name, num_bytes))
            return
        with pytest.raises(expected):
            channel.send(name, num_bytes, timeout=0)

    @rule()
    def receive(self):
        if self.model:
            assert self.channel.receive(timeout=0) == self.model.pop(0)[0]
        else:
            kind = (type(self.error) if self.error else ChannelClosed) if self.closed else TimeoutError
            with pytest.raises(kind):
                self.channel.receive(timeout=0)

    @rule(error=st.none() | st.builds(LookupError))
    def close(self, error):
        self.channel.close(error)
        if not self.closed:
            self.closed, self.error = True, error

    @rule()
    def cancel(self):
        assert self.channel.cancel() == [name for name, _ in self.model]
        self.model.clear()
        self.closed = True

    @invariant()
    def agrees(self):
        if hasattr(self, "channel"):
            assert len(self.channel) == len(self.model)
            assert self.channel.closed == self.closed
            assert self.channel._held_bytes == sum(size for _, size in self.model)
            assert not self.channel._senders
            assert not self.channel._receivers


TestChannelModel = ChannelModel.TestCase
TestChannelModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# --- with threads


@pytest.mark.parametrize("capacity", [0, 1, 3])
@pytest.mark.parametrize(("num_producers", "num_consumers"), [(1, 1), (3, 1), (1, 3), (4, 4)])
def test_everything_arrives_once_and_each_producers_things_in_order(capacity, num_producers, num_consumers):
    channel, got, lock = Channel(capacity, max_bytes=5), [], threading.Lock()

    def produce(producer):
        for i in range(40):
            channel.send((producer, i), num_bytes=1 + i % 5)

    def consume():
        for thing in channel:
            with lock:
                got.append(thing)

    consumers = run_threads(*[consume] * num_consumers)
    join(run_threads(*[lambda p=p: produce(p) for p in range(num_producers)]))
    channel.close()
    join(consumers)
    assert sorted(got) == [(p, i) for p in range(num_producers) for i in range(40)]
    if num_consumers == 1:
        for producer in range(num_producers):
            assert [i for p, i in got if p == producer] == list(range(40))


def test_a_rendezvous_returns_when_the_thing_is_taken():
    channel, sent = Channel(0), threading.Event()

    def produce():
        channel.send("x")
        sent.set()

    (thread,) = threads = run_threads(produce)
    wait_until(lambda: channel._senders)
    assert not sent.is_set()
    assert len(channel) == 0
    assert channel.receive() == "x"
    join(threads)
    assert thread is threads[0]
    assert sent.is_set()


def test_who_waits_longest_is_served_first_on_both_sides():
    channel, served = Channel(0), []

    def send(name):
        channel.send(name)

    threads = []
    for count, name in enumerate("abc", start=1):
        threads += run_threads(lambda name=name: send(name))
        wait_until(lambda count=count: len(channel._senders) == count)
    assert [channel.receive() for _ in "abc"] == ["a", "b", "c"]
    join(threads)

    lock, threads = threading.Lock(), []

    def take(name):
        thing = channel.receive()
        with lock:
            served.append((name, thing))

    for count, name in enumerate("abc", start=1):
        threads += run_threads(lambda name=name: take(name))
        wait_until(lambda count=count: len(channel._receivers) == count)
    for thing in range(3):
        channel.send(thing)
    join(threads)
    assert sorted(served) == [("a", 0), ("b", 1), ("c", 2)]


def test_a_large_thing_is_not_overtaken_by_small_ones():
    channel = Channel(10, max_bytes=4)
    channel.send("first", 3)
    threads = run_threads(lambda: channel.send("large", 4))
    wait_until(lambda: channel._senders)
    with pytest.raises(TimeoutError):
        channel.send("small", 1, timeout=0)
    assert channel.receive() == "first"
    assert channel.receive() == "large"
    join(threads)


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_an_end_wakes_everyone(end):
    full, empty, outcomes = Channel(1), Channel(1), []
    full.send(0)

    def note(call):
        try:
            outcomes.append(call())
        except ChannelClosed:
            outcomes.append("closed")

    threads = run_threads(*[lambda: note(lambda: full.send(1))] * 2, *[lambda: note(empty.receive)] * 2)
    wait_until(lambda: len(full._senders) == 2 and len(empty._receivers) == 2)
    for channel in (full, empty):
        getattr(channel, end)()
    join(threads)
    assert outcomes == ["closed"] * 4
    assert list(full) == ([0] if end == "close" else [])


def test_an_error_comes_after_everything_else_with_its_traceback_and_again():
    channel = Channel(2)

    def fail():
        raise LookupError("broken record")

    channel.send(1)
    try:
        fail()
    except LookupError as error:
        channel.close(error)
    assert channel.receive() == 1
    for _ in range(3):
        with pytest.raises(LookupError, match="broken record") as caught:
            channel.receive()
        text = "".join(traceback.format_exception(caught.value))
        assert text.count("in fail") == 1
    with pytest.raises(LookupError):
        list(channel)


# --- Ctrl-C


def drain(channel):
    """What still comes, until the channel is empty and no thread waits."""
    things = []
    while len(channel) or channel._senders:
        things.append(channel.receive(DEADLINE_S))
    assert channel._held_bytes == 0
    assert not channel._receivers
    return things


@pytest.mark.parametrize("others", ["", "c", "cd"], ids=["nobody waits", "one waits", "two wait"])
@pytest.mark.parametrize("into", [False, True], ids=["receive", "receive_into"])
def test_an_interrupted_receiver_loses_nothing(into, others):
    def run(interrupter):
        channel, got, threads = Channel(2), [], []
        for thing in "ab":
            channel.send(thing, 1)
        for count, thing in enumerate(others, start=1):
            threads += run_threads(lambda thing=thing: channel.send(thing, 1))
            wait_until(lambda count=count: len(channel._senders) == count)
        try:
            thing = interrupter.run(lambda: channel.receive_into(got) if into else channel.receive())
            got += [] if into else [thing]
        except KeyboardInterrupt:
            assert into or got == []
        assert [*got, *drain(channel)] == [*"ab", *others]
        join(threads)

    assert len(interrupt_everywhere(run, "feed/channel.py")) > 3


@pytest.mark.parametrize("capacity", [0, 1])
@pytest.mark.parametrize("into", [False, True], ids=["receive", "receive_into"])
def test_nor_does_one_that_waits(into, capacity):
    def run(interrupter):
        channel, got, left = Channel(capacity), [], threading.Event()

        def produce():
            while not (channel._receivers or left.is_set()):
                pass
            for thing in "ab":
                channel.send(thing, 1)

        threads = run_threads(produce)
        try:
            thing = interrupter.run(lambda: channel.receive_into(got) if into else channel.receive())
            got += [] if into else [thing]
        except KeyboardInterrupt:
            assert into or got == []
        left.set()
        while len(got) < 2:
            got.append(channel.receive(DEADLINE_S))
        join(threads)
        assert got == ["a", "b"]
        assert drain(channel) == []

    assert len(interrupt_everywhere(run, "feed/channel.py")) > 3


@pytest.mark.parametrize("capacity", [0, 2])
@pytest.mark.parametrize("num_receivers", [0, 1, 2])
def test_an_interrupted_send_has_sent_nothing_but_what_was_received(capacity, num_receivers):
    def run(interrupter):
        channel, got = Channel(capacity), []
        threads = run_threads(*[lambda: got.append(channel.receive())] * num_receivers)
        wait_until(lambda: len(channel._receivers) == num_receivers)
        sent = False
        try:
            interrupter.run(lambda: channel.send("a", 1, timeout=0))
            sent = True
        except (KeyboardInterrupt, TimeoutError):
            assert len(channel) == 0
        while any(thread.is_alive() for thread in threads):  # nobody waits for ever, and nothing comes twice
            with contextlib.suppress(TimeoutError):
                channel.send("b", 1, timeout=0)
        assert got.count("a") <= 1
        assert [*got, *drain(channel)].count("a") == 1 or not sent

    assert len(interrupt_everywhere(run, "feed/channel.py")) > 3


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_an_interrupted_end_can_be_repeated(end):
    def run(interrupter):
        full, empty = Channel(1), Channel(1)
        full.send("a", 1)

        def wait(call):
            with contextlib.suppress(ChannelClosed):
                call()

        threads = run_threads(lambda: wait(lambda: full.send("b")), lambda: wait(empty.receive))
        wait_until(lambda: full._senders and empty._receivers)
        with contextlib.suppress(KeyboardInterrupt):
            interrupter.run(lambda: [getattr(channel, end)() for channel in (full, empty)])
        for channel in (full, empty):
            getattr(channel, end)()
        join(threads)

    assert len(interrupt_everywhere(run, "feed/channel.py")) > 3


def test_close_may_come_from_a_finalizer_inside_a_method():
    channel = Channel(1)
    with channel._lock:  # as if a collection ran inside ``receive``
        channel.close()
    assert list(channel) == []


@pytest.mark.parametrize(("capacity", "max_bytes"), [(-1, None), (1.5, None), (True, None), (1, -1), (1, 2.0)])
def test_bounds_that_are_none(capacity, max_bytes):
    with pytest.raises(ArgumentError, match=r"capacity is|max_bytes is"):
        Channel(capacity, max_bytes)


class Obliging:
    """A lock that lets others in right behind the release that an error has led to, once."""

    def __init__(self, lock):
        self.lock, self.others = lock, []

    def __enter__(self):
        return self.lock.__enter__()

    def __exit__(self, kind, *rest):
        self.lock.__exit__(kind, *rest)
        if kind is TimeoutError:
            while self.others:
                self.others.pop()()


def test_who_has_waited_in_vain_has_done_nothing():
    channel, got = Channel(1), []
    channel.send("a")
    channel._lock = Obliging(channel._lock)
    channel._lock.others.append(lambda: got.append(channel.receive()))
    with pytest.raises(TimeoutError):
        channel.send("b", timeout=0.01)
    with pytest.raises(TimeoutError):
        channel.receive(timeout=0.01)
    assert got == ["a"]
    mine = []
    channel._lock.others.append(lambda: channel.send("c"))
    with pytest.raises(TimeoutError):
        channel.receive_into(mine, timeout=0.01)
    assert (mine, channel.receive(timeout=1)) == ([], "c")
