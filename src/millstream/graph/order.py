"""Happens-before over streams and events, by vector clocks.

The model, for every plan:
    - Steps on one stream happen in the order in which they are issued.
    - A ``Wait`` makes everything issued later on its stream happen after the ``Record`` of its event, and so after
      everything issued on that stream before the ``Record``.
    - Every stream begins with an implicit wait on the start of stream 0 (the *fork*): what the caller issued before the
      plan happens before all of it.
    - Nothing is implied at the end. What comes after the plan continues after the last step on stream 0, so the other
      streams must be joined to it by explicit waits on stream 0.

Vector clocks: Fidge, "Timestamps in message-passing systems that preserve the partial ordering" (1988). The order never
contradicts the host's: an event can be waited for only once it is recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from millstream.errors import PlanError
from millstream.graph.plan import Plan, Record, Wait


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in the order of one stream.

    Attributes:
        stream: Whose order it belongs to.
        tick: Its number on that stream, from 1.
        seen: For each other stream, the last tick that happens before this point (0: none).
    """

    stream: int
    tick: int
    seen: tuple[int, ...]

    def happens_before(self, other: Moment) -> bool:
        """Tell whether this point is ordered before ``other``."""
        if self.stream == other.stream:
            return self.tick < other.tick
        return self.tick <= other.seen[self.stream]


class StreamClocks:
    """The progress of other streams that each stream has seen, while work is issued.

    Args:
        num_streams: Streams are numbered from 0.
    """

    def __init__(self, num_streams: int) -> None:
        self._ticks = [0] * num_streams
        # Replaced, never changed: moments share these tuples, and only a wait that teaches something makes a new one.
        self._seen = [(0,) * num_streams] * num_streams

    def advance(self, stream: int) -> Moment:
        """Issue something on a stream."""
        self._ticks[stream] += 1
        return Moment(stream, self._ticks[stream], self._seen[stream])

    def wait(self, stream: int, moment: Moment) -> bool:
        """Order everything issued later on a stream after a moment; return whether that was not so already."""
        seen = self._seen[stream]
        if moment.stream == stream or moment.tick <= seen[moment.stream]:
            return False
        merged = list(map(max, seen, moment.seen))
        merged[moment.stream] = moment.tick
        self._seen[stream] = tuple(merged)
        return True


class HappensBefore:
    """The order between the steps of a plan.

    O(steps + waits * streams) time.

    Attributes:
        moments: The moment of each step, by position in ``plan.steps``.
        end: The end of stream 0, where the caller's work continues.

    Raises:
        PlanError: A ``Wait`` names an event that no earlier ``Record`` records.
    """

    def __init__(self, plan: Plan) -> None:
        clocks = StreamClocks(plan.num_streams)
        recorded: dict[int, Moment] = {}
        moments = []
        for position, step in enumerate(plan.steps):
            if isinstance(step, Wait):
                if step.event not in recorded:
                    message = f"step {position} waits for event {step.event}, which no earlier step records"
                    raise PlanError(f"{message}: record it before", step=position)
                clocks.wait(step.stream, recorded[step.event])
            moments.append(clocks.advance(step.stream))
            if isinstance(step, Record):
                recorded[step.event] = moments[-1]
        self.moments = tuple(moments)
        self.end = clocks.advance(0)

    def before(self, first: int, second: int) -> bool:
        """Tell whether the step at position ``first`` happens before the one at position ``second``."""
        return self.moments[first].happens_before(self.moments[second])

    def first_behind(self, stream: int, position: int) -> int:
        """Return the position of the first step on a stream after a given one; the number of steps if there is none.

        O(log steps) time.
        """
        moment = self.moments[position]
        if stream == moment.stream:
            later = self._positions_on[stream]
            return later[moment.tick] if moment.tick < len(later) else len(self.moments)
        ticks, positions = self._lessons[stream, moment.stream]
        index = bisect_left(ticks, moment.tick)
        return positions[index] if index < len(positions) else len(self.moments)

    @cached_property
    def _positions_on(self) -> list[list[int]]:
        """For each stream the positions of its steps."""
        positions: list[list[int]] = [[] for _ in range(len(self.end.seen))]
        for position, moment in enumerate(self.moments):
            positions[moment.stream].append(position)
        return positions

    @cached_property
    def _lessons(self) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
        """For each pair of streams what the first learns of the second: rising ticks, and where it has learned them."""
        streams = range(len(self.end.seen))
        lessons: dict[tuple[int, int], tuple[list[int], list[int]]] = {
            (stream, other): ([], []) for stream in streams for other in streams
        }
        known = [(0,) * len(streams)] * len(streams)
        for position, moment in enumerate(self.moments):
            if moment.seen is known[moment.stream]:
                continue
            for other, (before, now) in enumerate(zip(known[moment.stream], moment.seen, strict=True)):
                if now > before:
                    ticks, positions = lessons[moment.stream, other]
                    ticks.append(now)
                    positions.append(position)
            known[moment.stream] = moment.seen
        return lessons

    def joined(self, position: int) -> bool:
        """Tell whether a step happens before the end of stream 0."""
        return self.moments[position].happens_before(self.end)
