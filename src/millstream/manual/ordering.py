"""Decide which waits make hand-written streams safe, and which memory must outlive its name. No torch, no device.

A storage that is used on two streams needs order: a reader waits for the last writer (RAW), a writer for the readers
since then (WAR) and for the last writer (WAW). ``Ordering`` is asked about every use before it is issued and answers
with the events to record and the waits to enqueue.

**Contract**
- After the steps that ``use`` returns, every earlier conflicting use happens before this one.
- A wait is asked for only where nothing has ordered the two yet. Vector clocks say so: Fidge, "Timestamps in
  message-passing systems that preserve the partial ordering" (1988).
- After ``join``, whatever was issued on the children happens before whatever the parent is given next.
- Memory goes back to the stream that it was allocated on, its *home*, as soon as nothing refers to it, whatever other
  streams still do with it. So a storage that is used elsewhere is *held* until its home comes after that use, or until
  the host has seen an event after that use.

Events are recorded at the end of a stream when somebody needs one, so a wait may cover later work of that stream than
it has to: never less. Each stream has one event for that, and one for forks: a wait holds what was recorded when it was
enqueued, so that both can be recorded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Step = tuple[bool, int, int]
"""Whether an event is to be recorded, or else waited for; which event; on which stream."""

Steps = list[Step]
_NOTHING: Steps = []
_NO_STREAMS: frozenset[int] = frozenset()
_BEFORE_ALL = -1  # a tick: not even what the parent had issued before the fork is known to be over


class TrackedStorage:
    """One storage, as the ordering knows it.

    Attributes:
        home: Stream whose pool the memory goes back to; ``None`` where it is older than the ordering.
        reference: Leads to the storage while it lives; the caller's.
        writer: Stream of the last write.
        written: Its tick, 0 for none.
        readers: For each stream the tick of its last read since then.
        crossed: Streams other than ``home`` that use it and that it is held for.
        kept: The storage itself while it is held; the caller's.
        lasting: Whether somebody else keeps it for long, as a parameter: it counts for nothing in bounds.
        num_bytes: Its size when it was first held.
    """

    # Most storages never need the rest of these: they are made in every operator, and an attribute takes its time.
    writer = 0
    written = 0
    crossed: frozenset[int] = _NO_STREAMS
    kept: Any = None
    lasting = False
    num_bytes = 0

    def __init__(self, home: int | None = None, reference: Any = None) -> None:
        self.home, self.reference = home, reference
        self.readers: dict[int, int] = {}


class _Mark:
    """The meaning of an event: the end of a stream at a tick, and all that this stream had come after."""

    __slots__ = ("seen", "stream", "tick")

    def __init__(self, stream: int, tick: int, seen: list[int]) -> None:
        self.stream, self.tick, self.seen = stream, tick, seen


class Ordering:
    """The state of a few streams of one device. Stream 0 is there from the start.

    Attributes:
        held: Storages that must not be freed yet, in the order in which they were first used away from home.
        crossings: What the last ``use`` uses away from home for the first time since it was released.
    """

    def __init__(self) -> None:
        self._ticks: list[int] = []
        # Per stream: the tick of each other stream that it comes after. Replaced, not changed: marks share these lists,
        # and grow with them.
        self._seen: list[list[int]] = []
        self._forks: list[int | None] = []  # per stream: the event that it must wait for before its next work
        self._marks: list[_Mark | None] = []  # per event: two for each stream, its tail and its fork
        self._reached: list[int] = []  # per stream: the tick that the host knows to be over
        self.held: dict[TrackedStorage, None] = {}
        self.crossings: list[TrackedStorage] = []
        self.add_stream()

    # --- streams

    @property
    def num_streams(self) -> int:
        """How many there are."""
        return len(self._ticks)

    def add_stream(self) -> int:
        """Number one more stream. Nothing orders it before it is forked."""
        lists = [*self._seen, *(mark.seen for mark in self._marks if mark is not None)]
        for seen in {id(seen): seen for seen in lists}.values():
            seen.append(0)
        index = len(self._ticks)
        self._seen.append([_BEFORE_ALL] * (index + 1))
        self._ticks.append(0)
        self._reached.append(0)
        self._forks.append(None)
        self._marks += [None, None]
        return index

    def fork(self, parent: int, children: Sequence[int]) -> Steps:
        """Let children begin after what the parent has been given so far. They wait when they are first used."""
        steps: Steps = []
        self._wake(parent, steps)
        self._ticks[parent] += 1  # a point of its own: whatever the parent is given next is not waited for
        event = 2 * parent + 1  # where children of an earlier fork have not begun, they wait for this one
        self._record(event, parent, steps)
        for child in children:
            self._forks[child] = event
        return steps

    def wake(self, stream: int) -> Steps:
        """Let a stream that was forked begin, if it has not yet."""
        steps = _NOTHING
        if self._forks[stream] is not None:
            steps = []
            self._wake(stream, steps)
        return steps

    def join(self, parent: int, children: Sequence[int]) -> Steps:
        """Let the parent come after all that the children have been given."""
        steps: Steps = []
        needs = {child: self._ticks[child] for child in children if self._ticks[child] > self._seen[parent][child]}
        if needs:
            self._come_after_all(parent, {**needs, **self._fork_needs(parent)}, steps)
        for child in children:
            self._forks[child] = None
        if steps:
            self._ticks[parent] += 1  # waiting is work, too: a stream that joins this one later must come after it
        return steps

    def meet(self) -> Steps:
        """Let every stream come after everything that any stream has been given: nothing needs to be held."""
        awake = [stream for stream in range(self.num_streams) if self._forks[stream] is None]
        steps = self.join(awake[0], awake[1:])
        self._ticks[awake[0]] += 1
        for stream in awake[1:]:
            if self._seen[stream][awake[0]] != _BEFORE_ALL:  # one that was never forked has done nothing
                self._come_after_all(stream, {awake[0]: self._ticks[awake[0]]}, steps)
                self._ticks[stream] += 1
        return steps

    # --- uses

    def use(  # noqa: C901 - in every operator: each call would be one more
        self,
        stream: int,
        reads: Sequence[TrackedStorage],
        writes: Sequence[TrackedStorage] = (),
        hold: bool = True,
    ) -> Steps:
        """Say that the next work on a stream uses storages; return what must be recorded and waited for first.

        Args:
            stream: Where.
            reads: What it reads, or reads and writes.
            writes: What it changes.
            hold: Whether to hold what is used away from home. ``crossings`` has it in either case.
        """
        steps, seen = _NOTHING, self._seen[stream]
        tick = self._ticks[stream] + 1
        needs: dict[int, int] | None = None  # the tick of each other stream that this one must come after
        if self._forks[stream] is not None:
            needs = self._fork_needs(stream)
        crossings: list[TrackedStorage] | None = None
        for memory in reads:
            writer = memory.writer
            if writer != stream and seen[writer] < memory.written > 0:
                needs = needs or {}
                needs[writer] = max(memory.written, needs.get(writer, 0))
            memory.readers[stream] = tick
            if memory.home != stream and stream not in memory.crossed:
                crossings = crossings or []
                crossings.append(memory)
                memory.crossed = memory.crossed | {stream}
        for memory in writes:
            writer = memory.writer
            if writer != stream and seen[writer] < memory.written > 0:
                needs = needs or {}
                needs[writer] = max(memory.written, needs.get(writer, 0))
            for reader, read in memory.readers.items():
                if reader != stream and seen[reader] < read:
                    needs = needs or {}
                    needs[reader] = max(read, needs.get(reader, 0))
            memory.writer, memory.written = stream, tick
            memory.readers.clear()
            if memory.home != stream and stream not in memory.crossed:
                crossings = crossings or []
                crossings.append(memory)
                memory.crossed = memory.crossed | {stream}
        if needs:
            steps = []
            self._come_after_all(stream, needs, steps)
        self._ticks[stream] = tick
        self.crossings = crossings or []
        if hold and crossings:
            for memory in crossings:
                self.held[memory] = None
        return steps

    def make(self, memory: TrackedStorage, stream: int) -> None:
        """Say that the work issued last on a stream has allocated a storage and written it."""
        memory.home = memory.writer = stream
        memory.written = self._ticks[stream]

    # --- what is held

    def unreached(self) -> list[tuple[int, int]]:
        """Streams, each with the tick of its last work, that the host must see to be over before it can let go."""
        streams = {s for memory in self.held for s in (*memory.readers, memory.writer) if s != memory.home}
        return [(s, self._ticks[s]) for s in sorted(streams) if self._reached[s] < self._ticks[s]]

    def reach(self, stream: int, tick: int) -> None:
        """Say that the device is done with all that a stream was given up to a tick."""
        self._reached[stream] = max(self._reached[stream], tick)

    def reach_all(self) -> None:
        """Say that the device is done with everything."""
        self._reached = list(self._ticks)

    def release(self) -> list[TrackedStorage]:
        """Let go of what may be freed by now, and return it."""
        free = [memory for memory in self.held if self._may_go(memory)]
        for memory in free:
            self._let_go(memory)
        return free

    def release_all(self) -> list[TrackedStorage]:
        """Let go of everything: right where all streams have met."""
        free = list(self.held)
        for memory in free:
            self._let_go(memory)
        return free

    def _let_go(self, memory: TrackedStorage) -> None:
        del self.held[memory]
        memory.crossed = _NO_STREAMS

    def _may_go(self, memory: TrackedStorage) -> bool:
        uses = dict(memory.readers)
        if memory.written:
            uses[memory.writer] = max(memory.written, uses.get(memory.writer, 0))
        return all(self._reached[s] >= tick or self._is_home_after(memory.home, s, tick) for s, tick in uses.items())

    def _is_home_after(self, home: int | None, stream: int, tick: int) -> bool:
        return home is not None and (home == stream or self._seen[home][stream] >= tick)

    # --- events

    def _fork_needs(self, stream: int) -> dict[int, int]:
        """Return what a stream that was forked, and has not begun yet, must come after."""
        event = self._forks[stream]
        if event is None:
            return {}
        mark = self._mark_of(event)
        return {mark.stream: mark.tick} if self._seen[stream][mark.stream] < mark.tick else {}

    def _wake(self, stream: int, steps: Steps) -> None:
        """Let a stream wait for its fork, if it has not yet."""
        needs = self._fork_needs(stream)
        if needs:
            self._come_after_all(stream, needs, steps)
            self._ticks[stream] += 1  # it has something to be joined for

    def _come_after_all(self, stream: int, needs: dict[int, int], steps: Steps) -> None:
        """Let a stream come after ticks of other ones, by as few waits as that takes."""
        marks, fork = self._marks, self._forks[stream]
        if len(needs) > 1:
            needs = self._prune(stream, needs)
        for other, tick in needs.items():
            event = self._event_for(fork, other, tick)
            if event is None:
                event = 2 * other
                marks[event] = _Mark(other, self._ticks[other], self._seen[other])
                steps.append((True, event, other))
            self._wait(event, stream, steps)
        self._forks[stream] = None

    def _prune(self, stream: int, needs: dict[int, int]) -> dict[int, int]:
        """Leave out what a stream comes after anyway when it waits for the rest."""
        seen = self._seen
        if not any(seen[by][other] >= tick for other, tick in needs.items() for by in needs if by != other):
            return needs
        fork = self._forks[stream]
        seen_by = {other: self._seen_at(self._event_for(fork, other, tick), other) for other, tick in needs.items()}
        left = dict(needs)
        for candidate in needs:
            rest = [other for other in left if other != candidate]
            if all(o in rest or any(seen_by[by][o] >= tick for by in rest) for o, tick in needs.items()):
                del left[candidate]
        return left

    def _seen_at(self, event: int | None, stream: int) -> list[int]:
        """Return what a stream had come after when an event was recorded; now, where it is to be recorded."""
        return self._seen[stream] if event is None else self._mark_of(event).seen

    def _event_for(self, fork: int | None, other: int, tick: int) -> int | None:
        """An event that stands for a tick of another stream or a later one; ``None`` where one must be recorded."""
        if fork is not None:
            mark = self._mark_of(fork)
            if mark.stream == other and mark.tick >= tick:
                return fork
        tail = self._marks[2 * other]
        return 2 * other if tail is not None and tail.tick >= tick else None

    def _mark_of(self, event: int) -> _Mark:
        mark = self._marks[event]
        assert mark is not None, "nobody waits for what is not recorded"
        return mark

    def _record(self, event: int, stream: int, steps: Steps) -> None:
        self._marks[event] = _Mark(stream, self._ticks[stream], self._seen[stream])
        steps.append((True, event, stream))

    def _wait(self, event: int, stream: int, steps: Steps) -> None:
        mark = self._mark_of(event)
        # A new list: marks share the old one.
        seen = self._seen[stream] = list(map(max, self._seen[stream], mark.seen))
        if mark.tick > seen[mark.stream]:
            seen[mark.stream] = mark.tick
        steps.append((False, event, stream))
