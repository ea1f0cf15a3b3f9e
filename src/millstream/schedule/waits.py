"""Events and waits for kernels that have their streams: as few as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millstream.graph import Launch, Moment, Record, Step, StreamClocks, Wait


def place_waits(
    order: Sequence[int], stream_of: Sequence[int], predecessors: Sequence[Sequence[int]], num_streams: int
) -> list[Step]:
    """Issue launches, and between them the events and waits that order every kernel after its predecessors.

    Contract:
        - Every predecessor of a kernel happens before it, and everything happens before the end of stream 0.
        - Nothing is waited for that is known already: neither a predecessor that another one comes after, nor one that
          the stream already comes after, directly or through other streams.
        - Only what is waited for is recorded, once, right after its launch.

    Args:
        order: Kernels in the order in which they are launched, predecessors first.
        stream_of: By kernel.
        predecessors: By kernel.
        num_streams: Streams are numbered from 0.
    """
    clocks = StreamClocks(num_streams)
    moments: dict[int, Moment] = {}
    waits: dict[int, list[int]] = {}
    last_on: dict[int, int] = {}
    for kernel in order:
        stream = stream_of[kernel]
        waits[kernel] = _wait(clocks, stream, moments, predecessors[kernel])
        moments[kernel] = clocks.advance(stream)
        last_on[stream] = kernel
    joins = _wait(clocks, 0, moments, last_on.values())
    waited_for = {predecessor for each in (*waits.values(), joins) for predecessor in each}
    events: dict[int, int] = {}
    steps: list[Step] = []
    for kernel in order:
        stream = stream_of[kernel]
        steps += [Wait(events[predecessor], stream) for predecessor in waits[kernel]]
        steps.append(Launch(kernel, stream))
        if kernel in waited_for:
            events[kernel] = len(events)
            steps.append(Record(events[kernel], stream))
    return steps + [Wait(events[kernel], 0) for kernel in joins]


def _wait(clocks: StreamClocks, stream: int, moments: dict[int, Moment], kernels: Iterable[int]) -> list[int]:
    """Order a stream after kernels, and return those that must really be waited for."""
    latest: dict[int, int] = {}  # by stream: what it does next comes after these already
    for kernel in kernels:
        other = moments[kernel].stream
        if other not in latest or moments[kernel].tick > moments[latest[other]].tick:
            latest[other] = kernel
    needed = [
        kernel
        for kernel in latest.values()
        if not any(moments[kernel].happens_before(moments[other]) for other in latest.values())
    ]
    return [kernel for kernel in sorted(needed) if clocks.wait(stream, moments[kernel])]
