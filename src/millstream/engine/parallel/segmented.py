"""A graph that is cut at its collectives: each segment on an engine of its own, collectives issued in between.

No collective is captured. So every process may replay, capture or run plain Python in its own time, for other shapes
than the rest, of which one program may serve many: what must be the same everywhere is the order of the collectives,
and that is of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from millstream._torch.distributed.collectives import exchange_of
from millstream.lower.segmented.segments import Segment, Segments


class SegmentedEngine:
    """Runs the segments in order.

    Args:
        segments: What is computed and exchanged, and what goes where.
        executables: One a segment, ``Engine`` or ``BySize``; ``None`` where it has nothing to compute.

    Attributes:
        segments: As given.
        executables: As given.
        exchanges: The collectives, in the order in which they begin.
    """

    def __init__(self, segments: Segments, executables: Sequence[Any]) -> None:
        self.segments, self.executables = segments, executables
        self.exchanges: list[Any] = [exchange_of(key) for key in segments.keys]
        self._views = [part for exchange in self.exchanges for part in (*exchange.views, *exchange.sent)]
        num_sent = sum(bool(segment.starts) for segment in segments.segments if segment.graph is not None)
        self._has_memory = False
        for exchange in self.exchanges:
            exchange.is_beside = num_sent > 1
        last_uses = {place: number for number, each in enumerate(segments.segments) for place in _read_by(each)}
        kept = {value for is_place, value in segments.outputs if is_place}
        self._done_with: list[list[int]] = [[] for _ in segments.segments]
        for place, number in last_uses.items():
            if place not in kept:
                self._done_with[number].append(place)
        for segment, executable in zip(segments.segments, executables, strict=True):
            if executable is not None and segment.starts:
                exchanged = "; ".join(self.exchanges[number].label for number in segment.starts)
                executable.notes.append(f"then processes exchange {exchanged}")

    def __call__(self, inputs: list[Any], *, captured: bool = True) -> list[Any]:
        """Run a call.

        Args:
            inputs: As of an ``Engine``.
            captured: Whether segments may become graphs, which take memory that stays.
        """
        segments, exchanges = self.segments, self.exchanges
        if not self._has_memory:
            self._has_memory = True
            for exchange in exchanges:
                exchange.held.take(self)
        values: list[Any] = [*inputs, *self._views, *[None] * (segments.num_values - len(inputs) - len(self._views))]
        inputs.clear()
        steps = zip(segments.segments, self.executables, self._done_with, strict=True)
        for segment, executable, done_with in steps:
            for number in segment.waits:
                exchanges[number].wait()
            if executable is not None:
                run = executable if captured else executable.run_uncaptured
                results = run([values[place] for place in segment.inputs])
                for place, result in zip(segment.outputs, results, strict=True):
                    values[place] = result
                del results
            for number, places in segment.brings:
                torch._foreach_copy_(exchanges[number].sent, [values[place] for place in places])
            for number in segment.starts:
                exchanges[number].start()
            for place in done_with:  # activations are given back as soon as nothing needs them
                values[place] = None
        return [values[value] if is_place else value for is_place, value in segments.outputs]

    def release(self) -> None:
        """Give back the memory that is held between calls, that of the collectives included."""
        for executable in self.executables:
            if executable is not None:
                executable.release()
        if self._has_memory:
            self._has_memory = False
            for exchange in self.exchanges:
                exchange.held.give_back(self)


def _read_by(segment: Segment) -> set[int]:
    return {*segment.inputs, *(place for _, places in segment.brings for place in places)}
