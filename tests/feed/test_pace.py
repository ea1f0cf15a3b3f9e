"""Passes with and without a worker: what is chosen, and that nobody but a clock can tell."""

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from millstream.feed import feed
from millstream.feed.pace import MOST_TIMED, NUM_TIMED, NUM_WARM, Pace, PaceMaker, has_usual_modes
from tests.feed.conftest import WAYS, feed_threads
from tests.feed.test_feed import Endless, numbers, run_python, values

ALONE = pytest.mark.parametrize("make_feed", WAYS[2:], indirect=True)
US = 1000


def run_pass(maker, step_us, work_us=10, *, may_be_alone=True, num_steps=100, keeps_modes=True):
    """A pass of steps of this length; whether it had no worker."""
    pace = maker.begin_pass(may_be_alone=may_be_alone)
    pace._delivered = [i * step_us * US for i in range(num_steps)]
    pace._work_ns = [work_us * US] * num_steps
    pace.keeps_modes = keeps_modes
    return pace.alone


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
    accompanied_us, work_us, alone_us, tried, kept
):
    maker = PaceMaker()
    assert not run_pass(maker, accompanied_us, work_us)
    assert run_pass(maker, alone_us if tried else accompanied_us, work_us) == tried
    for _ in range(3):
        assert run_pass(maker, alone_us if kept else accompanied_us, work_us) == kept


def test_when_steps_become_longer_the_worker_comes_back():
    maker = PaceMaker()
    assert [run_pass(maker, us) for us in (300, 100, 100, 4000, 4000, 4000)] == [False, True, True, True, False, False]


def test_a_pass_too_short_to_tell_anything_changes_nothing():
    maker = PaceMaker()
    few = NUM_WARM + NUM_TIMED
    assert not any(run_pass(maker, 100, num_steps=few) for _ in range(3))
    assert [run_pass(maker, 100, num_steps=few + 1), run_pass(maker, 100)] == [False, True]


def test_sources_and_feeds_that_need_a_worker_have_one():
    maker = PaceMaker()
    run_pass(maker, 100)
    assert not run_pass(maker, 100, may_be_alone=False)
    with torch.device("meta"):
        assert not run_pass(maker, 100)
    assert run_pass(maker, 100)
    maker = PaceMaker()
    assert not any(run_pass(maker, 100, keeps_modes=False) for _ in range(3))


@pytest.mark.parametrize("is_shorter", [True, False])
def test_passes_of_a_feed_follow_what_was_timed(monkeypatch, is_shorter):
    monkeypatch.setattr(Pace, "step_ns", property(lambda self: 100 * US if self.alone == is_shorter else 200 * US))
    monkeypatch.setattr(Pace, "work_ns", 10 * US)
    source = Endless()
    fed = feed(source, "cpu")
    seen = []
    for _ in range(4):
        source.threads.clear()
        for batch in fed:
            if batch.item() == 3:
                break
        seen += source.threads
    worker, loop = "millstream-feed", "MainThread"
    assert seen == [worker, loop, loop, loop] if is_shorter else [worker, loop, worker, worker]
    assert fed.stats().is_alone == is_shorter
    assert ("the loop makes its batches itself" in str(fed.stats())) == is_shorter


def test_steps_and_work_are_timed(monkeypatch):
    clock = iter(range(0, 10**9, 7))
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    pace = Pace(alone=False)
    for _ in range(MOST_TIMED + 10):
        pace.begin_work()
        pace.end_work()
        pace.deliver()
    assert pace.step_ns == 7
    assert 0 < pace.work_ns < 1_000_000


# --- what the source sees


class Probe:
    """Yields what computing in its thread does."""

    def __iter__(self):
        weight = torch.ones(2, 2, requires_grad=True)
        for _ in range(3):
            product = torch.ones(2, 2) @ weight
            yield str((product.dtype, product.requires_grad, product.is_inference(), product.device))


@contextlib.contextmanager
def everything_else():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.parametrize(
    "modes",
    [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        everything_else,
    ],
)
def test_the_source_computes_as_in_a_thread_of_its_own(make_feed, modes):
    with modes():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        seen = list(make_feed(Probe()))
        after = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    assert seen == [str((torch.float32, True, False, torch.device("cpu")))] * 3
    assert before == after


def test_modes_are_looked_at():
    assert has_usual_modes()
    for modes in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with modes:
            assert not has_usual_modes()


def test_a_source_that_leaves_a_mode_on_is_found():
    def source():
        with torch.no_grad():
            yield from numbers(20)

    fed = feed(source(), "cpu")
    assert values(fed) == list(range(20))
    assert torch.is_grad_enabled()
    assert not fed._pace_maker.pace.keeps_modes


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
