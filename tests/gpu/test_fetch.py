import threading

import pytest
import torch

from millstream.device import context
from millstream.errors import FeedError
from millstream.results import fetch, fetch_each

pytestmark = pytest.mark.gpu

LONG = 5_000_000  # cycles: a few milliseconds


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    context("cuda:0").close()
    assert not any(thread.name == "millstream-fetch" for thread in threading.enumerate())


def test_values_are_those_of_the_moment():
    loss, futures = torch.zeros((), device="cuda:0"), []
    for i in range(500):
        if i % 50 == 0:
            torch.cuda._sleep(LONG // 10)
        loss.fill_(i)
        futures.append(fetch(loss, step=i))
    assert [future.result() for future in futures] == list(range(500))


def test_memory_that_is_freed_at_once():
    futures = []
    for i in range(100):
        torch.cuda._sleep(LONG // 50)
        futures.append(fetch({"x": torch.full((1 << (10 + i % 12),), float(i), device="cuda:0"), "i": i}))
        torch.empty(1 << (10 + i % 12), device="cuda:0").fill_(-1)
    for i, future in enumerate(futures):
        value = future.result()
        assert value["i"] == i
        assert bool((value["x"] == i).all())


def test_results_that_share_memory():
    x = torch.arange(100_000.0, device="cuda:0")
    for _ in range(20):
        first, part, odd, whole = fetch((x[0], x[3:9], x[1::2], x)).result()
        assert (first, part.tolist()) == (x[0].item(), x[3:9].tolist())
        assert torch.equal(odd, x[1::2].cpu())
        assert torch.equal(whole, x.cpu())
        x += 1


def test_a_callback_may_fetch():
    later, zero = [], torch.zeros((), device="cuda:0")
    futures = [
        fetch(torch.tensor(i, device="cuda:0"), callback=lambda n: later.append(fetch(zero + n))) for i in range(600)
    ]
    assert [future.result() for future in futures] == list(range(600))
    fetch(torch.zeros(1, device="cuda:0")).result()  # after the last callback
    assert sorted(int(future.result()) for future in later) == list(range(600))


def test_the_caller_never_waits_for_the_device():
    x = torch.ones(10, device="cuda:0")
    fetch([x, x.sum()]).result()  # warm
    torch.cuda._sleep(LONG * 20)
    event = torch.cuda.Event()
    event.record()
    futures = [fetch([x, x.sum()]) for _ in range(20)]
    assert not event.query()  # all were asked for before the device was done with what came first
    assert all(future.result()[1] == 10 for future in futures)


def test_several_streams():
    futures, streams = [], [torch.cuda.Stream() for _ in range(3)]
    for i in range(90):
        with torch.cuda.stream(streams[i % 3]):
            torch.cuda._sleep(LONG // 100)
            futures.append(fetch(torch.full((7,), float(i), device="cuda:0")))
    for i, future in enumerate(futures):
        assert future.result().tolist() == [float(i)] * 7


def test_results_of_a_replayed_graph():
    x = torch.zeros((), device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(FeedError, match="being captured"):
            fetch(x)

    def steps():
        for _ in range(200):
            graph.replay()
            yield x

    assert list(fetch_each(steps())) == list(range(1, 201))


def test_captures_elsewhere_survive():
    done, wrong = threading.Event(), []

    def work():
        with context("cuda:0").driver.in_thread(), torch.cuda.stream(torch.cuda.Stream()):
            wrong.extend(i for i in range(300) if fetch(torch.full((50,), float(i), device="cuda:0")).result()[0] != i)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    x, num_captures = torch.ones(1000, device="cuda:0"), 0
    while num_captures < 5 or not done.is_set():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x
            for _ in range(200):
                y = y + 1
        graph.replay()
        assert bool((y == 201).all())
        num_captures += 1
    thread.join()
    assert wrong == []


def test_what_a_result_waits_for_is_its_own():
    """While a long copy is on its way, others begin and end."""
    long, short = torch.empty(16 << 20, device="cuda:0"), torch.zeros((), device="cuda:0")
    for value in range(10):
        result = fetch(long.fill_(value))
        others = [fetch(short) for _ in range(50)]
        assert bool((result.result() == value).all())
        assert all(other.result() == 0 for other in others)
