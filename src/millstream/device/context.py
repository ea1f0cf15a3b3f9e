"""One context per place: its streams, events, pinned memory and graph pool, made on first use and torn down in order.

Life of a context:

- ``context(place)`` for the first time makes it; CUDA is initialised, nothing is allocated.
- ``stream(i)``, ``acquire_event()``, ``pinned(n)``, ... make each thing when it is first asked for, and keep it.
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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from millstream.device.arena import PinnedArena
from millstream.device.drivers.base import Driver, GraphPool, Transfer
from millstream.device.drivers.cpu import CpuDriver
from millstream.device.drivers.cuda import CudaDriver
from millstream.device.handles import Event, Stream
from millstream.device.place import Place
from millstream.errors import ArgumentError, DeviceError

MAX_STREAMS = 32
"""PyTorch has this many streams per device and priority and then hands out the same ones again."""

MAX_LENT_STREAMS = 128
"""So many kernels run at one time on any device of today: more streams could only take more workspaces."""


class Closeable(Protocol):
    """Something that uses a context and must end before it."""

    def close(self) -> None:
        """End; calling it again does nothing."""
        ...


class DeviceContext:
    """What one place lends to engines and feeders. Get it from ``context(place)``.

    All methods may be called from any thread. The CPU's context has the same interface; its streams and events do
    nothing, because there everything has happened when a call returns.

    Args:
        place: The device.
        driver: How to reach it; by default the one for the place's kind. Tests pass a virtual device.

    Attributes:
        place: The device.
    """

    def __init__(self, place: Place, driver: Driver | None = None) -> None:
        self.place = place
        self._driver: Driver = driver or (CpuDriver() if place.kind == "cpu" else CudaDriver(place))
        self._graph_lock = threading.RLock()
        self._lock = threading.RLock()  # re-entrant: a finalizer may run while its own thread holds it
        self._streams: dict[int, Stream] = {}
        self._copy_streams: dict[str, Stream] = {}
        self._lendable: dict[tuple[int, int], list[Stream]] = {}  # by thread and by the stream that they start from
        self._lent: set[int] = set()  # identities of those that are out
        self._num_moved = 0  # how many of them have gone from one thread or base to another
        self._pools: dict[str, GraphPool] = {}
        self._graph_stream_handle: int | None = None
        self._graph_stream: Stream | None = None  # on which a graph of this place ran last
        # The pools of events are deques without a lock: append and pop are atomic, so a finalizer can give events back
        # at any moment, even while this thread is inside ``acquire_event``.
        self._idle_events: dict[bool, deque[Event]] = {False: deque(), True: deque()}
        self._lent_events: dict[int, bool] = {}
        self._arena = PinnedArena(self._driver.pin, self.release_event)
        self._users: weakref.WeakSet[Closeable] = weakref.WeakSet()
        self._end: str = ""  # why the context is of no use any more; empty while it is

    @property
    def torch_device(self) -> torch.device:
        """The device on which this context's tensors live."""
        return self._driver.torch_device

    # --- streams -----------------------------------------------------------------------------------------------------

    def stream(self, index: int) -> Stream:
        """Stream number ``index`` of this place, the same one for the life of the context.

        Streams of different numbers are different streams (and none of them is the copy stream), so that work on them
        can overlap. Nobody else is handed them, where CUDA's driver makes them; PyTorch's own it shares among all.

        Raises:
            ArgumentError: ``index`` is negative or at least ``MAX_STREAMS``.
            DeviceError: The context is closed.
        """
        self._check_open()
        if not 0 <= index < MAX_STREAMS:
            raise ArgumentError(
                f"Stream {index} of {self.place} does not exist: the numbers go from 0 to {MAX_STREAMS - 1}, because "
                f"PyTorch has {MAX_STREAMS} streams and then hands out the same ones again."
            )
        stream = self._streams.get(index)
        if stream is None:
            with self._lock:
                if index not in self._streams:
                    self._streams[index] = self._make_distinct_stream(high_priority=False)
                stream = self._streams[index]
        return stream

    @property
    def copy_stream(self) -> Stream:
        """The one stream for batches on their way to the device; of kernels, only users' transforms run on it.

        It is of high priority. That does not speed copies up, but it takes the stream from another of PyTorch's sets
        than the one that users, capture and ``stream(i)`` draw from: were a user to capture a graph on the stream that
        the feeder copies on, the copies would end up in the graph.
        """
        return self._find_copy_stream("to the device")

    @property
    def fetch_stream(self) -> Stream:
        """The one stream for results on their way to the host.

        Another than the ``copy_stream``: what is to be fetched comes at the end of a step, and batches that were
        enqueued behind it would wait for that.
        """
        return self._find_copy_stream("to the host")

    def _find_copy_stream(self, way: str) -> Stream:
        self._check_open()
        stream = self._copy_streams.get(way)
        if stream is None:
            with self._lock:
                if way not in self._copy_streams:
                    self._copy_streams[way] = self._make_distinct_stream(high_priority=True)
                stream = self._copy_streams[way]
        return stream

    def lend_streams(self, base: Stream, count: int) -> list[Stream]:
        """Lend streams for work that starts from ``base`` and is joined to it, to be given to ``return_streams``.

        The same thread gets the same ones for the same base, lowest first. That keeps memory safe after the join: what
        was allocated on such a stream and is freed later goes back to it, and whoever works there next starts from the
        stream that used it.

        Raises:
            DeviceError: The context is closed, or ``MAX_LENT_STREAMS`` are out.
        """
        self._check_open()
        key = threading.get_ident(), self._driver.stream_id(base)
        with self._lock:
            found = self._lend(key, count, moves=False)
        if found is None:
            with self.capture_lock, self._lock:  # in the order in which pools are made
                found = self._lend(key, count, moves=True)
        return found or []

    def _lend(self, key: tuple[int, int], count: int, *, moves: bool) -> list[Stream] | None:
        """Find the streams to lend; ``None`` where idle ones of others would have to move."""
        own = self._lendable.setdefault(key, [])
        found = [stream for stream in own if id(stream) not in self._lent][:count]
        while len(found) < count:
            is_full = sum(map(len, self._lendable.values())) >= MAX_LENT_STREAMS
            if is_full and not moves:
                return None
            stream = self._take_idle() if is_full else self._make_distinct_stream(high_priority=False)
            own.append(stream)
            found.append(stream)
        self._lent.update(map(id, found))
        return found

    def return_streams(self, streams: Sequence[Stream]) -> int:
        """Take lent streams back: all work on them is joined to the stream that they started from.

        Returns:
            What ``lend_again`` asks for.
        """
        self._lent.difference_update(map(id, streams))
        return self._num_moved

    def lend_again(self, streams: Sequence[Stream], ticket: int) -> bool:
        """Lend the same streams to who has returned them; False where they may be somebody else's by now."""
        with self._lock:
            if ticket != self._num_moved or self._end:
                return False
            self._lent.update(map(id, streams))
        return True

    def _take_idle(self) -> Stream:
        """One that another thread or base has left idle, as there are as many as there may be."""
        for own in self._lendable.values():
            for stream in own:
                if id(stream) not in self._lent:
                    self._driver.synchronize()  # nothing tells when its last user was done with memory from it
                    own.remove(stream)
                    self._num_moved += 1
                    return stream
        raise DeviceError(
            f"{MAX_LENT_STREAMS} streams of {self.place} are in use at one time; fork fewer, or smaller groups."
        )

    @property
    def streams(self) -> StreamPool:
        """The numbered streams of this place as a sequence, and those of the copies by name."""
        self._check_open()
        return StreamPool(self)

    @property
    def handles(self) -> LibraryHandles:
        """Handles and workspaces of libraries, which PyTorch makes when a stream first needs them."""
        self._check_open()
        return LibraryHandles(self)

    def current_stream(self) -> Stream:
        """The stream on which the calling thread's operators run on this place."""
        if self._end:  # asked for every batch, when nothing is in the processor's caches: one call less
            self._check_open()
        return self._driver.current_stream()

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Run the body's operators on ``stream``; device and streams of the thread are restored afterwards."""
        self._check_open()
        return self._driver.on(stream)

    def stream_id(self, stream: Stream) -> int:
        """A number that no other stream of this place has."""
        return self._driver.stream_id(stream)

    def current_stream_id(self) -> int:
        """``stream_id(current_stream())``, without making the object."""
        return self._driver.current_stream_id()

    def current_stream_getter(self) -> Callable[[], int]:
        """What ``current_stream_id`` calls, for who asks often."""
        return self._driver.current_stream_id

    def stream_getters(self) -> tuple[Callable[[], bool], Callable[[], Stream]]:
        """What ``is_capturing`` and ``current_stream`` call, for who asks for every batch; also of a closed context."""
        return self._driver.is_capturing, self._driver.current_stream

    def is_current(self) -> bool:
        """Whether this device is the calling thread's current one."""
        return self._driver.is_current()

    def is_capturing_elsewhere(self) -> bool:
        """Whether the calling thread captures a graph on another device, which then is its current one."""
        return self._driver.is_capturing_elsewhere()

    def entry(self, stream: Stream) -> Callable[[], Any]:
        """A function that makes ``stream`` the calling thread's current one, and restores nothing."""
        return self._driver.entry(stream)

    def guard(self) -> AbstractContextManager[Any]:
        """Make this device the calling thread's current one for a while; afterwards restore device and streams."""
        self._check_open()
        return self._driver.guard()

    def mark_use(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """Let PyTorch's allocator, when the storage is freed, keep it until ``stream`` has done what it has by then."""
        self._driver.mark_use(storage, stream)

    def is_capturing(self) -> bool:
        """Tell whether the calling thread's current stream on this place is being captured."""
        if self._end:
            self._check_open()
        return self._driver.is_capturing()

    def in_thread(self) -> AbstractContextManager[None]:
        """Enter this first in a helper thread: sets its device, and keeps its calls from killing others' captures."""
        self._check_open()
        return self._driver.in_thread()

    def spare_captures(self) -> AbstractContextManager[None]:
        """Enter this in a thread that is somebody else's: keeps its calls from killing others' captures meanwhile."""
        self._check_open()
        return self._driver.spare_captures()

    # --- events ------------------------------------------------------------------------------------------------------

    def acquire_event(self, *, timing: bool = False) -> Event:
        """Lend an event. Record it before anything waits for it: it still stands where its last user recorded it.

        Raises:
            DeviceError: The context is closed.
        """
        if self._end:
            self._check_open()
        try:
            event = self._idle_events[timing].pop()
        except IndexError:
            event = self._driver.make_event(timing=timing)
        self._lent_events[id(event)] = timing
        return event

    def release_event(self, event: Event) -> None:
        """Take a lent event back. Waits that were enqueued on it stay right: they hold what was recorded *then*.

        Raises:
            DeviceError: The event is not lent. Two users of one event would order their work by each other's records.
        """
        if self._end:
            return
        timing = self._lent_events.pop(id(event), None)
        if timing is None:
            raise DeviceError(
                f"This event is not one that {self.place} has lent: it was released before, or comes from elsewhere."
            )
        self._idle_events[timing].append(event)

    def forget_event(self, event: Event) -> None:
        """Give a lent event up, as somebody may still record it: it is lent to nobody again."""
        self._lent_events.pop(id(event), None)

    def order(self, first: Stream, then: Stream) -> None:
        """Let ``then`` wait for what has been enqueued on ``first``."""
        event = self.acquire_event()
        event.record(first)
        then.wait_event(event)
        self.release_event(event)

    # --- memory ------------------------------------------------------------------------------------------------------

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
        self._check_open()
        with self.capture_lock:  # pinning, and asking for events of blocks that came back, would end a capture
            return self._arena.take(num_bytes, reserve_bytes)

    def release_pinned(self, block: Tensor, *, after: Event | None = None) -> None:
        """Take a block back. Nobody may touch the tensor (or a view of it) any more.

        Args:
            block: What ``pinned`` returned, not a view of it.
            after: A lent event behind the last use of the block by the device; the block is not lent again before
                it is reached. The event is given back with it.

        Raises:
            DeviceError: The block is not lent.
        """
        if not self._end:
            self._arena.give_back(block, after)

    @property
    def pinned_bytes(self) -> int:
        """Host memory that this context holds for staging, in use or not."""
        return self._arena.num_bytes

    @property
    def graph_pool(self) -> GraphPool:
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

    def name_graph_pool(self) -> GraphPool:
        """Name a pool that one graph may have for itself."""
        return self._driver.name_graph_pool()

    def _find_pool(self, use: str) -> GraphPool:
        self._check_open()
        pool = self._pools.get(use)
        if pool is None:
            with self.capture_lock, self._lock:  # making one captures
                if use not in self._pools:
                    self._pools[use] = self._driver.make_graph_pool()
                pool = self._pools[use]
        return pool

    def abandon_graph_pools(self) -> None:
        """Let the pools be others from now on: a capture that failed leaves its pool recording for ever."""
        with self._lock:
            self._pools = {}

    @property
    def graph_lock(self) -> threading.RLock:
        """Hold it from ``enter_graphs`` until the graph is launched and its results are copied.

        Who needs the ``capture_lock``, too, takes this one first.
        """
        return self._graph_lock

    @property
    def graph_stream_handle(self) -> int | None:
        """Raw handle of the stream on which a graph of this place ran last; where it is current, all is in order."""
        return self._graph_stream_handle

    def enter_graphs(self) -> None:
        """Order the current stream behind whatever stream ran a graph of this place last: graphs share memory."""
        stream = self._driver.current_stream()
        if stream != self._graph_stream:
            if self._graph_stream is not None:
                self.order(self._graph_stream, stream)
            self._graph_stream = stream
            self._graph_stream_handle = getattr(stream, "cuda_stream", None)

    # --- work --------------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate a uint8 tensor of the device, whose memory belongs to the calling thread's current stream.

        That is: the memory may have been freed by the host a moment ago, while kernels on the current stream still use
        it. Other streams may touch the tensor only behind an event that is recorded on the current stream after this
        call; and when the tensor is freed, the current stream must have been made to wait for what they did.
        """
        self._check_open()
        return self._driver.allocate(num_bytes)

    def lend(self, memory: Tensor, token: object) -> Tensor:
        """See ``memory`` (a plain tensor, not empty) as one of the same form that tells when nobody uses it any more.

        The result and its views have a storage of their own over the same bytes. It keeps ``token`` alive, and
        ``memory``; when the last of them is gone, both are dropped, in whatever thread that happens.
        """
        self._check_open()
        return self._driver.lend(memory, token)

    def copy(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        stream: Stream,
        *,
        waits: Sequence[Event] = (),
        before: Sequence[Event] = (),
        after: Sequence[Event] = (),
    ) -> None:
        """Enqueue copies on ``stream``, each to the first of a pair from the second.

        No tensor may be reused before the stream is past it.

        Args:
            pairs: Tensors of one size and dtype.
            stream: Where.
            waits: Events for which the stream waits first of all.
            before: Events to be recorded in front of the copies.
            after: Events to be recorded after them.
        """
        self._check_open()
        self._driver.copy(Transfer(pairs, stream, waits, before, after))

    def prepare_copy(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        stream: Stream,
        *,
        waits: Sequence[Event] = (),
        after: Sequence[Event],
    ) -> Callable[[], int] | None:
        """``copy`` as a function that may be called often, with little left to do for Python.

        It keeps no tensor alive: nobody may call it when one is gone. It gives 0 if all was enqueued, as ``copy`` does
        where it raises no error; if not, ``copy`` is to be asked, which raises. ``None`` where nothing can be prepared,
        as before the events have been recorded for the first time.
        """
        self._check_open()
        return self._driver.prepare_copy(Transfer(pairs, stream, waits, (), after))

    def synchronize(self) -> None:
        """Block the host until the device has done all work given to it, by anyone."""
        self._check_open()
        self._driver.synchronize()

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
        return _capture_lock

    # --- life --------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the context can no longer be used."""
        return bool(self._end)

    def attach(self, user: Closeable) -> None:
        """Have ``user`` closed before this context is, also when the interpreter ends; this does not keep it alive."""
        self._check_open()
        self._users.add(user)

    def close(self) -> None:
        """Close the users, wait for the device, and drop everything, streams last. Closing again does nothing.

        ``context(place)`` makes a new context afterwards. Whatever was lent by this one is the borrower's own from here
        on; giving it back does nothing.
        """
        if self._end:
            return
        for user in list(self._users):
            user.close()
        with self._lock:
            if self._end:
                return
            self._end = "has been closed"
        _forget(self)
        try:
            # Nothing may be dropped that the device still reads: a pinned chunk in the middle of a copy, an event that
            # a stream waits for.
            with self.capture_lock:
                self._driver.synchronize()
        finally:
            for pool in self._idle_events.values():
                pool.clear()
            self._lent_events.clear()
            self._arena.clear()
            self._pools = {}
            self._graph_stream = self._graph_stream_handle = None
            self._streams.clear()
            self._copy_streams.clear()
            self._lendable.clear()
            self._lent.clear()

    def __repr__(self) -> str:
        return f"<DeviceContext of {self.place}{', ' + self._end if self._end else ''}>"

    def _check_open(self) -> None:
        if self._end:
            raise DeviceError(f"The context of {self.place} {self._end}; ask ms.device_context for a new one.")

    def _make_distinct_stream(self, *, high_priority: bool) -> Stream:
        # PyTorch hands its 32 streams out in turn, and others draw from the same 32: a full turn shows each of them.
        for _ in range(2 * MAX_STREAMS):
            stream = self._driver.make_stream(high_priority=high_priority)
            lendable = (lent for own in self._lendable.values() for lent in own)
            if all(stream != other for other in (*self._streams.values(), *self._copy_streams.values(), *lendable)):
                return stream
        raise DeviceError(f"PyTorch hands out no stream of {self.place} beyond the {len(self._streams)} in use.")


class StreamPool(Sequence[Stream]):
    """The streams of a context: ``pool[i]`` is ``context.stream(i)``, made on first use.

    Attributes:
        to_device: For copies to the device, of high priority.
        to_host: For copies to the host, of high priority.
    """

    def __init__(self, owner: DeviceContext) -> None:
        self._owner = owner

    def __len__(self) -> int:
        return MAX_STREAMS

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._owner.stream(each) for each in range(*index.indices(MAX_STREAMS))]
        if index == MAX_STREAMS:
            raise IndexError(index)  # ends an iteration
        return self._owner.stream(index)

    @property
    def to_device(self) -> Stream:
        """``context.copy_stream``."""
        return self._owner.copy_stream

    @property
    def to_host(self) -> Stream:
        """``context.fetch_stream``."""
        return self._owner.fetch_stream

    def __repr__(self) -> str:
        return f"<streams of {self._owner.place}, {len(self._owner._streams)} made>"


