"""Calls of a captured plan that read large inputs where the caller has them, as far as ``in_place`` decides.

**Why it is safe.** A graph that reads in place holds an address, not the tensor. It is replayed only in calls that pass
a tensor at that address, so the memory is valid, and whatever comes after the call on the caller's stream (a feeder's
next copy into the slot included) comes after the graph: however many streams it was captured on, it is one piece of
work of the stream it is launched on. Nothing writes to these inputs: not a kernel, and not through another input over
the same bytes. The graph's own memory was allocated while they were alive, so it lies elsewhere.

**Which inputs.** Those of inference and of steps that have a slot and are never written. Not those of a forward pass
under autograd: its graph's memory holds what is saved for the backward graph, which reads it at fixed addresses, so
that there can be only one of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from millstream._torch.tensors import storage_view
from millstream.device import DeviceContext, Event
from millstream.engine.cuda import in_place
from millstream.engine.cuda.in_place import LEAST_BYTES, SAMPLES, Addresses, CopyTrial, InPlaceCache
from millstream.graph import Role
from millstream.lower import Lowered, Phase


class Replay(Protocol):
    """A capture, as far as it matters here; see ``Captured``."""

    def copy_in(self, inputs: Sequence[Any]) -> None:
        """Copy inputs into slots, but for those that the graph reads in place."""
        ...

    def replay(self) -> None:
        """Launch the graph."""
        ...

    def make_outputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Take memory for what the caller gets."""
        ...

    def finish(self, inputs: list[Any], outputs: list[Any]) -> list[Any]:
        """Fill the outputs, and copy back what it wrote to inputs."""
        ...

    def run(self, inputs: list[Any]) -> list[Any]:
        """Do all of it."""
        ...

    def read_in_place(self, inputs: Sequence[Any], positions: frozenset[int]) -> Replay:
        """Capture the same so that it reads the inputs at these positions where they are in this call."""
        ...


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A call whose end the device has perhaps not reached yet: events before and after the copies, and at the end."""

    start: Event
    copied: Event
    end: Event
    in_place: bool


class Replayer:
    """Runs calls by the graph that copies its inputs, or by others of the same plan that read them in place.

    Not thread-safe: it is called under the context's ``graphs.lock``, after ``graphs.enter``, its device current.

    Args:
        base: Copies its inputs; fits every call.
        num_bytes: As ``bytes_in_place`` says; not empty.
        context: Of the device.
        on_failure: Told when a capture has failed. From then on all calls copy.
    """

    def __init__(
        self,
        base: Replay,
        num_bytes: Mapping[int, int],
        context: DeviceContext,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._base, self._context, self._on_failure = base, context, on_failure
        self._in_place: InPlaceCache[Replay] | None = InPlaceCache(num_bytes)  # None once it is settled that calls copy
        self._comparison = None if in_place.FORCED else CopyTrial()  # None once anything is settled
        self._timed: deque[TimedCall] = deque()

    @property
    def num_graphs(self) -> int:
        """How many graphs read in place."""
        return 0 if self._in_place is None else len(self._in_place)

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run a call; the list is emptied."""
        if self._timed:
            self._read_times()
        in_place, comparison, base = self._in_place, self._comparison, self._base
        if in_place is None:
            return base.run(inputs)
        addresses = tuple([inputs[position].data_ptr() for position in in_place.positions])
        graph = in_place.find(addresses)
        if graph is None and in_place.miss(addresses) and (comparison is None or comparison.promising):
            graph = self._make(in_place, addresses, inputs)
        if comparison is None:
            return (graph or base).run(inputs)
        if graph is not None:
            return self._run_timed(graph if comparison.take_turn() else base, inputs)
        return self._run_timed(base, inputs) if comparison.promising is None else base.run(inputs)

    def stop(self) -> None:
        """Let all calls copy from now on, and give back what that does not need."""
        self._in_place = None
        self._settle()

    def _make(self, in_place: InPlaceCache[Replay], addresses: Addresses, inputs: Sequence[Any]) -> Replay | None:
        if not are_apart(inputs, in_place.positions):
            in_place.refuse(addresses)
            return None
        try:
            graph = self._base.read_in_place(inputs, frozenset(in_place.positions))
        except (RuntimeError, torch.AcceleratorError) as error:
            self.stop()
            self._on_failure(error)
            return None
        in_place.keep(addresses, graph)
        return graph

    def _run_timed(self, replay: Replay, inputs: list[Any]) -> list[Any]:
        if len(self._timed) >= SAMPLES:  # the host is far ahead: first the device shall answer
            return replay.run(inputs)
        start, copied, end = (self._context.events.acquire(timing=True) for _ in range(3))
        stream, outputs = self._context.current_stream(), replay.make_outputs(inputs)
        start.record(stream)
        replay.copy_in(inputs)
        copied.record(stream)
        replay.replay()
        end.record(stream)
        self._timed.append(TimedCall(start, copied, end, replay is not self._base))
        return replay.finish(inputs, outputs)

    def _read_times(self) -> None:
        """Take up the times of calls that the device is done with; settle what they decide."""
        comparison = self._comparison
        if comparison is None or not self._context.capture_lock.acquire(blocking=False):
            return  # another thread captures: to ask for an event would end that
        try:
            with self._context.driver.spare_captures():  # of the user's own, which hold no lock
                while self._timed and self._timed[0].end.query():
                    timed = self._timed.popleft()
                    comparison.add(
                        timed.start.elapsed_time(timed.copied),
                        timed.copied.elapsed_time(timed.end),
                        in_place=timed.in_place,
                    )
                    self._release(timed)
        finally:
            self._context.capture_lock.release()
        if comparison.faster:
            self._settle()
        elif comparison.promising is False or comparison.faster is False:
            self.stop()

    def _settle(self) -> None:
        self._comparison = None
        while self._timed:
            self._release(self._timed.popleft())

    def _release(self, timed: TimedCall) -> None:
        for event in (timed.start, timed.copied, timed.end):
            self._context.events.release(event)


