"""Which waits make streams written down by hand safe, and which memory must outlive its name. No torch, no device.

A storage that is used on two streams needs order: a reader waits for the last writer (RAW), a writer for the readers
since then (WAR) and for the last writer (WAW). ``Ordering`` is told of every use before it is issued and answers with
the events to record and the waits to enqueue.

**Contract**
- After the steps that ``use`` returns, every earlier conflicting use happens before this one.
- A wait is asked for only where nothing has ordered the two yet. Vector clocks say so: Fidge, "Timestamps in
  message-passing systems that preserve the partial ordering" (1988).
- After ``join``, whatever was issued on the children happens before whatever the parent is given next.
- Memory goes back to the stream that it was allocated on, its *home*, as soon as nothing refers to it, whatever other
  streams still do with it. So a storage that is used elsewhere is *held* until its home comes after that use, or until
  the host has seen an event after that use.

Every mark is an event recorded at the end of a stream. Marks are made when somebody needs one, so a wait may cover
later work of that stream than it has to: never less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.graph import Record, Wait

Steps = list[Record | Wait]
_NOTHING: Steps = []
_BEFORE_ALL = -1  # a tick: not even what the parent had issued before the fork is known to be over


class Memory:
    """One storage, as the ordering knows it.

    Attributes:
        home: Stream whose pool the memory goes back to; ``None`` where it is older than the ordering.
        writer: Stream of the last write.
        written: Its tick, 0 for none.
        readers: For each stream the tick of its last read since then.
        crossed: Streams other than ``home`` that use it and that it is held for.
        reference: Finds the storage while it lives; the caller's.
        kept: The storage itself while it is held; the caller's.
        lasting: Whether somebody else keeps it for long, as a parameter: it counts for nothing in bounds.
        num_bytes: Its size when it was first held.
    """

    __slots__ = ("crossed", "home", "kept", "lasting", "num_bytes", "readers", "reference", "writer", "written")

    def __init__(self, home: int | None = None, reference: Any = None) -> None:
        self.home, self.reference = home, reference
        self.writer, self.written = 0, 0
        self.readers: dict[int, int] = {}
        self.crossed: set[int] = set()
        self.kept: Any = None
        self.lasting = False
        self.num_bytes = 0


class _Mark:
    """What an event stands for: the end of a stream at a tick, and all that this stream had come after."""

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
        self._seen: list[list[int]] = []  # per stream: the tick of each other stream that it comes after
        self._forks: list[int | None] = []  # per stream: the event that it must wait for before its next work
        self._tails: list[int] = []  # per stream: its event, recorded again and again
        self._marks: list[_Mark | None] = []  # per event
        self._reached: list[int] = []  # per stream: the tick that the host knows to be over
        self.held: dict[Memory, None] = {}
        self.crossings: list[Memory] = []
        self.add_stream()

    # --- streams

    @property
    def num_streams(self) -> int:
        """How many there are."""
        return len(self._ticks)

    def add_stream(self) -> int:
        """Number one more stream. Nothing orders it before it is forked."""
        for seen in self._seen:
            seen.append(0)
        index = len(self._ticks)
        self._seen.append([_BEFORE_ALL] * (index + 1))
        self._ticks.append(0)
        self._reached.append(0)
        self._forks.append(None)
        self._marks.append(None)
        self._tails.append(len(self._marks) - 1)
        return index

    def fork(self, parent: int, children: Sequence[int]) -> Steps:
        """Let children begin after what the parent has been given so far. They wait when they are first used."""
        steps: Steps = []
        self._wake(parent, steps)
        self._ticks[parent] += 1  # a point of its own: whatever the parent is given next is not waited for
        self._marks.append(None)
        event = len(self._marks) - 1
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
            self._ticks[parent] += 1  # waiting is work, too: who joins this stream later must come after it
        return steps

    def meet(self) -> Steps:
        """Let every stream come after everything that any stream has been given: nothing needs to be held."""
        awake = [stream for stream in range(self.num_streams) if self._forks[stream] is None]
        steps = self.join(awake[0], awake[1:])
        self._ticks[awake[0]] += 1
        for stream in awake[1:]:
            if self._seen[stream][awake[0]] != _BEFORE_ALL:  # one that was never forked has done nothing
                self._come_after(stream, awake[0], self._ticks[awake[0]], steps)
                self._ticks[stream] += 1
        return steps

    # --- uses

    def use(self, stream: int, reads: Sequence[Memory], writes: Sequence[Memory] = (), *, hold: bool = True) -> Steps:
        """Say that the next work on a stream uses storages; return what must be recorded and waited for first.

        Args:
            stream: Where.
            reads: What it reads, or reads and writes.
            writes: What it changes.
            hold: Whether to hold what is used away from home. ``crossings`` tells of it in either case.
        """
        steps = _NOTHING
        seen = self._seen[stream]
        self.crossings = crossings = []
        needs = {} if self._forks[stream] is None else self._fork_needs(stream)  # the tick of each other stream that this one must come after
        for memory in reads:
            if memory.writer != stream and seen[memory.writer] < memory.written > 0:
                needs[memory.writer] = max(memory.written, needs.get(memory.writer, 0))
        for memory in writes:
            if memory.writer != stream and seen[memory.writer] < memory.written > 0:
                needs[memory.writer] = max(memory.written, needs.get(memory.writer, 0))
            for reader, tick in memory.readers.items():
                if reader != stream and seen[reader] < tick:
                    needs[reader] = max(tick, needs.get(reader, 0))
        if needs:
            steps = []
            self._come_after_all(stream, needs, steps)
        tick = self._ticks[stream] = self._ticks[stream] + 1
        for memory in reads:
            memory.readers[stream] = tick
            if memory.home != stream and stream not in memory.crossed:
                crossings.append(memory)
                memory.crossed.add(stream)
        for memory in writes:
            memory.writer, memory.written = stream, tick
            memory.readers.clear()
            if memory.home != stream and stream not in memory.crossed:
                crossings.append(memory)
                memory.crossed.add(stream)
        if hold and crossings:
            self.held.update(dict.fromkeys(crossings))
        return steps

    def make(self, memory: Memory, stream: int) -> None:
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

    def release(self) -> list[Memory]:
        """Let go of what may be freed by now, and return it."""
        free = [memory for memory in self.held if self._may_go(memory)]
        for memory in free:
            self._let_go(memory)
        return free

    def release_all(self) -> list[Memory]:
        """Let go of everything: right where all streams have met."""
        free = list(self.held)
        for memory in free:
            self._let_go(memory)
        return free

    def _let_go(self, memory: Memory) -> None:
        del self.held[memory]
        memory.crossed = set()

    def _may_go(self, memory: Memory) -> bool:
        uses = dict(memory.readers)
        if memory.written:
            uses[memory.writer] = max(memory.written, uses.get(memory.writer, 0))
        return all(self._reached[s] >= tick or self._is_home_after(memory.home, s, tick) for s, tick in uses.items())

    def _is_home_after(self, home: int | None, stream: int, tick: int) -> bool:
        return home is not None and (home == stream or self._seen[home][stream] >= tick)

    # --- events

    def _fork_needs(self, stream: int) -> dict[int, int]:
        """What a stream that was forked, and has not begun yet, must come after."""
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
        for other, tick in self._prune(stream, needs).items():
            self._come_after(stream, other, tick, steps)
        self._forks[stream] = None

    def _prune(self, stream: int, needs: dict[int, int]) -> dict[int, int]:
        """Leave out what a stream comes after anyway when it waits for the rest."""
        if len(needs) == 1:
            return needs
        seen_by = {other: self._seen_at(self._event_for(stream, other, tick), other) for other, tick in needs.items()}
        left = dict(needs)
        for candidate in needs:
            rest = [other for other in left if other != candidate]
            if all(o in rest or any(seen_by[by][o] >= tick for by in rest) for o, tick in needs.items()):
                del left[candidate]
        return left

    def _seen_at(self, event: int | None, stream: int) -> list[int]:
        """What a stream had come after when an event was recorded; now, where it is to be recorded."""
        seen = self._seen[stream] if event is None else self._mark_of(event).seen
        return seen + [0] * (self.num_streams - len(seen))

    def _event_for(self, stream: int, other: int, tick: int) -> int | None:
        """An event that stands for a tick of another stream or a later one; ``None`` where one must be recorded."""
        for event in (self._forks[stream], self._tails[other]):
            mark = None if event is None else self._marks[event]
            if mark is not None and mark.stream == other and mark.tick >= tick:
                return event
        return None

    def _come_after(self, stream: int, other: int, tick: int, steps: Steps) -> None:
        """Let a stream wait for a tick of another one."""
        event = self._event_for(stream, other, tick)
        if event is None:
            event = self._tails[other]
            self._record(event, other, steps)
        self._wait(event, stream, steps)

    def _mark_of(self, event: int) -> _Mark:
        mark = self._marks[event]
        assert mark is not None, "nobody waits for what is not recorded"
        return mark

    def _record(self, event: int, stream: int, steps: Steps) -> None:
        self._marks[event] = _Mark(stream, self._ticks[stream], list(self._seen[stream]))
        steps.append(Record(event, stream))

    def _wait(self, event: int, stream: int, steps: Steps) -> None:
        mark, seen = self._mark_of(event), self._seen[stream]
        for other, tick in enumerate(mark.seen):
            if tick > seen[other]:
                seen[other] = tick
        seen[mark.stream] = max(seen[mark.stream], mark.tick)
        steps.append(Wait(event, stream))
