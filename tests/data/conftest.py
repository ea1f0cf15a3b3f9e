import gc
import importlib
import threading
import time

import pytest

from millstream.data import Feed
from millstream.data.feed_options import Options
from millstream.device import Place
from tests.clocks import HANG_S, Clock, is_in, until
from tests.device.virtual_device import make_virtual_context


class ClockOfWaits(Clock):
    """Sleeps when the consumer of a feed waits, as it is sure to do: its thread's time is what the feed then takes."""

    def __init__(self):
        super().__init__()
        self._consumer = threading.current_thread()

    def sleep(self, seconds):
        until(lambda: threading.current_thread() is self._consumer or is_in(self._consumer, "_wait_for_item"))
        super().sleep(seconds)


@pytest.fixture
def clock_of_waits(monkeypatch):
    """What feeds read the time from."""
    clock = ClockOfWaits()
    monkeypatch.setattr(time, "perf_counter_ns", clock.perf_counter_ns)
    return clock


feeding = importlib.import_module("millstream.data.feeding")


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("millstream-feed")]


def is_idle(fed):
    """Whether nobody is inside the feed's source."""
    run = fed._engine.run
    return run is None or run.is_over


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    if feed_threads():  # held by a traceback or a cycle; a collection costs more than most of these tests
        gc.collect()
    for thread in feed_threads():  # its feed is gone, and it is about to end
        thread.join(HANG_S)
    assert feed_threads() == []


WAYS = ("cpu", "virtual", "cpu, inline", "virtual, inline")
"""Where a feed goes, and whether its passes have a worker."""

WITH_WORKER = pytest.mark.parametrize("make_feed", WAYS[:2], indirect=True)


@pytest.fixture(params=WAYS)
def make_feed(request, virtual_feed):
    """Make a feed: ``make_feed(loader, depth, **options)``; ``make_feed.inline`` tells whether it has no worker."""
    place, _, inline = request.param.partition(", ")

    def make(loader, depth=2, **options):
        options = {"prefetch": not inline} | options
        if place == "cpu":
            return Feed(loader, Place("cpu"), Options(depth, **options))
        return virtual_feed(loader, depth, "eager", **options)[0]

    make.inline = bool(inline)
    return make


@pytest.fixture
def virtual_feed(monkeypatch):
    """Make a feed to a virtual device, and that device: ``virtual_feed(loader, depth, mood, seed, **options)``."""

    def make(loader, depth=2, mood="lazy", seed=0, **options):
        ctx, device = make_virtual_context(mood, seed)
        monkeypatch.setattr(feeding, "context", lambda place: ctx)
        device.context = ctx
        return Feed(loader, Place("cuda", 0), Options(depth, **options)), device

    return make
