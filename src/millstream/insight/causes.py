"""Causes that a device can wait for. Every nanosecond of idle time has exactly one of these."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """A reason why nothing ran. The value is what reports print."""

    DATA_WAIT = "data"  #: the loop waits for the workers of a loader
    IN_PROCESS = "data in process"  #: the loop makes the batch itself
    PASS = "start of pass"  #: workers of a loader are started and ended again for each pass, and delay its first batch
    SYNC = "sync"  #: the host waited for the device, and the queue was empty afterwards
    ALLOCATOR = "allocator"  #: device memory was taken from the driver or given back
    COMPILE = "compile"  #: TorchDynamo or a backend compiled, or the driver loaded code
    GRAPH_BREAK = "graph break"  #: Python between two compiled parts of one function
    GC = "gc"  #: Python's garbage collector
    IO = "io"  #: checkpoints, logs, files
    GIL = "gil"  #: another thread held Python's global interpreter lock
    DESCHEDULED = "descheduled"  #: the thread was ready, and no processor was free
    WAITING = "host waits"  #: the thread slept, or waited for a lock or a file, outside of all the above
    PYTHON = "python"  #: the thread ran the user's Python
    LAUNCH = "launch"  #: calling operators, and launching kernels one by one, took longer than running them
    GRAPH_TAIL = "graph tail"  #: between two CUDA graphs, both launched
    STREAM_WAIT = "stream wait"  #: already launched, after an event of another stream
    DEVICE_GAP = "device gap"  #: already launched: a few microseconds of the device's own
    PROFILER = "profiler"  #: what looking costs
    UNKNOWN = "unknown"  #: nothing was seen; never spread over others

    COPY = "copy"  #: exposed, not idle: the device only copied
    COMMUNICATION = "communication"  #: exposed, not idle: the device only took part in a collective


SAMPLED = frozenset((Cause.PYTHON, Cause.GRAPH_BREAK, Cause.WAITING, Cause.GIL, Cause.DESCHEDULED, Cause.UNKNOWN))
"""Causes that samples tell of: they are not seen in every step in which they happen."""
EXPOSED = (Cause.COPY, Cause.COMMUNICATION)
REMEDY_FREE = frozenset((Cause.DEVICE_GAP, Cause.PROFILER, Cause.UNKNOWN))
"""Causes that nobody can do anything about: they are shown, and never are the diagnosis."""
