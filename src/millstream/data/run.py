"""One pass over a source, and the thread that carries it out.

| moment | the consumer's thread | the feed's thread |
|---|---|---|
| begin | waits | makes the source's iterator |
| running | asks, hands out | pulls, stages, starts copies, as the pipeline says |
| the source ends or fails | gets what came before, then the end or the error | leaves the source |
| the loop is left | says so, and waits if that takes no time | leaves the source when that returns |

The pipeline is the feed's thread's alone; the consumer sends it messages, and gets batches through a queue. A feed has
one thread for its life: what a source opens in one pass it may use in the next. Starting a copy takes no time, and more
threads would only take the interpreter's lock from each other. Without a worker (``prefetch=False``) the consumer
carries out the same instructions itself.

After Ctrl-C in ``next`` the pass is over, and the position is that of the batch handed out last. A loader that is an
iterator itself continues in the next pass with what was pulled from it; without a worker nobody can tell how far that
had come, so it is dropped, and the iterator is asked again.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import torch

from millstream._torch.modes.thread_modes import NEW_THREAD, ThreadModes, read_modes
from millstream.data.pipeline import Do, Message, Pipeline
from millstream.data.position import BatchInfo
from millstream.data.profiler import BatchTimes, Profiler
from millstream.data.shaping import set_num_valid
from millstream.data.source import Source
from millstream.data.transfer.transfer import NotNowError, PendingBatch, Transfer
from millstream.data.worker import JOIN_S, Flag, Forks, Worker, absorb_exit, raise_exit
from millstream.errors import FeedError, never_the_end, skip_frames

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


class FeedRun:
    """One pass; see the top of this file.

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

    # --- carrying out instructions -----------------------------------------------------------------------------------

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

    def _carry_out(self) -> None:
        """Do what the pipeline says; without a worker, until there is something to hand out."""
        pipeline, inbox, notes, is_inline = self._pipeline, self._inbox, self._notes, self._worker is None
        messages: list[Message] = []
        while True:
            while not inbox.empty():
                messages.append(inbox.get())
            while notes:
                messages.append(notes.popleft())
            todo = pipeline.next(messages)
            messages = []
            for i, do in enumerate(todo):
                if do is Do.WAIT:
                    if is_inline and pipeline.sent >= pipeline.asked:
                        return
                    if not notes:  # looked at last: what is noted after this sees that the thread is to be woken
                        messages.append(inbox.get())
                    break
                if do is Do.END:
                    if is_inline:
                        self._ready.put(None)
                    return
                if not self._carry_out_one(todo[i:]):
                    break

    # Each of these says whether its first was done, so that what follows may be; else all of it was taken back.

    def _carry_out_one(self, left: Sequence[Do]) -> bool:
        try:
            if left[0] is Do.PULL:
                return self._pull(left)
            return self._stage(left) if left[0] is Do.STAGE else self._send(left)
        except BaseException as error:
            if not isinstance(error, Exception) and self._worker is None:
                raise  # it is the consumer's at once, not its next pass's
            self._fail(error)
            self._pipeline.take_back(left)
            self._pipeline.end(left[0])
            return False

    def _pull(self, left: Sequence[Do]) -> bool:
        source, pipeline, profiler = self._source, self._pipeline, self._profiler
        if self._staged is not None and self._staged.pending is not None and self._staged.pending.chunks:
            pipeline.take_back(left, keeps_source=True)
            return False
        if self._worker is not None and self._modes is not self._thread_modes.present:
            self._thread_modes.put(self._modes)
        number = source.num_pulled
        times = profiler.watch(number) if number >= profiler.next_due else None
        waited = self._worker is None or pipeline.asked > pipeline.sent
        try:
            self._inside = threading.get_ident()
            if not self._inbox.empty():
                self._send_what_waits()
            try:
                found = source.pull(waited=waited)
            except StopIteration:
                found = None
        finally:
            with self._inside_lock:
                self._inside = 0
        if found is None:
            pipeline.take_back(left)
            pipeline.end()
            return False
        batch, info = found
        pipeline.stays_in_step = source.wants_step
        pending = self._transfer.prepare(batch)
        if pipeline.max_bytes is not None:
            pipeline.pulled_bytes(pending.num_bytes)
        if times is not None:
            times.pulled_ns, times.num_bytes = time.perf_counter_ns(), pending.num_bytes
        self._pulled = Item(pending, info, times)
        return True

    def _stage(self, left: Sequence[Do]) -> bool:
        item, self._pulled = self._pulled, None
        assert item is not None
        assert item.pending is not None
        self._staged = item
        if item.times is not None:
            item.times.stage_ns = time.perf_counter_ns()
        # Before the next pull, for the source may fill the same memory again.
        if self._transfer.stage(item.pending, finish=left[1] is Do.PULL):
            return True
        self._pipeline.take_back(left)
        return False

    def _send(self, left: Sequence[Do]) -> bool:
        item = self._staged
        assert item is not None
        assert item.pending is not None
        is_sent = self._transfer.send(item.pending, measured=item.times is not None)
        if not is_sent:
            self._pipeline.take_back(left, no_room=is_sent is None)
            return False
        if (times := item.times) is not None:
            times.staged_ns, times.copy = item.pending.staged_ns or time.perf_counter_ns(), item.pending.copy
            if self._profiler.unread:
                self._profiler.read()  # what the device has finished since
        self._staged = None
        self._ready.put(item)
        return True

    def _send_what_waits(self) -> None:
        """Send what waited for memory, in whichever thread sees that it came back: the source may never return."""
        with self._inside_lock:
            if self._inside and self._pipeline.send_meanwhile():
                self._send((Do.SEND,))

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._traceback = skip_frames(error.__traceback__, _OWN)
            self._error = never_the_end(error)

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def next_item(self) -> Item:
        """Prepare the next batch to be handed out; it stays the next until the caller takes away its ``pending``.

        Raises:
            StopIteration: The pass is over.
            FeedError: It began in another process, or somebody asks already.
            BaseException: What the source raised, with the source's traceback, once.
        """
        transfer, profiler, taken, item = self._transfer, self._profiler, self._taken, None
        if self.is_asked or self.num_forks != Forks.count:
            self._refuse()
        try:
            self.is_asked = True  # between the look and this no other thread has its turn
            asked_ns = time.perf_counter_ns()
            self._is_torn = self._worker is None
            self._modes = NEW_THREAD if self._worker is None else read_modes()
            if not taken or ((item := taken[0]) is not None and item.pending is None):
                self._take_next(asked_ns)
            if (item := taken[0]) is None:
                self._raise_end()
            assert item.pending is not None
            item.batch = self._deliver(item.pending)
            if item.info.num_valid is not None:
                set_num_valid(item.batch, item.info.num_valid)
            profiler.num_batches += 1
            if item.times is not None:
                profiler.get(item.times, transfer.mark)
            if self._has_asked:
                self._has_asked = False
            else:  # not before: the feed's thread would take the interpreter's lock away meanwhile
                self._notes.append(Message.ASKED)
                # To wake it costs as much as all else. Where it waits for memory, it wakes up when the loop drops the
                # batch before, as a rule at once.
                if not self._pipeline.waits_for_memory:
                    self._inbox.put(Message.LOOK)
            self._is_torn = False
            return item
        except BaseException as error:
            self.is_asked = False
            # Memory that is short may be there when this batch, which is still the next, is asked for again.
            is_kept = item is not None and isinstance(error, torch.OutOfMemoryError)
            if is_kept or isinstance(error, NotNowError):
                self._is_torn = False
            else:
                self.leave(forever=isinstance(error, Exception))
            raise
        finally:
            del self, item, taken  # an error's traceback must not lead back to the error

    def _refuse(self) -> NoReturn:
        if self.num_forks != Forks.count:
            raise FeedError("This pass began in the process that forked this one; iterate over the feed again.")
        raise FeedError(
            "This pass is just being asked for a batch, by another thread or by the source itself. Let one thread ask, "
            "and put what it gets into a queue.Queue for others."
        )

    def _deliver(self, pending: PendingBatch) -> Any:
        try:
            return self._transfer.deliver(pending)
        except StopIteration as error:  # of what a user has registered
            raise never_the_end(error) from error

    def _take_next(self, asked_ns: int) -> None:
        item = None
        try:
            if self._ready.empty():
                self._wait_for_item(asked_ns)
                return
            next(self._take)
            item, profiler = self._taken[0], self._profiler
            if item is not None and not self._has_asked and (item.times is not None or profiler.is_open):
                profiler.ask(self._transfer.mark, asked_ns, due=item.times is not None)
        finally:
            del self, item

    def _wait_for_item(self, asked_ns: int) -> None:
        transfer, item, is_inline = self._transfer, None, self._worker is None
        try:
            transfer.ask()
            if not self._has_asked:
                self._inbox.put(Message.ASKED)
                self._has_asked = True  # not before: after an interrupt the worker had better be asked twice than never
            due = True  # whether the coming step may be measured: of a batch that is not there yet, nobody knows
            if is_inline:
                item = self._staged or self._pulled
                is_next_due = self._source.num_pulled >= self._profiler.next_due
                due = item.times is not None if item is not None else is_next_due
            if due or self._profiler.is_open:
                self._profiler.ask(transfer.mark, asked_ns, due=due)
            if is_inline or self._inside:
                with transfer.spare_captures:
                    self._carry_out() if is_inline else self._send_what_waits()
            next(self._take)
        finally:
            del self, item

    def _raise_end(self) -> NoReturn:
        error, traceback, self._error, self._traceback = self._error, self._traceback, None, None
        try:
            self.has_ended = error is None and not self._stopped.is_set()
            if error is None:
                raise StopIteration
            raise error.with_traceback(traceback)
        finally:
            del self, error, traceback  # an error's traceback must not lead back to the error

    # --- the end -----------------------------------------------------------------------------------------------------

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


_OWN = {
    each.__code__
    for each in (
        FeedRun._work, FeedRun._begin_source, FeedRun._carry_out, FeedRun._carry_out_one, FeedRun._pull, FeedRun._stage,
        FeedRun._send,
        Source.begin, Source.pull, Source._pull_watched,
    )
}  # fmt: skip
