"""One pass over a source: the worker thread, its life and its end.

| moment | the consumer's thread | the worker's thread |
|---|---|---|
| begin | makes the source's iterator, waits for the first pull | pulls the first batch |
| running | looks, hands out, removes | pulls, stages, sends, puts |
| the source ends or fails | gets what was put before, then the end or the error | leaves |
| ``close`` at any time | stops the conveyor, waits for the worker, leaves | stops at the next step, leaves |

Whoever leaves second gives the lane back: nothing is taken away from a worker that is still inside the source, and
nobody waits for ever for a source that does not return.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from millstream.errors import FeedError
from millstream.feed.conveyor import Conveyor
from millstream.feed.lane import Lane

JOIN_S = 5.0
"""How long ``close`` waits for the worker. It is nearly always there at once; only a source that is in the middle of
making a batch keeps it, and then it leaves by itself when the source returns."""


class Session:
    """The worker thread of one pass, and what it shares with the consumer.

    Args:
        iterator: Yields the batches. It was made in the consumer's thread: a DataLoader that is set up elsewhere cannot
            report the death of its worker processes.
        lane: The way to the device.
        depth: How many batches may wait.
    """

    def __init__(self, iterator: Iterator[Any], lane: Lane[Any], depth: int) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self._lane = lane
        self._conveyor: Conveyor[Any] = Conveyor(depth)
        self._error: BaseException | None = None  # with which the pass ended for the consumer
        self._traceback: TracebackType | None = None  # of that error, as it was when it arose
        self._pulled = threading.Event()
        self._pid = os.getpid()
        self._why_closed = ""
        # Two flags that are set once: acquiring a lock without blocking is atomic, and safe in a finalizer.
        self._consumer_has_left = threading.Lock()
        self._one_has_left = threading.Lock()
        # A daemon: the interpreter waits for other threads *before* it runs the functions registered for its end, among
        # them the one that closes this session, so a worker that is not a daemon and waits for room would hang the
        # program.
        self._thread = threading.Thread(target=self._work, name="millstream-feed", daemon=True)

    def begin(self) -> None:
        """Start the worker and wait until it has pulled the first batch (not until that is staged).

        The consumer needs the first batch anyway. Waiting here keeps a run reproducible: samplers draw their seed from
        the global generator in the first pull, which must not race with what the consumer draws meanwhile.
        """
        try:
            self._thread.start()
        except RuntimeError:
            self._leave()  # on behalf of the worker that the system refused
            raise
        self._pulled.wait()

    # --- the worker's side -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            with self._lane.in_thread():  # first of all: a new thread starts on device 0
                self._pull_all()
        except BaseException as caught:  # noqa: BLE001 - whatever it is, it belongs to the consumer
            error = caught
            self._traceback = _skip_own_frames(caught.__traceback__)
        finally:
            self._pulled.set()
            self._conveyor.finish(error)
            self._leave()
            del error, self  # the frames of the error's traceback lead back to this one, see ``next_batch``

    def _pull_all(self) -> None:
        iterator, lane, conveyor = self._iterator, self._lane, self._conveyor
        assert iterator is not None
        try:
            while not conveyor.stopped.is_set():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                finally:
                    self._pulled.set()
                load = lane.stage(batch, conveyor.stopped)
                del batch  # the host's copy of it: the next one is made before this variable would be overwritten
                if load is None or not conveyor.wait_for_room():
                    return
                lane.send(load)
                conveyor.put(load)
                del load
        finally:
            # Dropped here and not with the session: a DataLoader ends its worker processes when its iterator dies, and
            # ``close`` shall not return before.
            self._iterator = None
            del iterator, lane, conveyor, self

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def next_batch(self) -> Any:
        """Hand the next batch out.

        Raises:
            StopIteration: The source has ended, or the consumer has closed the feed.
            FeedError: The pass was ended by something else than its consumer, or began in another process.
            BaseException: What the source raised, with the source's traceback; again at every further call.
        """
        if self._pid != os.getpid():
            raise FeedError("This pass began in the process that forked this one; iterate over the feed anew.")
        waiting = self._conveyor.look()
        if waiting:
            batch = self._lane.deliver(waiting)
            # Not before: once it is removed, the worker may write its slot anew. Until the copy is enqueued (by
            # ``deliver`` at the latest), no event would tell the worker to wait for it.
            self._conveyor.remove()
            return batch
        if not self._conveyor.stopped.is_set():
            self._error = self._conveyor.error
            self.close("")
        try:
            if self._error is not None:
                raise self._error.with_traceback(self._traceback)
            if self._why_closed:
                raise FeedError(f"This pass over the feed has ended: {self._why_closed}.")
            raise StopIteration
        finally:
            # The error's traceback will hold this frame and those of its callers. Without ``self`` in it, the frame
            # does not hold the error in turn, and the callers' variables die with the error and not with some later
            # collection.
            del self

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, why: str = "its device context was closed") -> None:
        """End the pass: stop the worker, wait for it (a bounded time), give everything back. Repeated calls do nothing.

        Args:
            why: What a consumer that asks for more is told; if empty, it sees the end of the iteration.
        """
        if self._pid != os.getpid() or not self._consumer_has_left.acquire(blocking=False):
            return  # in a forked child there is no worker, and its locks may be held for ever
        self._why_closed = why
        try:
            self._conveyor.stop()
            self._join(JOIN_S)
        finally:
            self._leave()

    def wait_for_worker(self) -> None:
        """Block until the worker has left, however long its source takes. Call ``close`` before."""
        if self._pid == os.getpid():
            self._join(None)

    def _join(self, timeout_s: float | None) -> None:
        # A garbage collection in the worker may be what closes its session, and a thread cannot wait for itself; nor
        # can anyone wait for a thread that the system refused to start.
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _leave(self) -> None:
        if self._one_has_left.acquire(blocking=False):
            return  # the other side is still there, and will come by
        self._lane.close(self._conveyor.drain())


def _skip_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Drop the worker's own two frames from the front: they tell the user nothing, and they keep the session alive."""
    while traceback is not None and traceback.tb_frame.f_code in (Session._work.__code__, Session._pull_all.__code__):
        traceback = traceback.tb_next
    return traceback
