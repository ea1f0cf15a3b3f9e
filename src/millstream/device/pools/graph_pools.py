"""Memory pools that the CUDA graphs of a place share, and the order between replays that follows from that."""

from __future__ import annotations

import threading

from millstream.device.drivers.driver import Driver, GraphPool
from millstream.device.handles import Stream
from millstream.device.pools.events import EventPool
from millstream.device.pools.lifetime import ContextLifetime, capture_lock
from millstream.locks import ForkSafeLock


class SharedGraphMemory:
    """The memory of all graphs of a place. One graph runs at a time: ``with lock``, then ``enter``, then launch.

    Args:
        driver: Makes pools.
        events: For the order between streams.
        lifetime: Of the context.
    """

    def __init__(self, driver: Driver, events: EventPool, lifetime: ContextLifetime) -> None:
        self._driver = driver
        self._events = events
        self._lifetime = lifetime
        self._use = ForkSafeLock()
        self._making = ForkSafeLock()
        self._pools: dict[str, GraphPool] = {}
        self._stream: Stream | None = None  # on which a graph of this place ran last
        self._stream_handle: int | None = None

    @property
    def pool(self) -> GraphPool:
        """The memory pool that all CUDA graphs of this place share, as ``torch.cuda.graph(pool=...)`` takes it.

        Graphs that share a pool may overwrite each other's temporaries: they must not run at the same time, and what
        one of them left in the pool is gone once another has run. On the CPU it is ``(0, 0)``, PyTorch's name for no
        pool.
        """
        return self._find_pool("graphs")

    @property
    def workspace_pool(self) -> GraphPool:
        """The memory pool of what libraries work in while graphs of this place run. Nothing else is put there."""
        return self._find_pool("workspaces")

    def _find_pool(self, use: str) -> GraphPool:
        self._lifetime.check()
        pool = self._pools.get(use)
        if pool is None:
            with capture_lock(), self._making.lock:  # making one captures
                if use not in self._pools:
                    self._pools[use] = self._driver.make_graph_pool()
                pool = self._pools[use]
        return pool

    def abandon_pools(self) -> None:
        """Let the pools be others from now on: a capture that failed leaves its pool recording for ever."""
        with self._making.lock:
            self._pools = {}

    @property
    def lock(self) -> threading.RLock:
        """Hold it from ``enter`` until the graph is launched and its results are copied.

        A thread that needs the context's ``capture_lock``, too, takes this one first.
        """
        return self._use.lock

    @property
    def stream_handle(self) -> int | None:
        """Raw handle of the stream on which a graph of this place ran last; where it is current, all is in order."""
        return self._stream_handle

    def enter(self) -> None:
        """Let the current stream wait for the one that ran a graph of this place last: graphs share memory."""
        stream, before = self._driver.current_stream(), self._stream
        if before is None or stream != before:  # to PyTorch, no stream is unequal to None
            if before is not None and not self._is_captured(before):
                self._events.order(before, stream)
            self._stream = stream
            self._stream_handle = getattr(stream, "cuda_stream", None)

    def _is_captured(self, stream: Stream) -> bool:
        """Return whether a user captures a graph on a stream, of which events recorded there would become a part.

        What ran there is done then: PyTorch waits for the device before it captures.
        """
        with self._driver.on(stream):
            return self._driver.is_capturing()

    def clear(self) -> None:
        """Drop the pools, and the stream of the last graph."""
        self._pools = {}
        self._stream = self._stream_handle = None
