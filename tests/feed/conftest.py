import gc
import threading

import pytest

from millstream.device import Place
from millstream.feed import Feed, feeder
from millstream.feed.feeder import Options
from tests.device.virtual_device import make_virtual_context


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("millstream-feed")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    if feed_threads():  # held by a traceback or a cycle; a collection costs more than most of these tests
        gc.collect()
    assert feed_threads() == []


@pytest.fixture
def virtual_feed(monkeypatch):
    """Make a feed to a virtual device, and that device: ``virtual_feed(loader, depth, mood, seed, **options)``."""

    def make(loader, depth=2, mood="lazy", seed=0, **options):
        ctx, device = make_virtual_context(mood, seed)
        monkeypatch.setattr(feeder, "context", lambda place: ctx)
        device.context = ctx
        return Feed(loader, Place("cuda", 0), Options(depth, **options)), device

    return make
