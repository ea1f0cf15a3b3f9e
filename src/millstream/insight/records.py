"""Records of a run. All times are nanoseconds of one clock; intervals are half-open."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from millstream.insight.causes import Cause


@dataclass(frozen=True, slots=True)
class Site:
    """A line of Python.

    Attributes:
        file: Its path as Python knows it.
        line: Counted from 1.
        function: In which function.
    """

    file: str
    line: int
    function: str = ""


Stack = tuple[Site, ...]
"""The innermost frame first."""
RUNNERS = ("/millstream/cli/running.py", "/runpy.py")
"""Files whose functions run the user's script or module."""
HOOKS = "/millstream/trace/"
"""Where the frames of looking itself are."""
PACKAGES = ("/site-packages/", "/dist-packages/")
"""Folders of installed packages, of which ``sys.path`` may have some from elsewhere."""


@dataclass(frozen=True, slots=True)
class HostSpan:
    """Something a thread did from begin to end, seen exactly.

    Attributes:
        thread: Which one.
        start_ns: Begin.
        end_ns: End.
        cause: What an idle device waits for meanwhile.
        stack: Where from.
        detail: A few words: what was saved, which generation was collected.
        stays_ns: What of it no remedy saves: garbage is to be collected some time.
    """

    thread: int
    start_ns: int
    end_ns: int
    cause: Cause
    stack: Stack = ()
    detail: str = ""
    stays_ns: int = 0


class State(StrEnum):
    """The activity of a thread when it was looked at."""

    COMPUTE = "compute"  #: in an operator, without the interpreter
    PYTHON = "python"
    WAITING = "waiting"  #: neither running nor ready
    GIL = "gil"  #: ready, and another Python thread ran
    DESCHEDULED = "descheduled"
    IO = "io"
    UNKNOWN = "unknown"  #: asleep, and what was seen does not tell for what


class Asleep(StrEnum):
    """The sleep of a thread at the moment at which it was looked at, and in what."""

    AWAKE = "awake"  #: on a processor, or ready for one
    INTERPRETER = "interpreter"  #: Python's global lock, which the look itself takes, too
    LOCK = "lock"  #: another one, which may be of an operator that waits for its own threads
    CALL = "call"  #: another system call: sleeping, reading, waiting for a process


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a thread; it speaks for the time since the look before.

    Attributes:
        thread: Which one.
        start_ns: The look before.
        end_ns: This look.
        stack: Where the thread was.
        cpu_ns: Time it ran meanwhile; ``None`` where the system does not say.
        late_ns: How much later than planned the sampler got the interpreter.
        in_bytecode: Whether it stood between two instructions of Python, where the interpreter is taken away; not so
            inside an operator in C; ``None`` at a call, which may be either.
        process_ns: Time that all threads of the process ran meanwhile.
        others: For each other Python thread that ran meanwhile, how long and where.
        ready_ns: Time that it was ready and no processor was free; ``None`` where the system does not say.
        asleep: Whether it slept when it was looked at; ``None`` where the system does not say.
        held_ns: How long somebody held the interpreter from the planned moment on, and from each later one that was
            planned for a look, too, and came meanwhile; 0 where that is not known.
    """

    thread: int
    start_ns: int
    end_ns: int
    stack: Stack
    cpu_ns: int | None = None
    late_ns: int = 0
    in_bytecode: bool | None = None
    process_ns: int | None = None
    others: tuple[tuple[int, Stack], ...] = ()
    ready_ns: int | None = None
    asleep: Asleep | None = None
    held_ns: tuple[int, ...] = (0,)


class ActivityKind(StrEnum):
    """The kind of a device's activity."""

    KERNEL = "kernel"
    COPY = "copy"
    MEMSET = "memset"
    COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True)
class Activity:
    """A kernel, copy, memset or collective on a device.

    Attributes:
        start_ns: Begin.
        end_ns: End.
        stream: On which stream.
        kind: What it was.
        name: As the device's profiler has it.
        launch: Number of the call that launched it (CUPTI's correlation id); ``None`` where that is not known.
        graph: Number of the CUDA graph it belongs to; ``None`` outside of one.
        is_pageable: Of a copy: one of its ends is host memory that is not pinned.
        num_bytes: Of a copy.
    """

    start_ns: int
    end_ns: int
    stream: int = 0
    kind: ActivityKind = ActivityKind.KERNEL
    name: str = ""
    launch: int | None = None
    graph: int | None = None
    is_pageable: bool = False
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LaunchCall:
    """A call that gave work to the device.

    Attributes:
        number: Its correlation id.
        thread: Of the caller.
        start_ns: Begin of the call.
        end_ns: End of the call.
        name: ``cudaLaunchKernel``, ``cudaGraphLaunch``, ...
        stack: Where from, if that is known.
        module: The module of the user's model that it belongs to, such as ``layer1.conv2``; empty if that is not known.
    """

    number: int
    thread: int
    start_ns: int
    end_ns: int
    name: str = "cudaLaunchKernel"
    stack: Stack = ()
    module: str = ""


