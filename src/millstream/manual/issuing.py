"""Does what an ``Ordering`` decides: records events, waits for them, and holds memory that other streams use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from millstream._torch.tensors import is_storage_gone, storage_behind
from millstream.device import DeviceContext, Event, Stream
from millstream.errors import StreamError
from millstream.manual.ordering import Ordering, Steps, TrackedStorage

LOOK_EVERY = 64
"""So many storages are held before the host asks whether the device is done with them."""

MOST_HELD, MOST_HELD_BYTES = 512, 1 << 30
"""When more is held, all streams of the session wait for each other, and then it can go: so loops are bounded."""


class Issuer:
    """Issues the steps of a session's ordering on its streams. Not for several threads at once.

    Args:
        context: Of the device.
        ordering: Decides.
        streams: By the numbers that the ordering has for them; the session adds more.

    Attributes:
        capturing: Whether the session was opened within a capture: the host can ask for no event then.
    """

    def __init__(self, context: DeviceContext, ordering: Ordering, streams: list[Stream]) -> None:
        self.capturing = False
        self._pool, self._driver = context.events, context.driver
        self._ordering, self._streams = ordering, streams
        self._events: dict[int, Event] = {}
        self._marks: list[tuple[Event, int, int]] = []  # events that the host asks for, each with its stream and tick
        self._look_at = LOOK_EVERY

    def do(self, steps: Steps) -> None:
        """Record events and wait for them."""
        events, streams = self._events, self._streams
        for is_record, number, index in steps:
            event = events.get(number)
            if event is None:
                event = events[number] = self._pool.acquire()
            if is_record:
                event.record(streams[index])
            else:
                event.wait(streams[index])

    def use(self, index: int, reads: Sequence[TrackedStorage], writes: Sequence[TrackedStorage] = ()) -> None:
        """Let a stream wait for what its next work needs, and hold what it uses away from home."""
        ordering = self._ordering
        marked = torch.is_grad_enabled()
        steps = ordering.use(index, reads, writes, not marked)
        if steps:
            self.do(steps)
        if ordering.crossings:
            self.protect(ordering.crossings, index, marked)

    def meet(self) -> None:
        """Let all streams wait for each other."""
        self.do(self._ordering.meet())

    def protect(self, memories: list[TrackedStorage], index: int, marked: bool) -> None:
        """See that nobody frees what is used away from home: hold it, or where autograd may save it, mark it.

        Autograd frees what it saved when the host is through with a node, in whatever thread, and calls nothing here.
        So PyTorch's allocator is told, which then lets the memory rest until this stream has caught up.

        Raises:
            StreamError: Memory that is held was freed.
        """
        for memory in memories:
            storage = storage_behind(memory.reference) if memory.kept is None else memory.kept
            if storage is None:
                continue
            num_bytes = storage.nbytes()
            if memory.num_bytes > num_bytes:
                raise StreamError(
                    f"A tensor of {memory.num_bytes} bytes was freed (its storage was resized to {num_bytes}) while "
                    f"other streams of this scope use it; free it after s.join()."
                )
            memory.num_bytes = num_bytes
            if not marked:
                memory.kept = storage
            elif not memory.lasting:
                self._driver.mark_use(storage, self._streams[index])
        if not marked and len(self._ordering.held) >= self._look_at and not self.capturing:
            self._look()

    def protect_survivors(self, memories: Iterable[TrackedStorage]) -> None:
        """Mark what was made on other streams and lives on: the caller's stream uses it, and autograd may free it."""
        for memory in memories:
            if memory.home and (storage := storage_behind(memory.reference)) is not None:
                self._driver.mark_use(storage, self._streams[0])

    def make_room(self) -> None:
        """When memory is short: wait for the device, and let go of all that is held.

        Called where an ``OutOfMemoryError`` is being handled, which is raised again where there is nothing to let go.
        """
        if self.capturing or not self._ordering.held:
            raise  # noqa: PLE0704 - called where an error is being handled
        for stream in self._streams:
            stream.synchronize()
        self._ordering.reach_all()
        self.let_go_of_all()

    def let_go_of_all(self) -> None:
        """Hold nothing any more: all streams are joined."""
        self._let_go(self._ordering.release_all())

    def release_events(self) -> None:
        """Give the events of the steps back."""
        for event in self._events.values():
            self._pool.release(event)

    def _look(self) -> None:
        """Let go of what streams are done with; where too much is left, let them meet."""
        ordering = self._ordering
        while self._marks and self._marks[0][0].query():
            event, stream, tick = self._marks.pop(0)
            self._pool.release(event)
            ordering.reach(stream, tick)
        self._let_go(ordering.release())
        left = [memory for memory in ordering.held if not memory.lasting]
        if len(left) > MOST_HELD or sum(memory.num_bytes for memory in left) > MOST_HELD_BYTES:
            self.meet()
            self.let_go_of_all()
        elif not self._marks:
            for stream, tick in ordering.unreached():
                event = self._pool.acquire()
                event.record(self._streams[stream])
                self._marks.append((event, stream, tick))
        self._look_at = len(ordering.held) + LOOK_EVERY

    def _let_go(self, memories: Iterable[TrackedStorage]) -> None:
        for memory in memories:
            memory.kept = None
            # Somebody else has it still.
            memory.lasting |= memory.home is None and not is_storage_gone(memory.reference)
