"""A plan: what is launched on which stream, what waits for what, how long each buffer lives. Frozen data without torch.

Steps stand in the order in which the host issues them. ``Allocate`` and ``Free`` are meant on the host's clock too: a
buffer's memory may be handed out again by an ``Allocate`` after its ``Free`` on the same stream, which is safe only
where that stream comes after every use of it; ``millstream.check`` proves that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from millstream.graph.kernel_graph import KernelGraph
from millstream.graph.layout import MemoryLayout


@dataclass(frozen=True, slots=True)
class Launch:
    """Put a kernel on a stream."""

    kernel: int
    stream: int


@dataclass(frozen=True, slots=True)
class Record:
    """Mark the present tail of a stream with an event."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Let everything issued later on a stream run only after an event."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """Take memory for a buffer; ``stream`` is that of its first writer."""

    buffer: str
    stream: int


@dataclass(frozen=True, slots=True)
class Free:
    """Give a buffer's memory back to ``stream``, after everything issued there so far."""

    buffer: str
    stream: int


Step = Launch | Record | Wait | Allocate | Free


class Spread(StrEnum):
    """The placement of blocks of concurrent kernels on a device, where an engine can choose it."""

    PACKED = "packed"  # as the device likes
    APART = "apart"  # those of small kernels have a multiprocessor each, as far as other small ones are concerned
    EVEN = "even"  # on no multiprocessor are many more of a kernel's blocks than on another


@dataclass(frozen=True)
class Plan:
    """The steps that issue one run of a graph.

    Attributes:
        graph: What is run.
        steps: In the order the host issues them.
        num_streams: Streams are numbered from 0; stream 0 is where the caller's work comes from and continues.
        policy: Name of the policy that made it.
        layout: Where its temporaries lie in one arena; ``None`` leaves that to the allocator of whoever runs it.
        spread: How its kernels' blocks are spread over the device.
    """

    graph: KernelGraph
    steps: tuple[Step, ...]
    num_streams: int = 1
    policy: str = "serial"
    layout: MemoryLayout | None = None
    spread: Spread = Spread.PACKED