@dataclass(frozen=True, slots=True)
class StreamWait:
    """A stream was told to wait for another one's event; ``at_ns`` is the host's time of the call."""

    at_ns: int
    stream: int
    on_stream: int


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """The time from the end of one optimizer step (or batch) to the next."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened at a moment: a recompilation and its guard, a graph break and its reason.

    Attributes:
        cause: ``COMPILE`` or ``GRAPH_BREAK``.
        at_ns: When; 0 if that is not known.
        site: The user's line.
        text: Guard or reason.
    """

    cause: Cause
    at_ns: int
    site: Site | None
    text: str


@dataclass(frozen=True, slots=True)
class Loader:
    """A loader that was iterated.

    Attributes:
        num_workers: Its worker processes.
        batch_ns: Median time that a worker, or without any the process itself, takes for a batch; 0 where
            that is not known.
        num_batches: Batches that workers have made.
        site: Where its data set makes an item.
        batch_ran_ns: What of the time for a batch some processor ran for it; ``None`` where that is not known.
        batch_queued_ns: What of it the worker was ready, and no processor was free.
    """

    num_workers: int
    batch_ns: int = 0
    num_batches: int = 0
    site: Site | None = None
    batch_ran_ns: int | None = None
    batch_queued_ns: int = 0


@dataclass(frozen=True)
class Recording:
    """All that was seen of one process.

    Attributes:
        script: What ran, in a word.
        device: Name of the device.
        is_synchronous: The host computes itself: there is no queue, and ``activities`` come from samples.
        start_ns: Begin.
        end_ns: End.
        thread: The thread that trains.
        steps: In order; none overlaps another.
        spans: Of all threads.
        samples: Of the training thread, in order.
        activities: On the device.
        launches: Calls that started them.
        waits: Of streams for each other.
        notes: Recompilations and graph breaks.
        loaders: Those that were iterated.
        num_cores: Processors that the process may use.
        switch_ns: How long a thread may keep the interpreter while others want it.
        library_roots: Folders whose files are not the user's.
        cost_share: What looking cost, as a share of the time.
        always_on_share: The same of hooks and samples alone, but for the steps under the device's profiler.
        looking_slowed: By what part of a step it was longer while the device's profiler was on; ``None`` if not known.
        looking_taken_ns: What of that has been taken out of the times already, at each launch.
        later_step_ns: Mean length of the steps after those that the device's profiler saw; ``None`` if not known.
        caveats: What could not be seen, in sentences.
        rank: Which process of several that train together; 0 of one alone.
        first_step: How many steps of the run came before the first of ``steps``.
        unix_minus_clock_ns: Unix time when the recording's clock is 0.
        has_steps: ``steps`` are the loop's; else they are slices of time, because none was seen.
        is_complete: Whether that leaves enough for a diagnosis; else the first caveat says why not.
    """

    script: str = ""
    device: str = "CPU"
    is_synchronous: bool = True
    start_ns: int = 0
    end_ns: int = 0
    thread: int = 0
    steps: tuple[ProfiledStep, ...] = ()
    spans: tuple[HostSpan, ...] = ()
    samples: tuple[Sample, ...] = ()
    activities: tuple[Activity, ...] = ()
    launches: tuple[LaunchCall, ...] = ()
    waits: tuple[StreamWait, ...] = ()
    notes: tuple[Note, ...] = ()
    loaders: tuple[Loader, ...] = ()
    num_cores: int = 1
    switch_ns: int = 5_000_000
    library_roots: tuple[str, ...] = field(default_factory=tuple)
    cost_share: float | None = None
    always_on_share: float | None = None
    looking_slowed: float | None = None
    looking_taken_ns: int = 0
    later_step_ns: float | None = None
    caveats: tuple[str, ...] = ()
    rank: int = 0
    first_step: int = 0
    unix_minus_clock_ns: int = 0
    has_steps: bool = True
    is_complete: bool = True

    def user_site(self, stack: Stack) -> Site | None:
        """The innermost line that is the user's own; the outermost there is where none is.

        What runs a script, and what called that, is none of its lines.
        """
        outermost = None
        for site in stack:
            if site.file.endswith(RUNNERS):
                break
            if not self.is_library(site.file):
                return site
            outermost = site if not site.file.startswith("<") else outermost
        return outermost

    def knows_line(self, stack: Stack) -> bool:
        """Return whether any of the lines is the user's."""
        site = self.user_site(stack)
        return site is not None and not self.is_library(site.file)

    def is_library(self, file: str) -> bool:
        """Return whether a file belongs to Python, an installed package, or no file at all."""
        return file.startswith(("<", *self.library_roots)) or any(each in file for each in PACKAGES)
