"""Passes with and without a worker: what is chosen, and that nobody but a clock can tell."""

import asyncio
import contextlib
import contextvars
import queue
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import count, cycle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset

from millstream.errors import FeedError
from millstream.feed import feed, session
from millstream.feed.copy_lane import CopyLane
from millstream.feed.ledger import Ledger
from millstream.feed.pace import MOST_TIMED, NUM_TIMED, NUM_WARM, Pace, PaceMaker
from tests.feed.conftest import WAYS, feed_threads
from tests.feed.test_feed import Endless, numbers, values
from tests.processes import run_python


def note_calls(monkeypatch, owner, name, calls):
    """Have ``name`` appended to ``calls`` whenever that method is called."""
    real = getattr(owner, name)

    def call(*arguments):
        calls.append(name)
        return real(*arguments)

    monkeypatch.setattr(owner, name, call)


class Counting(IterableDataset):
    """Six numbers, of which nobody knows where they come from."""

    def __iter__(self):
        return iter(numbers(6))


ALONE = pytest.mark.parametrize("make_feed", WAYS[2:], indirect=True)
US = 1000


class Clock:
    """A clock, and the processor's time; a test moves them."""

    def __init__(self):
        self.now_ns = self.busy_ns = 0

    def run_pass(self, maker, step_us, work_us=10, *, waits_us=(0,), pulls_us=(0,), may_be_alone=True, num_steps=100):
        """A pass in which the consumer computes so long, waits and pulls in turn as told; whether it had no worker."""
        pace = maker.begin_pass(may_be_alone=may_be_alone)
        for _, wait_us, pull_us in zip(range(num_steps), cycle(waits_us), cycle(pulls_us)):
            pace.ask()
            pace.begin_work()
            self.busy_ns += work_us * US
            pace.end_work(pull_us * US)
            self.now_ns += wait_us * US
            pace.deliver()
            self.now_ns += step_us * US
        pace.ask()
        return pace.alone