def bytes_in_place(lowered: Lowered, positions: Sequence[int], inputs: Sequence[Any]) -> dict[int, int]:
    """Tell which inputs may be read in place, and how many bytes copying each moves; empty where it is not worth it.

    Args:
        lowered: What is run.
        positions: Of the inputs that have slots.
        inputs: Of a call.
    """
    program, graph = lowered.program, lowered.program.graph
    if in_place.FORCED is False or lowered.phase not in (Phase.INFERENCE, Phase.STEP):
        return {}
    written = {storage for kernel in graph.kernels for storage in graph.touched_by[kernel.id][1]}
    num_bytes = {
        position: storage_view(inputs[position]).numel() * inputs[position].element_size()
        for position in positions
        if (name := program.inputs[position]) is not None
        and graph.buffer_of[name].role is Role.INPUT  # parameters have slots only because they move about
        and name not in program.mutated
        and graph.storage(name) not in written
        and str(inputs[position].device) in program.devices
    }
    num_bytes = {position: size for position, size in num_bytes.items() if size}  # no bytes have no address
    return num_bytes if in_place.FORCED or sum(num_bytes.values()) >= LEAST_BYTES else {}


def are_apart(inputs: Sequence[Any], positions: Sequence[int]) -> bool:
    """Return whether none of the inputs at ``positions`` shares bytes with any other input."""
    spans = sorted(
        (*_span(tensor), position)
        for position, tensor in enumerate(inputs)
        if isinstance(tensor, torch.Tensor) and tensor.numel()
    )
    watched = frozenset(positions)
    reached, reaching = 0, -1  # how far the spans so far go, and which of them goes that far
    for start, end, position in spans:
        if start < reached and (position in watched or reaching in watched):
            return False
        if end > reached:
            reached, reaching = end, position
    return True


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte of a tensor that is not empty, and of the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
