"""``check=True``: a scope's uses of memory as a plan, in which ``millstream.check`` looks for races.

Our own streams are ordered by what ``Ordering`` says. A stream of somebody else's is ordered by them, by events and
waits of PyTorch's, which are watched while the scope is open: so it shows whether they forgot one.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from millstream.check import find_races
from millstream.graph import Buffer, Kernel, KernelGraph, KernelKind, Launch, Plan, Record, Role, Step, Wait
from millstream.manual.ordering import TrackedStorage

_INNER = ("millstream", "torch", "contextlib")


class Trace:
    """The events of a scope, in the order of the host.

    Args:
        stream_id: Names a stream.
        device: For the report.
    """

    def __init__(self, stream_id: Callable[[Any], int], device: str) -> None:
        self._stream_id, self._device = stream_id, device
        self._owner = threading.get_ident()
        self._streams: dict[int, int] = {}
        self._names: dict[TrackedStorage, str] = {}
        self._steps: list[Step] = []
        self._launched: list[tuple[str, list[str], list[str], str]] = []
        self._events: dict[int, int] = {}  # an event's identity -> its newest record
        self._seen_by_host: list[int] = []
        self._alive: list[Any] = []  # events, so that no other gets the identity of one
        self._num_events = 0
        self._undo: list[Callable[[], None]] = []

    # --- what happens

    def launch(self, name: str, stream: Any, reads: Iterable[TrackedStorage], writes: Iterable[TrackedStorage]) -> None:
        """An operator is about to run on a stream."""
        kernel = len(self._launched)
        self._launched.append((name, [*map(self._name, reads)], [*map(self._name, writes)], _find_line()))
        self._steps.append(Launch(kernel, self._number(stream)))

    def made(self, memories: Iterable[TrackedStorage]) -> None:
        """The last operator has made storages."""
        self._launched[-1][2].extend(map(self._name, memories))

    def record(self, event: Any, stream: Any) -> None:
        """An event is recorded."""
        self._events[id(event)] = self._num_events
        self._alive.append(event)
        self._steps.append(Record(self._num_events, self._number(stream)))
        self._num_events += 1

    def wait(self, event: Any, stream: Any) -> None:
        """A stream waits for an event."""
        if id(event) in self._events:  # one that was recorded before the scope orders nothing within it
            self._steps.append(Wait(self._events[id(event)], self._number(stream)))

    def synchronize(self, event: Any) -> None:
        """The host has seen an event: whatever is issued from now on comes after it."""
        if id(event) in self._events:
            record = self._events[id(event)]
            self._seen_by_host.append(record)
            self._steps += [Wait(record, number) for number in self._streams.values()]

    def synchronize_stream(self, stream: Any) -> None:
        """The host has waited for a stream."""
        event = object()
        self.record(event, stream)
        self.synchronize(event)

    # --- watching

    def start(self, *examples: Any) -> None:
        """Watch the events and streams of this thread: those of the examples' types, and PyTorch's."""
        kinds = [torch.cuda.Stream, torch.cuda.Event, *(kind for each in examples for kind in type(each).__mro__)]
        for kind in dict.fromkeys(kinds):
            for name, tell in _TELL.items():
                if name in vars(kind):
                    with suppress(TypeError):  # a class of compiled code
                        self._watch(kind, name, tell)

    def stop(self) -> None:
        """Watch no more."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _watch(self, kind: type, name: str, tell: Callable[..., None]) -> None:
        original = vars(kind)[name]

        @functools.wraps(original)
        def watched(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(this, *args, **kwargs)
            if threading.get_ident() == self._owner:
                tell(self, result, this, *args, **kwargs)
            return result

        setattr(kind, name, watched)
        self._undo.append(lambda: setattr(kind, name, original))

    # --- the end

    def describe_races(self) -> str:
        """Tell of all races; empty where there are none."""
        return "\n".join(map(str, find_races(self.plan())))

    def plan(self) -> Plan:
        """All of it as a plan."""
        kernels = []
        for name, reads, writes, line in self._launched:
            touched = tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(writes))
            kernels.append(Kernel(len(kernels), name, KernelKind.LIBRARY, self._device, *touched, source=line))
        buffers = [Buffer(name, memory.num_bytes, self._device, Role.INPUT) for memory, name in self._names.items()]
        graph = KernelGraph("scope", tuple(kernels), tuple(buffers), tuple(self._names.values()))
        return Plan(graph, tuple(self._steps), num_streams=len(self._streams), policy="manual")

    def _number(self, stream: Any) -> int:
        stream_id = self._stream_id(stream)
        if stream_id not in self._streams:
            number = self._streams[stream_id] = len(self._streams)
            self._steps += [Wait(record, number) for record in self._seen_by_host]
        return self._streams[stream_id]

    def _name(self, memory: TrackedStorage) -> str:
        return self._names.setdefault(memory, f"t{len(self._names)}")


def _current(this: Any) -> Any:  # noqa: ARG001
    return torch.cuda.current_stream()


_TELL: dict[str, Callable[..., Any]] = {
    # What a watched method has done: the trace, its result, the object, its arguments.
    "record": lambda trace, _, event, stream=None: trace.record(event, stream or _current(event)),
    "wait": lambda trace, _, event, stream=None: trace.wait(event, stream or _current(event)),
    "wait_event": lambda trace, _, stream, event: trace.wait(event, stream),
    "synchronize": lambda trace, _, this: (
        trace.synchronize(this) if hasattr(this, "elapsed_time") else trace.synchronize_stream(this)
    ),
    "query": lambda trace, result, this: result and hasattr(this, "elapsed_time") and trace.synchronize(this),
}


def _find_line() -> str:
    """The user's line that is being run."""
    for frame in _frames():
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _INNER:
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
