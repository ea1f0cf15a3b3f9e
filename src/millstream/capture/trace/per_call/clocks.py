"""Clocks that a step reads for meters and logs: read before the graph runs, or after it.

**Contract**
- A reading with more operators after it than before it is the time at which the graph begins to run, any other one the
  time after it, when the effects first ask for one.
- Later readings are never earlier than those that come before them in the program.
- A time that a tensor or a branch depends on is refused.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import types
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from millstream._torch.one_thread import attributes_here
from millstream._torch.tracing import graph_being_traced
from millstream.capture.lines import is_users_own
from millstream.capture.state.impure import asking_of
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder

CLOCKS = frozenset(
    getattr(time, f"{name}{unit}")
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for unit in ("", "_ns")
    if hasattr(time, f"{name}{unit}")
)


class Clocks:
    """The readings of one trace.

    Args:
        recorder: Has the list of what is done after a replay.
        on_impure: Told of a frame of the user's for which a library reads a clock; may raise an error.
    """

    def __init__(self, recorder: EffectRecorder, on_impure: Callable[[FrameType, str, bool], None]) -> None:
        self._recorder, self._on_impure = recorder, on_impure
        self._positions: list[int] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """For the length of the context, in which the step runs, what the user's code reads is recorded."""
        start = _num_nodes()
        with attributes_here(time, **{clock.__name__: self._reader(clock) for clock in CLOCKS}):
            yield
        middle = (start + _num_nodes()) / 2
        for reading, position in zip(self._recorder.readings, self._positions, strict=True):
            reading.is_early = position < middle

    def stand_in(self, _: str, value: Any) -> Any:
        """Return what is to stand where a step finds a clock, as ``from time import time`` has it.

        ``None`` for all else.
        """
        is_clock = type(value) is types.BuiltinFunctionType and value in CLOCKS
        return self._reader(value) if is_clock else None

    def _reader(self, clock: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(clock)
        def read() -> Any:
            if not self._recorder.is_active:  # somebody else asks
                return clock()
            frame = sys._getframe(1)
            if is_users_own(frame.f_code.co_filename):
                self._positions.append(_num_nodes())
                return self._recorder.time(clock, is_whole=clock.__name__.endswith("_ns"))
            if (asking := asking_of(frame, is_written=False)) is not None:
                self._on_impure(asking, "a clock", False)
            return clock()

        return read


def _num_nodes() -> int:
    return len(graph_being_traced().nodes)