class LibraryHandles:
    """What libraries keep for a context. Nothing is made before it is asked for."""

    def __init__(self, owner: DeviceContext) -> None:
        self._owner = owner

    def blas(self, stream: Stream | None = None) -> int:
        """The calling thread's cuBLAS handle, set to a stream (by default the current one); 0 on the CPU."""
        driver = self._owner._driver
        with self._owner.guard(), driver.on(stream or driver.current_stream()):
            return driver.blas_handle()

    @property
    def workspace_bytes(self) -> int:
        """What cuBLAS takes for each stream that multiplies matrices."""
        return self._owner._driver.workspace_bytes()


# --- the contexts of this process
# --------------------------------------------------------------------------------------

_capture_lock = threading.RLock()
_table_lock = threading.RLock()
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
        with _table_lock:  # two threads that ask first at the same time must not get two pools
            found = _contexts.get(place)
            if found is None:
                found = _contexts[place] = DeviceContext(place)
    return found


def _forget(closed: DeviceContext) -> None:
    with _table_lock:
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
    and events in it, is collected here, which a DataLoader's worker would not survive. The locks are made anew because
    another thread of the parent may have held them at the moment of the fork; in the child nobody would release them.
    """
    global _capture_lock, _table_lock, _contexts  # noqa: PLW0603
    gc.freeze()
    for each in _contexts.values():
        each._end = "belongs to the process that forked this one"
        each._lock, each._graph_lock = threading.RLock(), threading.RLock()
        _inherited.append(each)
    _contexts = {}
    _capture_lock = threading.RLock()
    _table_lock = threading.RLock()


# Helper threads are daemons and thus still run when the functions registered here do: they are ended in order, before
# the interpreter and PyTorch begin to disappear under them.
atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh_after_fork)
