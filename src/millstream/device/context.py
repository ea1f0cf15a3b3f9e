"""One context per place: its streams, events, pinned memory and graph pool, made on first use and torn down in order.

Life of a context:

- ``context(place)`` for the first time makes it; CUDA is initialised, nothing is allocated.
- ``streams[i]``, ``events.acquire()``, ``pinned(n)``, ... make each thing when it is first asked for, and keep it.
- ``close()``, or the end of the interpreter, closes the users of the context, waits for the device, then drops events,
  pinned memory, the graph pool and, last, the streams.
- After a fork the child sees no context: CUDA does not survive a fork.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
import weakref
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from millstream.device.drivers.cpu import CpuDriver
from millstream.device.drivers.cuda import CudaDriver
from millstream.device.drivers.driver import Driver
from millstream.device.handles import Event, Stream
from millstream.device.place import Place
from millstream.device.pools.events import EventPool
from millstream.device.pools.graph_pools import SharedGraphMemory
from millstream.device.pools.lifetime import ContextLifetime, capture_lock
from millstream.device.pools.pinned_arena import PinnedArena
from millstream.device.pools.stream_pool import StreamPool
from millstream.locks import ForkSafeLock


class Closeable(Protocol):
    """Something that uses a context and must end before it."""

    def close(self) -> None:
        """End; calling it again does nothing."""
        ...


class DeviceContext:
    """The resources of one place that engines and feeders borrow. Get it from ``context(place)``.

    All methods may be called from any thread. The CPU's context has the same interface; its streams and events do
    nothing, because there everything has happened when a call returns.

    Args:
        place: The device.
        driver: How to reach it; by default the one for the place's kind. Tests pass a virtual device.

    Attributes:
        place: The device.
        streams: Its streams: numbered ones, two for copies, and streams to lend.
        events: Its events.
        graphs: What its CUDA graphs share.
        handles: Handles and workspaces of libraries, which PyTorch makes when a stream first needs them.
    """

    def __init__(self, place: Place, driver: Driver | None = None) -> None:
        self.place = place
        self._driver: Driver = driver or (CpuDriver() if place.kind == "cpu" else CudaDriver(place))
        self._lifetime = ContextLifetime(place)
        self._closing = ForkSafeLock()
        self.streams = StreamPool(self._driver, self._lifetime)
        self.events = EventPool(self._driver.make_event, self._lifetime)
        self.graphs = SharedGraphMemory(self._driver, self.events, self._lifetime)
        self.handles = LibraryHandles(self._driver, self._lifetime)
        self._arena = PinnedArena(self._driver.pin, self.events.release)
        self._users: weakref.WeakSet[Closeable] = weakref.WeakSet()

    # --- the device --------------------------------------------------------------------------------------------------

    @property
    def driver(self) -> Driver:
        """The device's runtime. Keep it, to ask it often and to ask it after the context is closed.

        Raises:
            DeviceError: The context is closed.
        """
        if self._lifetime.end:  # asked for every batch, when nothing is in the processor's caches: one call less
            self._lifetime.check()
        return self._driver

    @property
    def torch_device(self) -> torch.device:
        """The device on which this context's tensors live."""
        return self._driver.torch_device

    def current_stream(self) -> Stream:
        """The stream on which the calling thread's operators run on this place."""
        return self.driver.current_stream()

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Run the body's operators on ``stream``; device and streams of the thread are restored afterwards."""
        return self.driver.on(stream)

    def is_capturing(self) -> bool:
        """Tell whether the calling thread's current stream on this place is being captured."""
        return self.driver.is_capturing()

    def synchronize(self) -> None:
        """Block the host until the device has done all work given to it, by anyone."""
        self.driver.synchronize()

    def wait(self) -> None:
        """``synchronize``, by Paddle's name."""
        self.synchronize()

    @property
    def capture_lock(self) -> threading.RLock:
        """Hold it while capturing a CUDA graph, and around every call that would end another thread's capture.

        Such calls are: allocating device or pinned memory, querying an event or stream, synchronising. Enqueueing
        copies and kernels, recording events and making streams wait is always allowed. There is one lock for all
        places, because a capture in CUDA's global mode forbids these calls to every thread on every device. It is
        re-entrant. Never wait for another thread while holding it.
        """
        return capture_lock()

    # --- pinned memory -----------------------------------------------------------------------------------------------

    def pinned(self, num_bytes: int, *, reserve_bytes: int = 0) -> Tensor:
        """Lend a uint8 host tensor that the device can read by itself, aligned to 256 bytes; its content is arbitrary.

        Give it back by ``release_pinned``. On the CPU it is ordinary memory. When the system refuses to pin, it is
        ordinary memory too, and a ``FallbackWarning`` says so once.

        Args:
            num_bytes: Length of the block.
            reserve_bytes: What the caller expects to ask for in all. If memory must be pinned for this block, it is
                pinned for that much at once: pinned memory comes in powers of two, and three blocks rounded together
                waste less.

        Raises:
            ArgumentError: ``num_bytes`` is negative.
            DeviceError: The context is closed.
        """
        self._lifetime.check()
        with capture_lock():  # pinning, and asking for events of blocks that came back, would end a capture
            return self._arena.take(num_bytes, reserve_bytes)

    def release_pinned(self, block: Tensor, *, after: Event | None = None) -> None:
        """Take a block back. Nobody may touch the tensor (or a view of it) any more.

        Args:
            block: What ``pinned`` returned, not a view of it.
            after: A lent event after the last use of the block by the device; the block is not lent again before
                it is reached. The event is given back with it.

        Raises:
            DeviceError: The block is not lent.
        """
        if not self._lifetime.end:
            self._arena.give_back(block, after)

    @property
    def pinned_bytes(self) -> int:
        """Host memory that this context holds for staging, in use or not."""
        return self._arena.num_bytes

    # --- life --------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the context can no longer be used."""
        return bool(self._lifetime.end)

    def attach(self, user: Closeable) -> None:
        """Have ``user`` closed before this context is, also when the interpreter ends; this does not keep it alive."""
        self._lifetime.check()
        self._users.add(user)

    def close(self) -> None:
        """Close the users, wait for the device, and drop everything, streams last. Closing again does nothing.

        ``context(place)`` makes a new context afterwards. Whatever was lent by this one is the borrower's own from here
        on; giving it back does nothing.
        """
        if self.closed:
            return
        for user in list(self._users):
            user.close()
        with self._closing.lock:
            if self.closed:
                return
            self._lifetime.end = "has been closed"
        _forget(self)
        try:
            # Nothing may be dropped that the device still reads: a pinned chunk in the middle of a copy, an event that
            # a stream waits for.
            with capture_lock():
                self._driver.synchronize()
        finally:
            self.events.clear()
            self._arena.clear()
            self.graphs.clear()
            self.streams.clear()

    def __repr__(self) -> str:
        return f"<DeviceContext of {self.place}{', ' + self._lifetime.end if self.closed else ''}>"


