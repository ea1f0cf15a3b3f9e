"""One pass over a source: its thread, its life and its end.

| moment | the consumer's thread | the worker's thread |
|---|---|---|
| begin | makes the source's iterator, waits for the first batch | makes the first batch |
| running | asks, hands out | pulls, stages, waits for a free slot, starts the copy |
| the source ends or fails | gets what came before, then the end or the error | leaves |
| ``close`` at any time | wakes the worker, waits for it, leaves | stops at the next step |

There is one worker and not a thread for each of its duties: starting a copy takes no time, and threads that compute in
Python take the interpreter's lock from each other, and from the consumer. Where even one takes it too often there is
none, and the consumer makes each batch himself when he asks for it (see ``pace``); the rest of this table stays true.

Who asks the source holds a lock, the worker for as long as he lives. So no two threads pull from one source, nothing is
taken away from who is still inside, and nobody waits for ever for a source that does not return: who comes out last
gives the lane back.

How far the worker may run ahead is kept by the *budget*, of which a batch takes a part from before it is staged until
it is handed out. What was sent lies in a queue of the standard library: the consumer goes his way between two steps,
when nothing of it is in the processor's caches, so it is short.

Who is alone makes each batch when it is asked for. But where the source may be asked early he pulls the one behind it
as well, and has helpers stage it while he computes.

Ctrl-C may come at any moment of the consumer's, who may ask again all the same. So a batch stays the next one until the
very end of handing it out, and all that is done before may be done again.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from millstream._torch.thread_modes import Guest
from millstream.errors import FeedError, never_the_end, skip_frames
from millstream.feed.budget import Budget
from millstream.feed.lane import Lane
from millstream.feed.ledger import Ledger, Times
from millstream.feed.pace import Pace

_generation = 0  # of processes: how many forks lie behind this one. To ask for its number takes a call of the system


def _count_fork() -> None:
    global _generation  # noqa: PLW0603
    _generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)

JOIN_S = 5.0
"""How long ``close`` waits for the worker. It nearly always leaves at once; only a source that is in the middle of
making a batch keeps it, and then it leaves by itself when the source returns."""

ASK_S, POLL_S = 0.1, 1e-4
"""How long ``close`` waits for a consumer in another thread that is just asking for a batch, and how often it looks. He
gives everything back himself when he has got it; but it may be that he waits for who closes."""

Prepare = Callable[[Any], tuple[Any, Any] | None]
"""Given a batch as the source made it: the batch to deliver and a note to travel with it; ``None`` to leave it out."""


@dataclass(slots=True, eq=False)
class Item:
    """A batch on its way from the worker to the consumer.

    Attributes:
        load: What the lane knows about it; ``None`` when it was handed out.
        times: What the ledger knows about it.
        note: What travels with it.
        is_staged: Whether staging has at least begun.
        batch: What the user gets, when all else is ready.
    """

    load: Any
    times: Times
    note: Any
    is_staged: bool = False
    batch: Any = None


class Session:
    """The worker of one pass, if it has one, and what it shares with the consumer.

    Args:
        iterator: Yields the batches. It was made in the consumer's thread: a DataLoader that is set up elsewhere cannot
            report the death of its worker processes.
        lane: The way to the device.
        depth: How many batches may be under way.
        max_bytes: How many bytes they may have in all; ``None`` for any number.
        prepare: Called in the worker with each batch, right after it was pulled.
        ledger: Where times are noted.
        pace: Says whether there is a worker, and is told how long things take.
        may_look_ahead: Whether the source gives a batch whatever becomes of the one before. One that waits for what the
            loop does with that must not be asked by the loop's own thread before.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        lane: Lane[Any],
        depth: int,
        *,
        max_bytes: int | None = None,
        prepare: Prepare = lambda batch: (batch, None),
        ledger: Ledger | None = None,
        pace: Pace | None = None,
        may_look_ahead: bool = False,
    ) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self._lane = lane
        self._prepare = prepare
        self._ledger = ledger or Ledger(None)
        self._pace = pace or Pace(alone=False)
        self._count = 0  # of the batches pulled
        self._looks_ahead = may_look_ahead and depth > 1
        self._max_bytes = max_bytes
        self._budget = Budget(depth, max_bytes)
        self._sent: queue.SimpleQueue[Item | None] = queue.SimpleQueue()  # ``None``: no more will come
        self._next: list[Item | None] = []  # one or none: there, and not handed out when he asked last; the consumer's
        self._ahead: list[Item] = []  # one or none: pulled, and not sent before he asks again; of who is alone
        self._error: BaseException | None = None  # with which the source, or the way to the device, ended
        self._traceback: TracebackType | None = None  # of that error, as it was when it arose
        self._failure: BaseException | None = None  # the same, once the consumer has got all that came before
        self.finished = False  # whether the consumer has got everything, and there was no error
        self._stopped = threading.Event()
        self._begun = threading.Event()
        self._generation = _generation
        self._why_closed = ""
        self._consumer_has_left = threading.Lock()  # acquiring it without blocking is atomic, and safe in a finalizer
        self._inside = threading.Lock()  # held by who asks the source
        self._insider = 0  # who held it last
        self._asker = 0  # the thread that asks for a batch, as long as it does
        self._is_over = False  # whether the lane was given back
        self._guest = Guest(lane.device)
        self._spare_captures = lane.spare_captures()
        self._times_all = self._ledger.context is None  # see ``Times.timed``
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the worker and wait until the first batch is on its way.

        The consumer needs the first batch anyway, and would only take the interpreter's lock from who makes it. Waiting
        also keeps a run reproducible: samplers draw their seed from the global generator in the first pull, which must
        not race with what the consumer draws meanwhile.
        """
        if self._pace.alone:
            return
        # A daemon: the interpreter waits for other threads *before* it runs the functions registered for its end, among
        # them the one that closes this session, so a thread that is not a daemon and waits would hang the program.
        self._thread = threading.Thread(target=self._work, name="millstream-feed", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system refuses the thread
            self.close("")
            raise
        self._begun.wait()

    # --- making batches: the worker's, or else the consumer's --------------------------------------------------------

    def _work(self) -> None:
        with self._inside:
            self._insider = threading.get_ident()
            try:
                if not self.closed:
                    with self._lane.in_thread():  # first of all: a new thread starts on device 0
                        while (item := self._make(self._begin_times())) is not None:
                            self._sent.put(item)
                            del item  # which this variable would keep while the next one is made
                            if not self._begun.is_set():  # asking takes no lock
                                self._begun.set()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the consumer
                self._fail(error)
            finally:
                self._drop_source()
                self._begun.set()
                self._sent.put(None)
                if self.closed:
                    self._give_back()
        if self.closed:
            self._give_back_now()
        del self  # the frames of an error's traceback lead back to this one, see ``next_batch``

    def _make_alone(self, times: Times) -> None:
        """Make a batch in the consumer's thread, as if it were the worker's."""
        with self._inside:
            self._insider = threading.get_ident()
            try:
                if self._consumer_has_left.locked() or self._error is not None:
                    return
                with self._spare_captures:
                    self._guest.run(self._make_and_look_ahead, times)
            except BaseException as error:
                self._fail(error)
                if self._next and not isinstance(error, Exception):
                    raise  # an interrupt shall not wait for its place behind a batch that is there
            finally:
                if self._consumer_has_left.locked():
                    self._give_back()
                del self

    def _make_and_look_ahead(self, times: Times) -> None:
        try:
            item = self._ahead[0] if self._ahead else self._pull(times)
            if item is None:
                return
            if self._max_bytes is not None:
                self._budget.check_size(item.load.num_bytes)
            if not ((item.is_staged or self._stage(item)) and self._send(item)):
                return
            self._ahead.clear()
            self._next += (item,)
            if self._looks_ahead and (ahead := self._pull(self._begin_times())) is not None:
                self._ahead += (ahead,)
                if self._max_bytes is None or item.load.num_bytes + ahead.load.num_bytes <= self._max_bytes:
                    self._stage(ahead)
        finally:
            del self

    def _begin_times(self) -> Times:
        number = self._count
        is_due = self._ledger.is_due(number)
        return Times(number, is_due, timed=is_due or self._times_all)

    def _make(self, times: Times) -> Item | None:
        """Pull the next batch, stage it and start its copy; ``None`` when there is none, or when stopped."""
        try:
            item = self._pull(times)
            if item is not None:
                # Taking waits until one more may be under way.
                is_taken = self._budget.take(times.index, item.load.num_bytes)
                if is_taken and self._stage(item) and self._send(item):
                    return item
            return None
        finally:
            del self

    def _pull(self, times: Times) -> Item | None:
        """Take the next batch from the source and look at it; ``None`` when there is none, or when stopped."""
        iterator, lane, pace = self._iterator, self._lane, self._pace
        is_timed = times.timed or not pace.alone
        began = 0
        try:
            while iterator is not None and not self._consumer_has_left.locked():
                if is_timed:
                    pace.begin_work()
                    began = time.perf_counter_ns()
                try:
                    batch = next(iterator)
                except StopIteration:
                    lane.end_sending(self._stopped)
                    self._drop_source()  # who is alone may ask again
                    return None
                prepared = self._prepare(batch)
                del batch  # the host's copy of it, which this variable would keep while the next one is made
                if prepared is None:
                    continue
                load = lane.describe(prepared[0])
                if is_timed:
                    times.pull_ns, times.num_bytes = (began, time.perf_counter_ns()), load.num_bytes
                self._count += 1
                return Item(load, times, prepared[1])
            return None
        finally:
            del iterator, self

    def _stage(self, item: Item) -> bool:
        """Begin to copy the batch to where it is sent from; false when stopped."""
        times = item.times
        began = time.perf_counter_ns() if times.timed else 0
        try:
            item.is_staged = self._lane.stage(item.load, self._stopped)
        finally:
            if not item.is_staged:
                self._lane.finish(item.load)
            del self
        if times.timed:
            times.stage_ns = began, time.perf_counter_ns()
        return item.is_staged

    def _send(self, item: Item) -> bool:
        """Start the copy of a batch as soon as it is staged; false when stopped."""
        load, times, lane, pace = item.load, item.times, self._lane, self._pace
        went_on = time.perf_counter_ns() if times.timed else 0
        is_sent = False
        try:
            if self._ledger.unread:
                self._ledger.read()  # while others stage
            is_sent = lane.send(load, self._stopped, measured=times.measured)
        finally:
            if not is_sent:
                lane.finish(load)
            del self
        if is_sent and times.timed:
            began, paused = times.stage_ns
            times.stage_ns = began, paused + max(load.staged_ns - went_on, 0)
            times.copy = load.copy
        if is_sent and not pace.alone:  # else it is a part of what the consumer waits for
            pace.end_work(times.pull_ns[1] - times.pull_ns[0])
        return is_sent

    def _drop_source(self) -> None:
        """A DataLoader ends its worker processes when its iterator dies, and ``close`` shall not return before."""
        self._iterator = None

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._traceback = skip_frames(error.__traceback__, _OWN)
            self._error = never_the_end(error)

    def _stop_worker(self) -> None:
        self._budget.cancel()
        self._begun.set()
        self._sent.put(None)
        self._lane.stop(self._stopped)
        self._stopped.set()  # last: who closes looks at it

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def next_batch(self) -> Item:
        """Prepare the next batch to be handed out.

        It remains the next one until the caller takes away its load. He does so when nothing can come between the batch
        and its user any more, and without a call, which an interrupt could come behind.

        Raises:
            StopIteration: The source has ended, or the consumer has closed the feed.
            FeedError: The pass was ended by something else than its consumer, or began in another process.
            BaseException: What the source raised, with the source's traceback; again at every further call.
        """
        if self._generation != _generation:
            raise FeedError("This pass began in the process that forked this one; iterate over the feed anew.")
        self._asker = threading.get_ident()
        try:
            # Here and below, what is asked for every batch is asked without a call where that is possible.
            if not self._consumer_has_left.locked():
                lane, ledger, pace = self._lane, self._ledger, self._pace
                pace.ask()
                lane.reclaim()
                if self._next and self._next[0] is not None and self._next[0].load is None:
                    self._next.clear()
                if not self._next and pace.alone:
                    times = self._ahead[0].times if self._ahead else self._begin_times()
                    ledger.ask(lane.mark, times, pace.asked_ns)
                    self._make_alone(times)
                elif not self._next:
                    self._ask_worker()
                item = self._next[0] if self._next else None
                if item is not None and not self._consumer_has_left.locked():  # by now
                    item.batch = self._deliver(item.load)
                    ledger.get(item.times, lane.mark)
                    pace.deliver()
                    if not pace.alone:
                        self._budget.deliver(item.times.index)
                    return item
                if not self.closed:  # or it was closed while this waited
                    self._failure, self.finished = self._error, self._error is None
                    self._asker = 0  # what follows takes the lane from him
                    self.close("")
            if self._failure is not None:
                raise self._failure.with_traceback(self._traceback)
            if self._why_closed:
                raise FeedError(f"This pass over the feed has ended: {self._why_closed}.")
            raise StopIteration
        finally:
            self._asker = 0
            if self._consumer_has_left.locked():
                self._give_back_now()
            # An error's traceback will hold this frame and those of its callers. Without ``self`` in it, the frame does
            # not hold the error in turn, and the callers' variables die with the error and not with some later
            # collection.
            del self

    def _deliver(self, load: Any) -> Any:
        try:
            return self._lane.deliver(load)
        except StopIteration as error:
            raise never_the_end(error) from error

    def _ask_worker(self) -> None:
        self._receive(wait=False)
        times = self._next[0].times if self._next and self._next[0] is not None else None
        self._ledger.ask(self._lane.mark, times, self._pace.asked_ns)
        if not self._next:
            self._receive(wait=True)

    def _receive(self, *, wait: bool) -> None:
        try:  # noqa: SIM105 - for every batch: what suppresses costs more than what it is about
            # In one call: an interrupt behind it finds the batch among his own, and one before it in the queue.
            self._next.extend(map(self._sent.get, (wait,)))
        except queue.Empty:
            pass

    @property
    def closed(self) -> bool:
        """Whether the consumer has left."""
        return self._consumer_has_left.locked()

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, why: str = "its device context was closed") -> None:
        """End the pass: stop the worker, wait for it (a bounded time), give everything back. Once is enough.

        Args:
            why: What a consumer that asks for more is told; if empty, it sees the end of the iteration.
        """
        if self._generation != _generation:
            return  # in a forked child there are no threads, and locks may be held for ever
        if self._consumer_has_left.acquire(blocking=False):
            self._why_closed = why
        elif self._stopped.is_set():
            return
        try:  # again, too: an interrupt may have ended the first attempt
            self._stop_worker()
        finally:
            self._leave(JOIN_S)

    def wait_for_worker(self) -> None:
        """Block until nobody is inside the source, however long it takes. Call ``close`` before."""
        if self._generation == _generation:
            self._leave(None)

    def _leave(self, timeout_s: float | None) -> None:
        """Wait until nobody is inside the source, and give everything back. Who is still inside will do so himself."""
        me = threading.get_ident()
        if self._inside.locked() and self._insider == me:
            return  # called by the source, or by a garbage collection meanwhile
        if not self._try_to_give_back(timeout_s):
            return
        end_s = time.monotonic() + ASK_S
        while not self._is_over and self._asker not in (0, me) and time.monotonic() < end_s:
            time.sleep(POLL_S)
        self._give_back_now()
        if self._thread is not None and self._thread.ident is not None:
            with suppress(RuntimeError):  # another thread is still about to start it
                self._thread.join(timeout_s)  # he has nothing left to do

    def _give_back_now(self) -> None:
        """Give everything back, unless somebody is inside the source or asks for a batch: he will do so then.

        Whoever finds somebody there asks once more when he leaves himself, so that not each leaves it to the other.
        """
        while not self._is_over and not self._asker and self._try_to_give_back(0):
            pass

    def _try_to_give_back(self, timeout_s: float | None) -> bool:
        """Give everything back, unless somebody asks for a batch; false if somebody was inside the source so long."""
        mine: list[bool] = []
        try:
            # In one call: an interrupt behind it does not leave the lock taken for ever.
            mine.extend(map(self._inside.acquire, (True,), (-1 if timeout_s is None else timeout_s,)))
            if mine[0]:
                self._give_back()
            return mine[0]
        finally:
            if True in mine:
                self._inside.release()

    def _give_back(self) -> None:
        """Give everything back, once. The caller holds ``_inside``, and the consumer has left.

        One that is just asking for a batch, and was closed by another thread, still works with the lane.
        """
        if self._is_over or self._asker:
            return
        self._is_over = True
        is_kept = False
        try:
            self._ledger.close()
            is_kept = self.finished and self._lane.keep()
        finally:
            if not is_kept:
                self._lane.close()
        with suppress(queue.Empty):
            while True:
                self._sent.get_nowait()
        self._sent.put(None)  # who waits for a batch may not have looked yet
        self._next.clear()
        self._ahead.clear()
        self._guest.run(self._drop_source)  # whose last part runs as the others did, if there was no worker


_OWN = {
    each.__code__
    for each in (
        Session._work, Session._make, Session._make_alone, Guest.run, Session._make_and_look_ahead, Session._pull,
        Session._stage, Session._send,
    )
}  # fmt: skip
