import gc
import threading

import pytest

from millstream.device import Place
from millstream.feed import Feed, feeder
from millstream.feed.feeder import Options
from millstream.feed.pace import Pace, PaceMaker
from tests.device.virtual_device import make_virtual_context


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("millstream-feed")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    if feed_threads():  # held by a traceback or a cycle; a collection costs more than most of these tests
        gc.collect()
    assert feed_threads() == []


WAYS = ("cpu", "virtual", "cpu, alone", "virtual, alone")
"""Where a feed goes, and whether its passes have a worker."""

WITH_WORKER = pytest.mark.parametrize("make_feed", WAYS[:2], indirect=True)


@pytest.fixture(params=WAYS)
def make_feed(request, virtual_feed, monkeypatch):
    """Make a feed: ``make_feed(loader, depth, **options)``; ``make_feed.alone`` tells whether it has no worker."""
    place, _, alone = request.param.partition(", ")

    def make(loader, depth=2, **options):
        if place == "cpu":
            return Feed(loader, Place("cpu"), Options(depth, **options))
        return virtual_feed(loader, depth, "eager", **options)[0]

    make.alone = bool(alone)
    if alone:
        monkeypatch.setattr(PaceMaker, "begin_pass", lambda self, may_be_alone: Pace(alone=may_be_alone))
    return make


@pytest.fixture
def virtual_feed(monkeypatch):
    """Make a feed to a virtual device, and that device: ``virtual_feed(loader, depth, mood, seed, **options)``."""

    def make(loader, depth=2, mood="lazy", seed=0, **options):
        ctx, device = make_virtual_context(mood, seed)
        monkeypatch.setattr(feeder, "context", lambda place: ctx)
        device.context = ctx
        return Feed(loader, Place("cuda", 0), Options(depth, **options)), device

    return make
