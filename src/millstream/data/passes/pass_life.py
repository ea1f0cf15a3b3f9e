"""One pass over a source: how it begins, and how it ends, whoever leaves it."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from millstream._torch.modes.thread_modes import NEW_THREAD, ThreadModes, read_modes
from millstream.data.passes.pipeline import Message, Pipeline
from millstream.data.passes.worker import JOIN_S, Flag, Forks, Worker, absorb_exit, raise_exit
from millstream.data.profiler import BatchTimes, Profiler
from millstream.data.sources.position import BatchInfo
from millstream.data.sources.source import Source
from millstream.data.transfer.transfer import PendingBatch, Transfer
from millstream.errors import skip_frames

LEAVE_S, REACH_S = 0.05, 0.5
"""Seconds that a leaving consumer waits for the feed's thread: each time where that is inside the source; and
until it is seen to wait there, for it may never return. Then the thread ends the pass by itself when the source
does."""


@dataclass(slots=True, eq=False)
class Item:
    """A batch on its way.

    Attributes:
        pending: What the transfer knows about it; ``None`` when it was handed out.
        info: What travels with it.
        times: What the profiler wants to know of it, if its step is measured.
        batch: What the user gets, when all else is ready.
    """

    pending: PendingBatch | None
    info: BatchInfo
    times: BatchTimes | None
    batch: Any = None


class PassLife:
    """How one pass begins, goes from one thread to the other, and ends; ``FeedRun`` says what is done between.

    Args:
        source: What is asked.
        transfer: The way to the device.
        pipeline: Says what to do next.
        worker: The thread that does it; ``None`` for the consumer's.
        profiler: Measures from outside how long it takes.
    """

    def __init__(
        self,
        source: Source,
        transfer: Transfer,
        pipeline: Pipeline,
        *,
        worker: Worker | None,
        profiler: Profiler,
    ) -> None:
        self._source, self._transfer, self._pipeline = source, transfer, pipeline
        self._worker, self._profiler = worker, profiler
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._notes: deque[Message] = deque()  # messages for a thread that wakes up anyway
        self._open_queue()
        self._begun: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._modes = NEW_THREAD  # the loop's, when it asked last
        self._thread_modes = ThreadModes()
        self._context = contextvars.copy_context()
        self._pulled: Item | None = None
        self._staged: Item | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None  # of that error, as it was when it arose
        self._stopped = Flag()
        self._over = Flag()  # nobody will ask the source any more
        self._to_end = [True]  # of the consumer and the worker, whoever comes last ends the pass, and the other waits
        self._end_lock = threading.RLock()
        self._inside_lock = threading.Lock()
        self._inside = 0  # the thread that is inside the source
        self._was_told_to_leave = False
        self._is_submitted = False  # to the worker
        self._waits = True  # a consumer that leaves, until it was tried
        self._has_asked = False  # for a batch that has not come
        self._is_torn = False  # without a worker: the consumer makes a batch, or an interrupt came while it did
        self.num_forks = Forks.count
        self.has_ended = False  # the consumer has got everything, and there was no error
        self.is_left = False  # nothing more will be handed out
        self.is_asked = False  # somebody is in ``next_item``, or about to take what it gave

    @property
    def is_over(self) -> bool:
        """Whether nobody is inside the source."""
        return self._over.is_set()

    @property
    def is_inherited(self) -> bool:
        """Whether it began in a process that has forked this one."""
        return self.num_forks != Forks.count

    @property
    def goes_on(self) -> bool:
        """Whether a pass that is left continues in the next: what an iterator has given comes only once."""
        return self._source.is_own_iterator and not (self.is_left or self._stopped.is_set() or self.is_inherited)

    def begin(self, *, in_caller: bool) -> None:
        """Make the source's iterator, and start.

        Args:
            in_caller: Whether in this thread, although another one will ask it.

        Raises:
            BaseException: What ``iter`` raised.
        """
        error = None
        try:
            self._modes = read_modes()
            self._pipeline.stays_in_step = self._source.wants_step
            self.join_stream()
            if in_caller or self._worker is None:
                self._source.begin()
            if self._worker is not None:
                self._worker.submit(partial(self._work, begins=not in_caller))
                self._is_submitted = True
                if not in_caller and (error := self._begun.get()) is not None:
                    raise error
        except BaseException:
            self.leave()
            raise
        finally:
            del self, error  # an error's traceback must not lead back to the error

    def join_stream(self) -> None:
        """The consumer's present stream is the pass's."""
        self.is_asked = False  # where an interrupt came at the very end
        if self._is_torn:
            self._start_over()
        self._transfer.begin_pass(self._stopped, partial(self._inbox.put, Message.FREED))

    def _open_queue(self) -> None:
        self._ready: queue.SimpleQueue[Item | None] = queue.SimpleQueue()  # ``None``: no more will come
        # The one that the consumer took last; it is the next until it is handed out. Compiled code moves it there: an
        # interrupt between taking and keeping it would lose it, and the worker waits until the consumer asks again.
        self._taken: deque[Item | None] = deque(maxlen=1)
        self._take = map(self._taken.append, iter(self._ready.get, object()))

    def _start_over(self) -> None:
        """Forget what was under way when an interrupt came, but the source."""
        self._finish_staging()
        self._pulled = self._staged = self._error = self._traceback = None
        self._has_asked = False
        self._inbox = queue.SimpleQueue()
        self._notes.clear()
        self._open_queue()
        self._pipeline = self._pipeline.anew()
        self._transfer.end_pass()
        self._is_torn = False  # not before: another interrupt may come

    def _work(self, *, begins: bool) -> None:
        try:
            with self._transfer.in_thread():  # first of all: a new thread starts on device 0
                self._thread_modes.put(self._modes, anew=True)
                if begins and not self._begin_source():
                    return
                self._context.run(self._carry_out)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the consumer
            self._fail(error)
        finally:
            with suppress(GeneratorExit):  # it may be raised before it is looked for
                self._go_out()
            if self._was_told_to_leave:
                absorb_exit()
            self._go_out()
            self._context.run(self._leave_source)
            self._thread_modes.put(NEW_THREAD)
            self._ready.put(None)
            self._end()
            del self  # the frames of an error's traceback lead back to this one

    def _go_out(self) -> None:
        """From here on nobody tells this thread to leave the source."""
        with self._inside_lock:
            self._inside = 0

    def _begin_source(self) -> bool:
        self._inside = threading.get_ident()
        error = None
        try:
            if not self._stopped.is_set():
                self._context.run(self._source.begin)
        except BaseException as caught:  # noqa: BLE001 - it is raised where the pass begins
            error = caught.with_traceback(skip_frames(caught.__traceback__, _OWN))
        with self._inside_lock:
            self._inside = 0
        self._begun.put(error)
        return error is None

    def leave(self, *, forever: bool = True) -> None:
        """The consumer has left: end the pass, and wait for the feed's thread if that takes no time. Once is enough.

        Args:
            forever: Whether what an iterator has given is not wanted any more either.
        """
        if not forever and self.goes_on:
            return
        self.is_left = True
        if self.is_inherited:
            return  # in a forked child there are no threads, and locks may be held for ever
        if not (self._stopped.is_set() and self._over.is_set()):  # all of it once more, where an interrupt came between
            self._inbox.put(Message.CLOSED)
            self._ready.put(None)  # another thread may be waiting for a batch
            self._stopped.set()
            if self._worker is None or not self._is_submitted:
                if not self._inside:  # else this is called in the source, and whoever asks that continues
                    self._leave_source()
            elif self._waits and not self._worker.is_current():  # as where the source does this, or a collection
                self._wait()
                self._waits = False
        self._end()

    def _wait(self) -> None:
        start_s = time.monotonic()
        while not self._over.wait(LEAVE_S if self._inside else 0.01) and time.monotonic() < start_s + JOIN_S:
            with self._inside_lock:
                if self._was_told_to_leave or (self._inside and raise_exit(self._inside)):
                    self._was_told_to_leave = True
                    return
                if self._inside and time.monotonic() > start_s + REACH_S:
                    return

    def wait(self) -> None:
        """Block until nobody is inside the source, however long it takes. Leave before."""
        self._over.wait()

    def _leave_source(self) -> None:
        """Forget the iterator: a DataLoader ends its worker processes when that dies. Whoever asks the source."""
        self._finish_staging()
        self._pulled = self._staged = None
        self._source.close()
        self._over.set()

    def _finish_staging(self) -> None:
        for item in (self._pulled, self._staged):
            if item is not None and item.pending is not None:
                self._transfer.finish(item.pending)

    def _end(self) -> None:
        """Drop what was not handed out, once the consumer has left and nobody is inside the source; once."""
        if not (self._stopped.is_set() and self._over.is_set()):
            return
        if not self._end_lock.acquire(timeout=JOIN_S):
            return
        try:
            if self._to_end:
                self._to_end.clear()
                self._drop_rest()
        finally:
            self._end_lock.release()

    def _drop_rest(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._ready.put(None)  # the same
        self._taken.append(None)  # in place of a batch
        self._error = self._traceback = None  # which nobody has asked for leads to the source, and to its workers
        self._profiler.close()
        self._transfer.end_pass()

    def _carry_out(self) -> None:
        """Do what the pipeline says; without a worker, until there is something to hand out."""
        raise NotImplementedError

    def _fail(self, error: BaseException) -> None:
        """Keep an error for the consumer."""
        raise NotImplementedError


_OWN = {PassLife._begin_source.__code__, Source.begin.__code__}
