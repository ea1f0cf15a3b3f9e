"""Capturing, on a device made of software: what replays and captures share, and what must not happen meanwhile."""

import gc
import random
from contextlib import suppress

import pytest

from millstream.device.cuda_graphs import capturing
from millstream.device.cuda_graphs.capturing import capture
from millstream.device.pools.events import EventPool
from tests.device.virtual_device import make_virtual_context


class Graph:
    """As those of PyTorch 2.11: a capture resets, on its stream, the offset that all replays read."""

    def __init__(self, device, memory):
        self.device, self.memory = device, memory

    def capture_begin(self, *_, **__):
        self.device.current_stream().enqueue(lambda: self.memory.update(offset=0))

    def capture_end(self):
        pass

    def replay(self, offset, drawn):
        stream = self.device.current_stream()
        stream.enqueue(lambda: self.memory.update(offset=offset))
        stream.enqueue(lambda: drawn.append(self.memory["offset"]))


def run(seed, mood):
    """Replays and captures in any order, on several streams; whether each replay has drawn from its own offset."""
    rng = random.Random(seed)
    ctx, device = make_virtual_context(mood, seed)
    streams = [ctx.current_stream(), *(ctx.streams[i] for i in range(1, 4))]
    graph, drawn = Graph(device, {}), []
    for offset in range(1, 30):
        with ctx.on(rng.choice(streams)):
            ctx.graphs.enter()
            graph.replay(offset, drawn)
        if rng.random() < 0.4:
            with ctx.on(rng.choice(streams)), capture(ctx, graph):
                pass
    ctx.synchronize()
    return drawn == list(range(1, 30))


@pytest.mark.parametrize("mood", ["eager", "lazy", "random"])
def test_a_capture_leaves_replays_their_random_offset(mood):
    for seed in range(60):
        assert run(seed, mood), seed


def test_a_missing_wait_is_seen(monkeypatch):
    monkeypatch.setattr(EventPool, "order", lambda *_: None)
    assert not all(run(seed, "random") for seed in range(20))


def test_nothing_is_recorded_on_a_stream_that_a_user_captures():
    ctx, device = make_virtual_context("lazy", 0)
    with ctx.on(ctx.streams[1]):
        ctx.graphs.enter()
    device.capturing = ctx.streams[1]
    with ctx.on(ctx.streams[2]):
        ctx.graphs.enter()
    assert not ctx.streams[1].queue


def test_what_went_wrong_first_is_told(monkeypatch):
    def end(self):
        raise RuntimeError("there was an error before")

    monkeypatch.setattr(Graph, "capture_end", end)
    ctx, device = make_virtual_context("eager", 0)
    with pytest.raises(RuntimeError, match="no handle"), capture(ctx, Graph(device, {})):
        raise RuntimeError("no handle")
    with pytest.raises(RuntimeError, match="before"), capture(ctx, Graph(device, {})):
        pass


@pytest.mark.parametrize("can_be_ended", [True, False])
def test_the_allocator_leaves_what_a_capture_that_cannot_be_ended_records_into(monkeypatch, can_be_ended):
    def end(self):
        if not can_be_ended:
            raise RuntimeError("there was an error before")

    left = []
    monkeypatch.setattr(Graph, "capture_end", end)
    monkeypatch.setattr(capturing, "stop_recording", lambda index, pool: left.append(pool))
    ctx, device = make_virtual_context("eager", 0)
    own = ctx.driver.name_graph_pool()
    for pool in (None, (3, 4)):
        with pytest.raises(RuntimeError, match="no handle"), capture(ctx, Graph(device, {}), pool):
            raise RuntimeError("no handle")
    assert left == ([] if can_be_ended else [own, (3, 4)])
    with suppress(RuntimeError), capture(ctx, Graph(device, {}), (5, 6)):
        pass  # where nothing fails before, but the end does
    assert left[2:] == ([] if can_be_ended else [(5, 6)])


def test_a_capture_is_ended_on_its_own_stream_whatever_is_current_when_it_fails(monkeypatch):
    """On another one PyTorch refuses before it has ended anything."""

    def end(self):
        if self.device.current_stream() is not ctx.streams[0]:
            raise RuntimeError("Capture must end on the same stream it began on.")
        ended.append(self)

    ended = []
    monkeypatch.setattr(Graph, "capture_end", end)
    ctx, device = make_virtual_context("eager", 0)
    graph = Graph(device, {})

    def fail_elsewhere():
        device.local.stream = ctx.streams[1]  # as the text of a plan on several streams does
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"), capture(ctx, graph):
        fail_elsewhere()
    assert ended == [graph]
    assert device.current_stream() is device.default


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, RuntimeError])
@pytest.mark.parametrize("where", ["begin", "switch", "body"])
def test_a_capture_that_fails_is_ended_and_repaired_at_once(monkeypatch, error, where):
    class Failing(Graph):
        def capture_begin(self, *_, **__):
            seen.append("begun")
            if where == "begin":
                raise error

        def capture_end(self):
            seen.append("ended")

    class Switch:
        def __init__(self, stream):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *_):
            if where == "switch":
                raise error

    seen = []
    ctx, device = make_virtual_context("eager", 0)
    monkeypatch.setattr(capturing, "repair", lambda context: seen.append("repaired"))
    monkeypatch.setattr(capturing, "RunOn", Switch)
    with pytest.raises(error), capture(ctx, Failing(device, {})):
        raise error
    assert seen == ["begun", "ended", "repaired"]


@pytest.mark.parametrize("was_enabled", [True, False])
def test_no_garbage_is_collected_meanwhile(was_enabled):
    class Cyclic:
        def __init__(self):
            self.itself = self

        def __del__(self):
            died.append(gc.isenabled())

    def capture_and_fail():
        with capture(ctx, Graph(device, {})):
            Cyclic()
            num_made = len([[] for _ in range(100_000)])
            assert not died
            num_made / 0

    died = []
    ctx, device = make_virtual_context("eager", 0)
    try:
        if not was_enabled:
            gc.disable()
        with pytest.raises(ZeroDivisionError):
            capture_and_fail()
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
    made = [[] for _ in range(100_000)]
    assert (len(made), died) == (100_000, [True])