@pytest.fixture
def run_pass(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.perf_counter_ns", lambda: clock.now_ns)
    monkeypatch.setattr("time.thread_time_ns", lambda: clock.busy_ns)
    return clock.run_pass


@pytest.mark.parametrize(
    ("accompanied_us", "work_us", "alone_us", "tried", "kept"),
    [
        (300, 50, 150, True, True),
        (300, 50, 290, True, False),  # no gain to speak of
        (300, 50, 900, True, False),
        (50, 30, 35, True, True),  # cheap, though it is most of the step
        (1000, 150, 700, True, True),
        (300, 150, 10, False, False),  # trying could make the pass half as long again
        (2500, 10, 10, False, False),  # steps this long have the lock to spare
    ],
)
def test_a_pass_without_a_worker_is_tried_where_it_may_pay_and_kept_if_it_does(
    run_pass, accompanied_us, work_us, alone_us, tried, kept
):
    maker = PaceMaker()
    assert not run_pass(maker, accompanied_us, work_us)
    assert run_pass(maker, alone_us if tried else accompanied_us, work_us) == tried
    assert not run_pass(maker, accompanied_us, work_us)
    for _ in range(3):
        assert run_pass(maker, alone_us if kept else accompanied_us, work_us) == kept


def test_when_steps_become_longer_the_worker_comes_back(run_pass):
    maker = PaceMaker()
    steps_us = (300, 100, 300, 100, 4000, 4000, 4000)
    assert [run_pass(maker, us) for us in steps_us] == [False, True, False, True, True, False, False]


def test_the_first_of_all_passes_is_compared_with_none(run_pass):
    maker = PaceMaker()
    assert [run_pass(maker, us) for us in (300, 150, 120, 120, 120)] == [False, True, False, False, False]


STALL = (0,) * 9 + (1000,)
"""A hundred microseconds on average; the usual one takes nothing."""


def test_a_source_that_keeps_one_waiting_has_a_worker_though_it_takes_nothing_of_the_processor(run_pass):
    maker = PaceMaker()
    assert not any(run_pass(maker, 300, pulls_us=STALL) for _ in range(3))
    maker = PaceMaker()
    assert [run_pass(maker, 1000, pulls_us=STALL) for _ in range(2)] == [False, True]


def test_waits_count_as_they_are_on_average(run_pass):
    maker = PaceMaker()
    assert not run_pass(maker, 100, waits_us=(40,))
    assert run_pass(maker, 60, waits_us=STALL)  # the usual step takes half as long, but all of them longer
    assert not run_pass(maker, 100, waits_us=(40,))
    assert not run_pass(maker, 100, waits_us=(40,))


def test_who_waits_about_as_long_for_a_batch_as_making_it_takes_tries_to_make_it(run_pass):
    for wait_us, tried in ((60, True), (40, False)):
        maker = PaceMaker()
        assert not run_pass(maker, 100, 150, waits_us=(wait_us,))
        assert run_pass(maker, 100, 150) == tried


def test_bursts_of_work_count_as_they_are_on_average(run_pass, monkeypatch):
    maker = PaceMaker()
    maker.begin_pass(may_be_alone=True)
    burst = cycle((0,) * 9 + (4000,))
    busy_ns = 0

    def work():
        nonlocal busy_ns
        busy_ns += next(burst) * US
        return busy_ns

    monkeypatch.setattr("time.thread_time_ns", work)
    assert not any(run_pass(maker, 300) for _ in range(2))


def test_the_first_steps_tell_nothing(run_pass):
    maker = PaceMaker()
    for first_us in (0, 100_000):
        slow = (first_us,) * NUM_WARM + (0,) * 92
        assert run_pass(maker, 100, waits_us=slow, pulls_us=slow) == bool(first_us)


def test_a_pass_too_short_to_tell_anything_changes_nothing(run_pass):
    maker = PaceMaker()
    few = NUM_WARM + NUM_TIMED - 1
    assert not any(run_pass(maker, 100, num_steps=few) for _ in range(3))
    assert [run_pass(maker, 100, num_steps=few + 1), run_pass(maker, 100)] == [False, True]


def test_feeds_that_need_a_worker_have_one(run_pass):
    maker = PaceMaker()
    run_pass(maker, 100)
    assert not run_pass(maker, 100, may_be_alone=False)
    assert run_pass(maker, 100)


@pytest.mark.parametrize("is_shorter", [True, False])
def test_passes_of_a_feed_follow_what_was_timed(monkeypatch, is_shorter):
    monkeypatch.setattr(Pace, "step_ns", property(lambda self: 100 * US if self.alone == is_shorter else 200 * US))
    monkeypatch.setattr(Pace, "work_ns", 10 * US)
    source = Endless()
    fed = feed(source, "cpu")
    seen = []
    for _ in range(5):
        source.threads.clear()
        for batch in fed:
            if batch.item() == 3:
                break
        seen += source.threads
    worker, loop = "millstream-feed", "MainThread"
    assert seen == [worker, loop, worker, *([loop] * 2 if is_shorter else [worker] * 2)]
    assert fed.stats().is_alone == is_shorter
    assert ("the loop makes its batches itself" in str(fed.stats())) == is_shorter


def test_steps_and_work_are_timed(monkeypatch):
    clock = count(0, 7)
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    monkeypatch.setattr("time.thread_time_ns", lambda: next(clock))
    pace = Pace(alone=False)
    for _ in range(MOST_TIMED):
        pace.ask()
        pace.begin_work()
        pace.end_work(3)
        pace.deliver()
    assert pace.step_ns == 7 + 3 * 7
    assert pace.work_ns == 7


# --- what the source sees


class Loader:
    """Gives its iterator away, unlike a generator."""

    def __init__(self, make_iterator):
        self._make_iterator = make_iterator

    def __iter__(self):
        return self._make_iterator()


class Watching(TorchDispatchMode):
    """A mode of the dispatcher that only looks on."""

    seen = threading.local()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Watching.seen.call = func
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def everything():
    with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.device("meta"):
        yield


MODES = pytest.mark.parametrize(
    "modes",
    [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.device("meta"),
        Watching,
        everything,
    ],
    ids=["none", "no_grad", "inference", "autocast", "device", "dispatch", "everything"],
)


def see_modes():
    """All that this thread's modes do."""
    product = torch.ones(2, 2) @ torch.ones(2, 2, requires_grad=True)
    Watching.seen.call = None
    torch.ones(1)
    return (
        product.dtype,
        product.requires_grad,
        product.is_inference(),
        product.device,
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        Watching.seen.call,
    )


@pytest.fixture(scope="module")
def usual():
    """What a new thread sees."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(see_modes).result()


@MODES
def test_the_source_computes_as_in_a_thread_of_its_own(make_feed, modes, usual):
    def source():
        for _ in range(3):
            yield str(see_modes())

    with modes():
        before = see_modes()
        passing = iter(make_feed(source()))
    with modes():
        assert list(passing) == [str(usual)] * 3
        assert see_modes() == before
    assert see_modes() == usual


@MODES
@pytest.mark.parametrize("end", ["whole", "left", "closed elsewhere"])
@pytest.mark.parametrize("mine", [contextlib.nullcontext, everything])
def test_modes_that_a_source_leaves_on_are_its_own(make_feed, modes, usual, end, mine):
    seen = []

    def source():
        try:
            with modes():
                seen.append(see_modes())
                for _ in range(4):
                    yield torch.tensor([1.0], device="cpu")
                    seen.append(see_modes())
        finally:
            seen.append(see_modes())

    fed = make_feed(Loader(source), 1)
    with modes():
        expected = see_modes()
    with mine():
        before = see_modes()
        for i, _ in enumerate(fed):
            assert see_modes() == before
            if i == 1 and end == "left":
                break
            if i == 1 and end == "closed elsewhere":
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(fed.close).result()
                    assert pool.submit(see_modes).result() == usual
        fed.close()
        assert see_modes() == before
    assert see_modes() == usual
    assert seen.pop() == usual
    assert set(seen) == {expected}


@ALONE
def test_a_source_that_leaves_autocast_on_does_not_keep_the_consumers_cache_full(make_feed):
    def source():
        with torch.autocast("cpu"):
            yield from numbers(3)

    for _ in make_feed(source()):
        assert torch.autocast_increment_nesting() == 1
        assert torch.autocast_decrement_nesting() == 0
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def test_variables_of_the_source_are_its_own_to_the_end(make_feed):
    variable = contextvars.ContextVar("variable", default=0)
    seen = []

    def source():
        token = variable.set(1)
        try:
            for number in numbers(9):
                yield number
                seen.append(variable.get())
        finally:
            variable.reset(token)  # fails elsewhere than where it was set
            seen.append(variable.get())

    fed = make_feed(Loader(source), 1)
    for batch in fed:
        assert variable.get() == 0
        if batch.item() == 2:
            break
    fed.close()
    assert seen.pop() == 0
    assert set(seen) == {1}


def test_where_an_event_loop_runs_a_source_may_run_one_of_its_own(monkeypatch):
    monkeypatch.setattr(Pace, "step_ns", property(lambda self: 100 * US))
    monkeypatch.setattr(Pace, "work_ns", 10 * US)

    async def fetch(number):
        return torch.tensor([float(number)])

    fed = feed(Loader(lambda: (asyncio.run(fetch(i)) for i in range(3))), "cpu")

    async def consume():
        return [(values(fed), fed.stats().is_alone) for _ in range(3)]

    assert asyncio.run(consume()) == [([0, 1, 2], False)] * 3
    assert values(fed) == [0, 1, 2]
    assert fed.stats().is_alone


# --- pulling ahead without a worker


@ALONE
def test_a_source_that_waits_for_what_the_loop_does(make_feed):
    """Asked before the loop has done it, it would wait for ever."""
    results = queue.SimpleQueue()
    results.put(0.0)

    def source():
        for _ in range(5):
            yield torch.tensor([results.get(timeout=10)])

    for batch in make_feed(source()):
        results.put(batch.item() + 1)
    assert results.get() == 5


@pytest.mark.parametrize("make_feed", WAYS[3:], indirect=True)
@pytest.mark.parametrize(
    ("loader", "options", "ahead"),
    [
        (numbers(6), {}, 1),
        (DataLoader(numbers(6), batch_size=None), {}, 1),
        (numbers(6), {"depth": 1}, 0),
        (iter(numbers(6)), {}, 0),
        (DataLoader(Counting(), batch_size=None), {}, 0),
    ],
    ids=["list", "loader", "depth 1", "iterator", "iterable dataset"],
)
def test_how_far_who_is_alone_looks_ahead(make_feed, loader, options, ahead):
    passing = iter(make_feed(loader, **options))
    seen = [(batch.item(), len(passing.session._ahead)) for batch in passing]
    assert seen == [(float(i), ahead) for i in range(5)] + [(5.0, 0)]


@pytest.mark.parametrize("make_feed", WAYS[3:], indirect=True)
def test_what_is_pulled_ahead_is_staged_when_there_is_room(make_feed, monkeypatch):
    staged = []
    stage = CopyLane.stage
    monkeypatch.setattr(CopyLane, "stage", lambda lane, load, stopped: staged.append(1) or stage(lane, load, stopped))
    units = [1, 2, 3, 3, 1]
    batches = [torch.full((256 * unit,), unit, dtype=torch.uint8) for unit in units]
    for room, num_staged in ((6, (2, 3, 4, 5, 5)), (5, (2, 3, 3, 5, 5))):
        staged.clear()
        fed = make_feed(batches, max_bytes=256 * room)
        seen = [(torch.equal(batch, sent), len(staged)) for batch, sent in zip(fed, batches, strict=True)]
        assert seen == [(True, number) for number in num_staged]


@pytest.mark.parametrize("make_feed", WAYS[3:], indirect=True)
def test_what_was_pulled_ahead_is_given_back(make_feed):
    batches = [torch.ones(100_000) for _ in range(4)]
    gone = [weakref.ref(batch) for batch in batches]
    fed = make_feed(batches)
    for _ in fed:
        break
    fed.loader = batches = None
    fed.close()
    assert [each() for each in gone] == [None] * 4


# --- endings without a worker


@ALONE
def test_a_source_that_closes_its_own_feed(make_feed):
    def source():
        yield torch.tensor([0.0])
        fed.close()
        yield torch.tensor([1.0])

    fed = make_feed(source())
    assert values(fed) == [0]


@ALONE
def test_a_feed_closed_by_another_thread_while_the_source_is_asked(make_feed):
    entered, closed = threading.Event(), threading.Event()

    def source():
        yield torch.tensor([0.0])
        entered.set()
        closed.wait()
        yield torch.tensor([1.0])

    fed = make_feed(source())

    def close():
        entered.wait()
        fed.close()
        closed.set()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(close)
        assert values(fed) == [0]
        done.result()


@ALONE
@pytest.mark.parametrize("where", ["source", "stage", "send"])
def test_an_interrupt_ends_the_pass_and_leaves_the_position(make_feed, monkeypatch, where):
    def source():
        yield torch.tensor([0.0])
        if where == "source":
            raise KeyboardInterrupt
        yield torch.tensor([1.0])

    fed = make_feed(source())
    passing = iter(fed)
    assert next(passing).item() == 0

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    if where != "source":
        monkeypatch.setattr(fed._lane, where, interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            next(passing)
    assert fed.state_dict()["position"] == 1


@ALONE
@pytest.mark.parametrize(
    ("where", "what", "left"),
    [
        (Ledger, "ask", (1, 2, 3)),
        (threading, "get_ident", (1, 2, 3)),  # right behind the lock
        (Ledger, "get", (1, 2, 3)),
        (Pace, "deliver", (1, 2, 3)),
    ],
    ids=["ask", "lock", "get", "deliver"],
)
def test_behind_an_interrupt_outside_the_source_the_pass_goes_on(make_feed, monkeypatch, where, what, left):
    fed = make_feed(numbers(4), 1)
    passing = iter(fed)
    closed = []
    note_calls(monkeypatch, fed._lane, "close", closed)
    assert next(passing).item() == 0
    real = getattr(where, what)

    def interrupt(*arguments):
        monkeypatch.setattr(where, what, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(where, what, interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(passing)
    assert values(passing) == list(left)
    fed.close()
    assert closed == ["close"]


@ALONE
def test_two_threads_never_pull_from_one_loader(make_feed):
    """One is inside the loader while another begins a new pass."""
    inside, second = threading.Event(), threading.Event()

    class Counted:
        number = num_inside = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.num_inside += 1
            try:
                if self.num_inside > 1:
                    second.set()
                self.number += 1
                if self.number == 2:
                    inside.set()
                    second.wait(0.05)  # long enough for who does not wait
                return torch.tensor([float(self.number)])
            finally:
                self.num_inside -= 1

    fed = make_feed(Counted(), 1)
    passing = iter(fed)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(values, passing)
        inside.wait()
        assert next(iter(fed)).item() == 3
        with pytest.raises(FeedError, match="iterated anew"):
            first.result()
    assert not second.is_set()
    fed.close()


@ALONE
def test_who_is_inside_the_source_gives_back_what_it_uses(make_feed, monkeypatch):
    """Closed by another thread that does not wait, and by the source itself."""
    monkeypatch.setattr(session, "JOIN_S", 0)
    events = []

    def source():
        try:
            yield torch.tensor([0.0])
            with ThreadPoolExecutor(1) as pool:
                pool.submit(passing.session.close).result()
            passing.session.close()
            passing.session.wait_for_worker()
            events.append("left")
            yield torch.tensor([1.0])
        finally:
            events.append("dropped")

    fed = make_feed(Loader(source), 1)
    passing = iter(fed)
    next(passing)
    note_calls(monkeypatch, fed._lane, "close", events)
    with pytest.raises(FeedError, match="context was closed"):
        next(passing)
    passing.session.wait_for_worker()
    assert events == ["left", "close", "dropped"]


@ALONE
def test_the_source_dies_with_the_pass(make_feed):
    source = Endless()
    fed = make_feed(source)
    for batch in fed:
        if batch.item() == 2:
            assert source.alive == 1
            break
    assert source.alive == 0
    passing = iter(fed)
    next(passing)
    fed.close()
    assert source.alive == 0
    assert not feed_threads()


@ALONE
def test_nothing_is_pulled_ahead(make_feed):
    pulled = []

    def source():
        for i in range(10):
            pulled.append(i)
            yield torch.tensor([float(i)])

    for i, batch in enumerate(make_feed(source(), 4)):
        assert batch.item() == i
        assert len(pulled) == i + 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_child_does_not_go_on_with_the_parents_pass():
    done = run_python("""
        import os, torch
        from millstream.errors import FeedError
        from millstream.feed import feed
        from millstream.feed.pace import Pace, PaceMaker
        PaceMaker.begin_pass = lambda self, may_be_alone: Pace(alone=True)
        passing = iter(feed([torch.tensor(float(i)) for i in range(3)], "cpu"))
        print(next(passing).item(), flush=True)
        if os.fork() == 0:
            try:
                next(passing)
            except FeedError as error:
                print("forked" in str(error), flush=True)
            os._exit(0)
        os.wait()
        print(next(passing).item())
    """)
    assert (done.stdout, done.stderr) == ("0.0\nTrue\n1.0\n", "")


# --- what others do to a pass ----------------------------------------------------------------------------------------


def test_the_ledger_knows_of_each_pass_whether_it_has_a_worker(virtual_feed, monkeypatch):
    """Also of one that nobody asks about before it has ended, and of the next one."""
    booked, book = set(), Ledger._book
    monkeypatch.setattr(Ledger, "_book", lambda self, *a, **k: booked.add(self.is_alone) or book(self, *a, **k))
    monkeypatch.setattr(Ledger, "is_due", lambda self, index: True)
    fed, device = virtual_feed([torch.zeros(3)] * 30, mood="eager")
    paces = iter([True, False, True])
    monkeypatch.setattr(fed._pace_maker, "begin_pass", lambda may_be_alone: Pace(alone=next(paces)))
    for alone in (True, False, True):
        booked.clear()
        with device.on(device.default):
            assert len(list(fed)) == 30
        device.synchronize()
        assert fed.stats().is_alone == alone
        assert booked == {alone}


def test_who_is_closed_while_a_batch_is_handed_out_keeps_the_way_until_it_was(make_feed, monkeypatch):
    monkeypatch.setattr(session, "JOIN_S", 0.05)
    fed, events = make_feed([torch.tensor(float(i)) for i in range(9)], 1), []
    passing = iter(fed)
    next(passing)
    lane, deliver = fed._lane, fed._lane.deliver

    def close_and_deliver(load):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(fed.close).result()
        events.append("deliver")
        return deliver(load)

    monkeypatch.setattr(lane, "deliver", close_and_deliver)
    note_calls(monkeypatch, lane, "close", events)
    assert values([next(passing)]) == [1.0]
    assert events == ["deliver", "close"]
    with pytest.raises(StopIteration):
        next(passing)
    assert not feed_threads()
