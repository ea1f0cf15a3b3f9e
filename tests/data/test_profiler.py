"""Where the time goes: on a made-up device clock, on the virtual device, and on the CPU."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.data import feed
from millstream.data.profiler import INTERVAL_NS, NUM_FIRST, BatchTimes, Profiler
from millstream.data.stats import CAUSES
from millstream.device import StreamMarker
from tests.device.virtual_device import make_virtual_context

MS = 1_000_000


class Clock:
    """A stream whose work takes as long as a test says, and a host whose clock it moves."""

    def __init__(self, monkeypatch):
        self.context, _ = make_virtual_context("eager")
        self.host_ns = self.device_ns = 0
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.host_ns)
        self.ledger = Profiler(self.context)

    def mark(self):
        mark = StreamMarker(self.context, self.context.current_stream())
        self.device_ns = max(self.device_ns, self.host_ns)
        mark.event = Moment(self.device_ns)
        self.context.events._lent[id(mark.event)] = True
        return mark

    def step(self, index, *, wait_ms, run_ms, host_ms, pull_ms=0, stage_ms=0, copy_ms=0, late_ms=0):
        """A batch is asked for, comes when the device has waited, ``late_ms`` after its copy, and is computed with."""
        times = BatchTimes(index, 0, pull_ms * MS, 0, stage_ms * MS, 1000)
        self.ledger.ask(self.mark, self.host_ns, due=True)
        asked = self.device_ns
        end = asked + wait_ms * MS
        first, last = self.mark(), self.mark()
        over = end - late_ms * MS
        first.event.at_ns, last.event.at_ns = over - copy_ms * MS, over
        times.copy = (first, last) if copy_ms else None
        self.device_ns = end
        self.ledger.num_batches += 1
        self.ledger.get(times, self.mark)
        self.device_ns += run_ms * MS
        self.host_ns += host_ms * MS


class Moment:
    def __init__(self, at_ns):
        self.at_ns = at_ns

    def record(self, stream):
        """The clock says when."""

    def query(self):
        return True

    def elapsed_time(self, other):
        return (other.at_ns - self.at_ns) / MS


def run(monkeypatch, steps=12, *, is_alone=False, **times):
    clock = Clock(monkeypatch)
    clock.ledger.begin_pass(has_worker=not is_alone)
    for i in range(steps):
        clock.step(i, **times)
    clock.ledger.ask(clock.mark, clock.host_ns, due=True)
    return clock.ledger.stats()


def test_a_wait_is_charged_backwards_along_the_way_of_the_batch(monkeypatch):
    stats = run(monkeypatch, wait_ms=6, run_ms=4, host_ms=2, pull_ms=9, stage_ms=2, copy_ms=1)
    assert stats.num_measured == 11  # the first waited for the warm-up
    assert stats.shares == pytest.approx({"source": 0.3, "stage": 0.2, "copy": 0.1, "compute": 0.4, "host": 0.0})
    assert stats.step_s == pytest.approx(0.010)
    assert stats.hidden == 0


def test_a_copy_beside_the_computation_is_hidden(monkeypatch):
    stats = run(monkeypatch, wait_ms=0, run_ms=10, host_ms=1, copy_ms=8)
    assert stats.shares["compute"] == 1
    assert stats.hidden == 1
    assert stats.copy_s == pytest.approx(0.008)
    half = run(monkeypatch, wait_ms=4, run_ms=4, host_ms=1, copy_ms=8)
    assert half.hidden == pytest.approx(0.5)


def test_a_batch_that_is_there_and_not_handed_out_is_the_hosts(monkeypatch):
    """No copy is exposed after its end, and with smaller batches the loop would take as long."""
    stats = run(monkeypatch, wait_ms=3, late_ms=2, run_ms=7, host_ms=1, stage_ms=1, copy_ms=4)
    assert stats.hidden == pytest.approx(0.75)
    assert stats.shares == pytest.approx({"source": 0, "stage": 0, "copy": 0.1, "compute": 0.7, "host": 0.2})
    long_ago = run(monkeypatch, wait_ms=1, late_ms=50, run_ms=9, host_ms=1, copy_ms=4)
    assert long_ago.hidden == 1
    assert long_ago.shares["host"] == pytest.approx(0.1)


@pytest.mark.parametrize(("late", "stage", "source", "host"), [(2, 2, 0, 0), (5, 3, 2, 0), (9, 3, 4, 2)])
def test_without_a_worker_the_loop_makes_the_next_batch_meanwhile(monkeypatch, late, stage, source, host):
    stats = run(
        monkeypatch, is_alone=True, wait_ms=10, late_ms=late, run_ms=10, host_ms=1, pull_ms=4, stage_ms=3, copy_ms=10
    )
    shares = {"source": source, "stage": stage, "copy": 10 - late, "compute": 10, "host": host}
    assert stats.shares == pytest.approx({cause: share / 20 for cause, share in shares.items()})
    assert stats.hidden == pytest.approx(late / 10)


def test_a_device_that_has_run_dry_is_told_from_one_that_has_work(monkeypatch):
    dry = run(monkeypatch, wait_ms=0, run_ms=5, host_ms=5)
    assert dry.shares["host"] == 1
    clock = Clock(monkeypatch)
    clock.step(0, wait_ms=0, run_ms=50, host_ms=1)  # a long step: from here on the device is behind,
    for i in range(1, 10):
        clock.step(i, wait_ms=0, run_ms=5, host_ms=5)  # and stays so, although the host is as slow as the device
    clock.ledger.ask(clock.mark, clock.host_ns, due=True)
    assert clock.ledger.stats().shares["compute"] == 1


@given(st.booleans(), st.lists(st.tuples(*[st.integers(0, 20)] * 7), min_size=2, max_size=12))
def test_shares_always_sum_to_one(is_alone, steps):
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        clock.ledger.begin_pass(has_worker=not is_alone)
        for i, (wait, work, host, pull, stage, copy, late) in enumerate(steps):
            times = {"pull_ms": pull, "stage_ms": stage, "copy_ms": copy, "late_ms": late}
            clock.step(i, wait_ms=wait, run_ms=work + 1, host_ms=host, **times)
        clock.ledger.ask(clock.mark, clock.host_ns, due=True)
        stats = clock.ledger.stats()
    assert sum(stats.shares.values()) == pytest.approx(1)
    assert set(stats.shares) == set(CAUSES)
    assert all(share >= 0 for share in stats.shares.values())


def run_pass(clock, step_ms, *, burst=1):
    """Which of steps this long are measured, in a pass with a worker that pulls so many batches together."""
    clock.ledger.begin_pass(has_worker=True)
    watched = {}
    for i in range(0, len(step_ms), burst):
        numbers = range(i, min(i + burst, len(step_ms)))
        for number in numbers:
            if number >= clock.ledger.next_due:
                watched[number] = clock.ledger.watch(number)
        for number in numbers:
            times = watched.get(number)
            if times is not None or clock.ledger.is_open:
                clock.ledger.ask(clock.mark, clock.host_ns, due=times is not None)
            clock.ledger.num_batches += 1
            if times is not None:
                clock.ledger.get(times, clock.mark)
            clock.host_ns += round(step_ms[number] * MS)
    return [*watched]


def test_all_first_steps_are_measured_however_short_passes_are(monkeypatch):
    clock = Clock(monkeypatch)
    assert run_pass(clock, [0.1] * 7) == list(range(7))
    assert run_pass(clock, [0.1] * 4) == list(range(4))
    assert run_pass(clock, [0.1] * 50)[:8] == list(range(8))
    assert len(run_pass(clock, [0.1] * 50)) < 3


@pytest.mark.parametrize(("rest_ms", "burst"), [(0, 3), (10_000, 1)])
@pytest.mark.parametrize(("num_steps", "step_ms"), [(50, 1), (17, 1.3), (3, 0.5), (10, 19), (3, 30), (2, 5), (1, 30)])
def test_later_each_step_is_measured_as_often_as_others(monkeypatch, num_steps, step_ms, rest_ms, burst):
    """But the first of a pass, which is not counted."""
    clock = Clock(monkeypatch)
    run_pass(clock, [step_ms] * (NUM_FIRST + 1))
    times = [0] * num_steps
    num_passes = 4000
    for _ in range(num_passes):
        clock.host_ns += rest_ms * MS
        for number in run_pass(clock, [step_ms] * num_steps, burst=burst):
            times[number] += 1
    assert times[0] == 0
    share = min(step_ms * MS / INTERVAL_NS, 1)
    assert sum(times[1:]) == pytest.approx(share * (num_steps - 1) * num_passes, rel=0.1)
    assert all(count == pytest.approx(share * num_passes, rel=0.5) for count in times[1:])


def test_steps_that_stall_are_measured_as_often_as_others(monkeypatch):
    clock = Clock(monkeypatch)
    run_pass(clock, [0.1] * (NUM_FIRST + 1))
    steps = [50 if i % 40 == 39 else 0.1 for i in range(400_000)]
    measured = run_pass(clock, steps)
    stalled = [i for i in measured if steps[i] == 50]
    assert len(stalled) / len(measured) == pytest.approx(1 / 40, rel=0.2)


def test_events_come_back():
    context, _ = make_virtual_context("eager")
    profiler = Profiler(context)

    def mark():
        return StreamMarker(context, context.current_stream())

    for i in range(5):
        profiler.ask(mark, i, due=True)
        profiler.num_batches += 1
        profiler.get(profiler.watch(i), mark)
    profiler.close()
    assert context.events.num_lent == 0


def test_a_pass_may_end_while_another_thread_reads():
    context, device = make_virtual_context("eager")
    profiler = Profiler(context)

    def mark():
        return StreamMarker(context, context.current_stream())

    for i in range(3):
        profiler.ask(mark, i + 1, due=True)
        profiler.num_batches += 1
        profiler.get(profiler.watch(i), mark)
    assert profiler.unread

    def close_meanwhile():
        device.on_query = lambda: None
        closing = threading.Thread(target=profiler.close)
        closing.start()
        closing.join()

    device.on_query = close_meanwhile
    profiler.stats()
    assert not profiler.unread


def test_on_a_device(virtual_feed):
    fed, device = virtual_feed([torch.ones(100)] * 20, 2, "random")
    for batch in fed:
        device.read(batch, [])
    stats = fed.stats()
    assert stats.num_batches == 20
    assert 10 <= stats.num_measured <= 19
    assert stats.batch_bytes == 512
    assert sum(stats.shares.values()) == pytest.approx(1)
    assert stats.to_dict()["shares"] == stats.shares
    assert str(stats).splitlines()[-1].startswith("millstream profile")


@pytest.mark.parametrize("num_kernels", [0, 30])
def test_what_a_transform_does_belongs_to_the_copy(virtual_feed, num_kernels):
    """The device takes 1 ms for whatever it does."""

    def transform(batch):
        for _ in range(num_kernels):
            device.scribble(10)
        return batch

    fed, device = virtual_feed([torch.ones(100)] * 20, 2, "eager", transform=transform)
    for batch in fed:
        device.read(batch, [])
    stats = fed.stats()
    assert stats.num_measured >= 10
    assert (stats.copy_s >= 0.030) == (num_kernels == 30)


def test_on_the_cpu_a_slow_source_is_named(clock_of_waits):
    def source():
        for i in range(6):
            clock_of_waits.sleep(0.05)
            yield torch.tensor([i])

    fed = feed(source(), "cpu")
    for _ in fed:
        pass
    stats = fed.stats()
    assert max(stats.shares, key=stats.shares.__getitem__) == "source"
    assert stats.hidden is None


def starve(clock, *, steps, wait_ms, run_ms, compile_ms=0):
    """A loop on the CPU whose source takes ``wait_ms`` for each batch; the second step compiles."""
    profiler = Profiler(None)
    profiler.begin_pass(has_worker=True)
    for i in range(steps):
        times = profiler.watch(i)
        profiler.ask(lambda: None, clock.host_ns + 1, due=True)
        clock.host_ns += wait_ms * MS
        times.asked_ns, times.pulled_ns = clock.host_ns - wait_ms * MS, clock.host_ns
        profiler.num_batches += 1
        profiler.get(times, lambda: None)
        clock.host_ns += (compile_ms if i == 1 and compile_ms else run_ms) * MS
    profiler.ask(lambda: None, clock.host_ns + 1, due=True)
    return profiler


def test_a_loop_that_is_starved_to_95_percent_says_so_although_it_compiled_first(monkeypatch):
    stats = starve(Clock(monkeypatch), steps=100, wait_ms=19, run_ms=1, compile_ms=30_000).stats()
    assert stats.shares["source"] == pytest.approx(0.95, abs=0.001)
    assert stats.step_s == pytest.approx(0.020, rel=0.001)
    assert stats.one_off_s == pytest.approx(30, rel=0.001)


def test_stalls_of_the_source_count_although_they_are_rare(monkeypatch):
    clock = Clock(monkeypatch)
    profiler = Profiler(None)
    profiler.begin_pass(has_worker=True)
    for i in range(601):
        times, wait_ns = profiler.watch(i), 400 * MS if i % 40 == 39 else 0
        profiler.ask(lambda: None, clock.host_ns + 1, due=True)
        clock.host_ns += wait_ns
        times.asked_ns, times.pulled_ns = clock.host_ns - wait_ns, clock.host_ns
        profiler.num_batches += 1
        profiler.get(times, lambda: None)
        clock.host_ns += MS
    profiler.ask(lambda: None, clock.host_ns + 1, due=True)
    stats = profiler.stats()
    assert stats.num_measured == 600
    assert stats.shares["source"] == pytest.approx(15 * 400 / (15 * 400 + 600), rel=0.001)
    assert stats.source_s == 0  # the median


def test_each_pass_has_figures_of_its_own(monkeypatch):
    clock = Clock(monkeypatch)
    profiler = starve(clock, steps=200, wait_ms=9, run_ms=1)
    assert profiler.stats().shares["source"] == pytest.approx(0.9, rel=0.001)
    profiler.begin_pass(has_worker=True)
    for i in range(300):
        times = profiler.watch(i)
        profiler.ask(lambda: None, clock.host_ns + 1, due=True)
        clock.host_ns += MS
        profiler.num_batches += 1
        profiler.get(times, lambda: None)
        clock.host_ns += MS
    stats = profiler.stats()
    assert stats.shares["source"] == pytest.approx(0.5, rel=0.001)
    assert stats.num_batches == 300


def test_nothing_measured_yet():
    fed = feed([], "cpu")
    assert list(fed) == []
    assert fed.stats().shares == {}
    assert "Too few" in str(fed.stats())