class LibraryHandles:
    """Handles of libraries, kept for a context. Nothing is made before it is asked for."""

    def __init__(self, driver: Driver, lifetime: ContextLifetime) -> None:
        self._driver = driver
        self._lifetime = lifetime

    def blas(self, stream: Stream | None = None) -> int:
        """The calling thread's cuBLAS handle, set to a stream (by default the current one); 0 on the CPU."""
        self._lifetime.check()
        with self._driver.guard(), self._driver.on(stream or self._driver.current_stream()):
            return self._driver.blas_handle()

    @property
    def workspace_bytes(self) -> int:
        """What cuBLAS takes for each stream that multiplies matrices."""
        self._lifetime.check()
        return self._driver.workspace_bytes()


# --- the contexts of this process ------------------------------------------------------------------------------------

_table = ForkSafeLock()
_contexts: dict[Place, DeviceContext] = {}
_inherited: list[DeviceContext] = []


def context(place: Place | torch.device | str | int) -> DeviceContext:
    """The context of a place: always the same one, made when it is first asked for.

    Raises:
        DeviceError: The device does not exist.
    """
    place = Place.of(place)
    found = _contexts.get(place)
    if found is None:
        with _table.lock:  # two threads that ask first at the same time must not get two pools
            found = _contexts.get(place)
            if found is None:
                found = _contexts[place] = DeviceContext(place)
    return found


def _forget(closed: DeviceContext) -> None:
    with _table.lock:
        if _contexts.get(closed.place) is closed:
            del _contexts[closed.place]


def _close_all() -> None:
    for each in list(_contexts.values()):
        # A device in an error state refuses to synchronise. That error has been raised where it happened; a second
        # traceback from the interpreter's last moments would only hide it.
        with suppress(RuntimeError):
            each.close()


def _start_afresh_after_fork() -> None:
    """In a forked child: see no context, and never destroy an inherited one.

    CUDA does not survive a fork: any call on an inherited stream, event or pinned block fails or aborts, and so would
    their destructors. So the contexts are kept, unusable, until the child ends; and no garbage of the parent's, graphs
    and events in it, is collected here, which a DataLoader's worker would not survive.
    """
    global _contexts  # noqa: PLW0603
    gc.freeze()
    for each in _contexts.values():
        each._lifetime.end = "belongs to the process that forked this one"
        _inherited.append(each)
    _contexts = {}


# Helper threads are daemons and thus still run when the functions registered here do: they are ended in order, before
# the interpreter and PyTorch begin to disappear under them.
atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh_after_fork)
