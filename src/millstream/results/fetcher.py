"""The way of results to the host: the caller's side and the fetcher's thread.

The caller's thread copies the result, on the device and on its own stream, into a stretch of a buffer pool: whatever
happens to the original next (a graph overwrites it, the allocator hands its memory out), comes after that. The
fetcher's thread then brings the stretch to the host on a stream of its own, into pinned memory laid out in the same
way, and waits for it there. What the device has finished while one copy was under way travels together in the next.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from millstream.data.transfer.batch_layout import describe_apart, is_plain, narrow_repeats, plan_layout, view_leaf
from millstream.device import DeviceContext, Stream, StreamMarker, wait_until_reached
from millstream.device.drivers.driver import Copies
from millstream.errors import DeviceError, FeedError
from millstream.results.pool import PoolClosed, ResultPool
from millstream.results.result import Fetched, OnResult, Result, bring, fail, flatten, read

_logger = logging.getLogger(__name__)

POOL_BYTES = 1 << 20
"""Room for the results on their way: 4,096 losses."""

LARGE_BYTES = POOL_BYTES // 8
"""A result from here on travels by itself, in memory of its own."""

DEPTH = 256
"""So many results may be on their way; a call for more waits for the first of them."""

JOIN_S = 5.0
"""How long ``close`` waits for results that are still on their way."""


class Fetcher:
    """Brings results of one device to the host; see ``fetch``, which finds the one of a device.

    Args:
        device: The device's context.
        depth: How many results may be on their way.
    """

    def __init__(self, device: DeviceContext, depth: int = DEPTH) -> None:
        self.context = device
        self.closed = False
        self._orders: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
        self._stretches = ResultPool(POOL_BYTES, depth)
        self._buffer: Tensor | None = None
        self._host: Tensor | None = None
        self._made: StreamMarker | None = None  # after the allocation of the pool's buffer
        self._stopped = threading.Event()
        self._lock = threading.RLock()  # of the callers: results are enqueued in the order in which they are counted
        self._thread: threading.Thread | None = None
        self.num_copies = 0

    # --- the callers' side -------------------------------------------------------------------------------------------

    def put(self, value: Any, *, step: int | None = None, callback: OnResult = None) -> Fetched[Any]:
        """Begin to fetch a value; see ``fetch``."""
        future: Fetched[Any] = Fetched(step)
        if callback is not None:
            future.add_done_callback(lambda done: None if done.exception() else callback(done.result()))
        leaves, unflatten = flatten(value)
        on_device = [i for i, leaf in enumerate(leaves) if self._can_be_staged(leaf)]
        staged = frozenset(on_device)
        others = {i: bring(leaf) for i, leaf in enumerate(leaves) if i not in staged}
        result = Result(future, unflatten, others)
        if not on_device:
            try:
                whole = unflatten(read(result))
            except Exception as error:  # noqa: BLE001 - of a type that the user has registered
                fail(result, error, _OWN)
            else:
                future.set_result(whole)
            return future
        if self.context.is_capturing():
            raise FeedError(
                f"A result was fetched while the current stream of {self.context.place} is being captured into a CUDA "
                "graph, in which it has no value yet. Fetch what the replay leaves behind."
            )
        self._send(result, on_device, [leaves[i].detach() for i in on_device])
        return future

    def _send(self, result: Result, on_device: Sequence[int], leaves: Sequence[Tensor]) -> None:
        specs = describe_apart(leaves)
        layout = plan_layout(specs)
        starts = [layout.segments[segment].start + start for segment, start in layout.position]
        result.staged, result.specs, result.offsets = on_device, specs, starts
        result.num_bytes = layout.num_bytes
        # A callback that fetches must not wait for what the thread that it is in does.
        may_wait = threading.current_thread() is not self._thread
        self._start()
        try:
            if may_wait:
                self._stretches.count(result.stretch)
            with self._lock if may_wait else nullcontext():
                if self.closed:
                    raise PoolClosed
                self._snapshot(result, leaves, is_alone=not may_wait or result.num_bytes >= LARGE_BYTES)
                self._orders.put(result)
            if self._stopped.is_set():
                self._sweep()
        except BaseException as error:
            # Ctrl-C may come at any moment. The other thread sees what came of it, and takes everything back once.
            self._orders.put(result)
            if isinstance(error, PoolClosed):
                closed = f"The context of {self.context.place} is closed; nothing can be fetched."
                raise DeviceError(closed) from None
            if not isinstance(error, RuntimeError):
                raise
            fail(result, error, _OWN)  # of the device, from an earlier step perhaps: it belongs to the result

    def _start(self) -> None:
        if (self._thread is None or self._thread.ident is None) and not self.closed:
            with self._lock:
                self._thread = self._thread or threading.Thread(target=self._work, name="millstream-fetch", daemon=True)
                if self._thread.ident is None:  # or it has just been started
                    self._thread.start()
            if self.closed:  # meanwhile
                self._orders.put(None)

    def _snapshot(self, result: Result, leaves: Sequence[Tensor], *, is_alone: bool) -> None:
        """Copy what the caller's stream will have made, on that stream; into the pool, if it is not to be alone."""
        device = self.context
        stream = result.home = device.current_stream()
        with torch.inference_mode(False), torch.no_grad():
            if is_alone:
                with device.capture_lock:
                    memory = result.own = device.driver.allocate(result.num_bytes)
            else:
                memory = self._take_space(result, stream)
            views = [view_leaf(memory, *place) for place in zip(result.offsets, result.specs, strict=True)]
            pairs = [(narrow_repeats(a), narrow_repeats(b)) for a, b in zip(views, leaves, strict=True)]
            if len(pairs) == 1:
                pairs[0][0].copy_(pairs[0][1])
            else:
                torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
        result.ready = StreamMarker(device, stream, timing=False)

    def _take_space(self, result: Result, stream: Stream) -> Tensor:
        if self._made is None:
            with self.context.capture_lock:
                buffer, host = self.context.driver.allocate(POOL_BYTES), self.context.pinned(POOL_BYTES)
            made = StreamMarker(self.context, stream, timing=False)
            self._buffer, self._host, self._made = buffer, host, made  # at once: an interrupt may end this before
        assert self._made is not None
        if self._made.stream != stream:
            stream.wait_event(self._made.event)  # WAW: what the memory was before, on the stream that it was taken for
        self._stretches.take(result.stretch, result.num_bytes)
        assert self._buffer is not None
        result.host = self._host
        return self._buffer[result.stretch.start : result.stretch.end]

    def _can_be_staged(self, leaf: Any) -> bool:
        return (
            isinstance(leaf, Tensor)
            and leaf.device == self.context.torch_device
            and self.context.place.kind != "cpu"
            and (is_plain(leaf) or type(leaf) is torch.nn.Parameter)
        )

    # --- the fetcher's own thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        with self.context.driver.in_thread():
            waiting: deque[Result | None] = deque()
            while True:
                if not waiting:
                    self._accept(self._orders.get(), waiting)
                with suppress(queue.Empty):
                    while True:
                        self._accept(self._orders.get_nowait(), waiting)
                if not waiting:
                    continue
                first = waiting.popleft()
                if first is None:
                    for result in waiting:
                        self._orders.put(result)  # to be swept
                    return
                batch = [first]
                # Only what is there already: a host that is far ahead has asked for results of steps yet to come.
                while waiting and (following := waiting[0]) is not None and self._is_ready(following):
                    batch.append(following)
                    waiting.popleft()
                    del following
                self._bring_all(batch)
                del first, batch

    def _accept(self, result: Result | None, waiting: deque[Result | None]) -> None:
        if result is None:
            waiting.append(None)
        elif result.ready is None:  # its caller was interrupted, or met an error
            with suppress(RuntimeError):  # a device in an error state does nothing any more
                if result.stretch.end and result.home is not None:
                    # A copy into the stretch may have been enqueued; the next may be made on another stream (WAW).
                    end = StreamMarker(self.context, result.home, timing=False)
                    wait_until_reached(self.context, end.event, self._stopped)
            self._free(result)
        elif result not in waiting:  # as it is when its caller was interrupted right after having sent it
            waiting.append(result)

    def _is_ready(self, result: Result) -> bool:
        assert result.ready is not None
        with self.context.capture_lock, suppress(RuntimeError):  # which a copy will raise again, for its results
            return result.ready.event.query()
        return True

    def _bring_all(self, results: list[Result]) -> None:
        error: BaseException | None = None
        end = None
        try:
            end = None if self._stopped.is_set() else self._copy(results)
            # The mark must live as long as its event is waited for: others get the event after it.
            if end is None or not wait_until_reached(self.context, end.event, self._stopped):
                error = self._too_late()
        except Exception as caught:  # noqa: BLE001 - whatever the device says, it belongs to these results
            error = caught
        is_late = end is not None and isinstance(error, DeviceError)  # the copy may still be going on
        for result in results:
            try:
                whole = result.unflatten(read(result)) if error is None else None
            except BaseException as caught:  # noqa: BLE001 - no memory, or of a type that the user has registered
                self._end(result, None, caught)
            else:
                self._end(result, whole, error, is_late=is_late)

    def _end(self, result: Result, whole: Any, error: BaseException | None, *, is_late: bool = False) -> None:
        """Give back what a result has taken, then complete its future: callbacks may fetch in turn."""
        self._free(result, is_late=is_late)
        try:
            if error is None:
                result.future.set_result(whole)
            else:
                fail(result, error, _OWN)
        except BaseException:  # whatever a callback raises, others still wait for this thread
            _logger.exception("A callback of a fetched result has raised")

    def _copy(self, results: list[Result]) -> StreamMarker:
        """Enqueue the copies: one for all that lie in the pool one after the other, one for each large one."""
        device, stream = self.context, self.context.streams.to_host
        runs: list[list[int]] = []
        for result in results:
            assert result.ready is not None
            stream.wait_event(result.ready.event)  # RAW
            if result.own is not None:
                result.host = device.pinned(result.num_bytes)
                device.driver.copy(Copies([(result.host, result.own)], stream))
                self.num_copies += 1
            else:
                if not runs or runs[-1][1] != result.stretch.start:
                    runs.append([result.stretch.start, result.stretch.start])
                runs[-1][1] = result.stretch.end
        for start, end in runs:
            assert self._buffer is not None
            assert self._host is not None
            device.driver.copy(Copies([(self._host[start:end], self._buffer[start:end])], stream))
            self.num_copies += 1
        return StreamMarker(device, stream, timing=False)

    def _free(self, result: Result, *, is_late: bool = False) -> None:
        if result.own is not None and result.host is not None and is_late and result.home is not None:
            self._release_late(result.host, result.home)
        elif result.own is not None and result.host is not None:
            # The copy is over, or the device is of no use any more; so the memory may go back to the caller's stream.
            self.context.release_pinned(result.host)
        result.own = result.host = result.ready = result.home = None
        self._stretches.give_back(result.stretch)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _release_late(self, host: Tensor, home: Stream) -> None:
        """Give pinned memory back into which a copy may still be going on, from memory that goes home next (WAR)."""
        device, over = self.context, None
        with suppress(RuntimeError, DeviceError):  # a device in an error state, or closed, copies nothing any more
            over = device.events.acquire()
            over.record(device.streams.to_host)
            home.wait_event(over)
        device.release_pinned(host, after=over)

    def close(self) -> None:
        """Wait for what is on its way, a bounded time, and end the thread. Closing again does nothing."""
        if self.closed:
            return
        self.closed = True
        is_other = threading.current_thread() is not self._thread
        if is_other:
            self._orders.put(None)
            self._join()
        self._stopped.set()
        self._stretches.close()
        if is_other:
            self._join()
        self._sweep()
        self._orders.put(None)  # for the thread, if this is called in it
        if self._lock.acquire(timeout=JOIN_S):  # a thread that is in there does not wait any more
            try:
                if self._host is not None and self._made is not None and not self.context.closed:
                    self._release_late(self._host, self._made.stream)
                self._buffer = self._host = self._made = None
            finally:
                self._lock.release()

    def _join(self) -> None:
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def _sweep(self) -> None:
        """End what has come after the end."""
        with suppress(queue.Empty):
            while True:
                late = self._orders.get_nowait()
                if late is not None and late.future.done():  # by an error that its caller has met
                    self._free(late)
                elif late is not None:
                    self._end(late, None, self._too_late())

    def _too_late(self) -> DeviceError:
        return DeviceError(f"The context of {self.context.place} was closed before the result had come.")


_OWN = {each.__code__ for each in (Fetcher.put, Fetcher._bring_all, Fetcher._copy)}
