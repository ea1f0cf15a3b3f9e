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

import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from millstream._torch.modes.thread_modes import NEW_THREAD, read_modes
from millstream.data.passes.pass_life import Item, PassLife
from millstream.data.passes.pipeline import Do, Message
from millstream.data.passes.worker import Forks
from millstream.data.shaping import set_num_valid
from millstream.data.sources.source import Source
from millstream.data.transfer.transfer import NotNowError, PendingBatch
from millstream.errors import FeedError, never_the_end, skip_frames


class FeedRun(PassLife):
    """One pass; see the top of this file.

    Args: as for ``PassLife``.
    """

    # --- carrying out instructions -----------------------------------------------------------------------------------

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


_OWN = {
    each.__code__
    for each in (
        PassLife._work,
        FeedRun._carry_out,
        FeedRun._carry_out_one,
        FeedRun._pull,
        FeedRun._stage,
        FeedRun._send,
        Source.pull,
        Source._pull_watched,
    )
}
