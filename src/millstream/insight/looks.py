"""What one look at a thread, a sample, tells of the time since the look before.

Whether a thread ran Python or an operator is told from what Python does anyway: an operator gives the interpreter away,
so that the sampler gets it at once; Python code has to be interrupted, which takes ``switch_ns`` and leaves the thread
between two instructions.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from millstream.insight.intervals import Interval, total
from millstream.insight.records import Asleep, Recording, Sample, Stack, State

_LATE = 0.8  # of the switch interval: the sampler had to have the interpreter taken away from somebody
_RUNS = 0.5  # of a time: whoever ran so much of it was running
_HOLDS = 0.2  # of the time that a thread was kept: another one that ran so much of it held the interpreter
FAR_NS = 1_000_000_000  # time that no look speaks for within so long is unknown
_WORTH = 0.1  # of a sample's time: less than that is noise of two clocks
_IO_FILES = (
    "torch/serialization.py",
    "/pickle.py",
    "/zipfile.py",
    "/zipfile/",
    "/logging/",
    "/tensorboard/",
    "/wandb/",
)
_TORCH = ("/torch/",)
_WAITS_FOR_OTHERS = ("/threading.py", "/queue.py", "/selectors.py", "/multiprocessing/", "/subprocess.py", "/socket.py")
_UNSEEN = "no look saw what it waited for"
_UNTOLD = "it waited for a lock while threads of operators ran: that may be one's own lock, or theirs"


@dataclass(frozen=True, slots=True)
class Doing:
    """A stretch of the training thread's time in one state.

    Attributes:
        start_ns: Begin.
        end_ns: End.
        state: What it did.
        stack: Where.
        detail: For ``GIL``, the other thread's place in words.
    """

    start_ns: int
    end_ns: int
    state: State
    stack: Stack
    detail: str = ""


def split_sample(sample: Sample, free: Sequence[Interval], recording: Recording) -> Iterator[Doing]:
    """Say what a thread did in the time that one sample speaks for, where nothing tells whether it slept at the look.

    Args:
        sample: The look.
        free: The parts of the time since the look before in which no hook saw the thread; they are covered exactly.
        recording: Which it is of.
    """
    length = total(free)
    running = running_state(sample, recording.switch_ns)
    ran_ns = _ran_ns(sample, length)
    kept, detail = _kept_state(sample, length - ran_ns, running, recording) if ran_ns < length else (running, "")
    return _lay_out(free, [(ran_ns, running, sample.stack, ""), (length - ran_ns, kept, sample.stack, detail)])


Part = tuple[int, State, Stack, str]
"""Nanoseconds, and what a thread did in them."""


def _lay_out(free: Sequence[Interval], parts: Iterable[Part]) -> Iterator[Doing]:
    """Put parts one after another into intervals, which they cover exactly."""
    pending = [part for part in parts if part[0]]
    for start, end in free:
        while start < end:
            left, state, stack, detail = pending[0]
            until = min(start + left, end)
            yield Doing(start, until, state, stack, detail)
            if until - start == left:
                pending.pop(0)
            else:
                pending[0] = left - (until - start), state, stack, detail
            start = until


def _ran_ns(sample: Sample, length: int) -> int:
    ran_ns = length if sample.cpu_ns is None else min(max(sample.cpu_ns, 0), length)
    return length if length - ran_ns < _WORTH * length else ran_ns


class Evidence:
    """The looks that saw a thread awake, and those that saw it asleep: the nearest one tells what another does not.

    A thread that waits for the interpreter while no other thread of Python's runs waits for the sampler's own look.

    Args:
        samples: Of the training thread, outside of hooks' spans, in order.
        recording: Which they are of.
    """

    def __init__(self, samples: Sequence[Sample], recording: Recording) -> None:
        self._recording = recording
        self._awake = [each for each in samples if each.asleep in (Asleep.AWAKE, Asleep.INTERPRETER)]
        self._asleep = [each for each in samples if self.is_asleep(each)]

    def is_asleep(self, look: Sample) -> bool:
        """Return whether a thread slept when it was looked at, and not because of that."""
        return look.asleep in (Asleep.LOCK, Asleep.CALL) or (
            look.asleep is Asleep.INTERPRETER and _holder(look, _slept_ns(look), self._recording) is not None
        )

    def split(self, sample: Sample, free: Sequence[Interval]) -> Iterator[Doing]:
        """Return what a thread did in the time that one sample speaks for."""
        length = total(free)
        ran_ns = _ran_ns(sample, length)
        ready_ns = min(max(sample.ready_ns or 0, 0), length - ran_ns)
        slept_ns = length - ran_ns - ready_ns
        if ready_ns and slept_ns < _WORTH * length:
            ready_ns, slept_ns = length - ran_ns, 0
        elif ready_ns < _WORTH * length:
            ready_ns, slept_ns = 0, length - ran_ns
        awake = _nearest(self._awake, sample) or sample
        running = running_state(awake, self._recording.switch_ns)
        parts = [
            (ran_ns, running, awake.stack, ""),
            (ready_ns, State.DESCHEDULED, awake.stack, str(State.PYTHON) if running is State.PYTHON else ""),
            (slept_ns, *self.sleep(sample)),
        ]
        # At its end it did what the look saw.
        return _lay_out(free, parts if self.is_asleep(sample) else parts[::-1])

    def sleep(self, sample: Sample) -> tuple[State, Stack, str]:
        """Return what a thread slept for in the time of a sample."""
        look = _nearest(self._asleep, sample)
        if look is None:
            return State.UNKNOWN, sample.stack, _UNSEEN
        state, detail = _sleeping_state(look, self._recording)
        return state, look.stack, detail


def _nearest(looks: Sequence[Sample], sample: Sample) -> Sample | None:
    """The look that was made closest to a sample's, which may be its own; ``None`` if it is far away."""
    at = bisect.bisect_left(looks, sample.end_ns, key=lambda each: each.end_ns)
    near = min(looks[max(at - 1, 0) : at + 1], key=lambda each: abs(each.end_ns - sample.end_ns), default=None)
    return near if near is not None and abs(near.end_ns - sample.end_ns) <= FAR_NS else None


def _slept_ns(look: Sample) -> int:
    length = look.end_ns - look.start_ns
    return length - _ran_ns(look, length)


def _sleeping_state(look: Sample, recording: Recording) -> tuple[State, str]:
    """Return what a thread slept for when it was looked at."""
    innermost = look.stack[0].file if look.stack else ""
    if running_state(look, recording.switch_ns) is State.IO:
        return State.IO, ""
    if look.asleep is Asleep.INTERPRETER:
        return State.GIL, _holder(look, _slept_ns(look), recording) or ""
    if look.asleep is Asleep.CALL or any(part in innermost for part in _WAITS_FOR_OTHERS):
        return State.WAITING, ""
    native_ns = (look.process_ns or 0) - (look.cpu_ns or 0) - sum(ran for ran, _ in look.others)
    if native_ns < _RUNS * _slept_ns(look):
        return State.WAITING, ""
    # An operator's own threads compute, and this one waits for them; or they spin, and the lock is the user's own.
    return (State.COMPUTE, "") if recording.is_library(innermost) else (State.UNKNOWN, _UNTOLD)


def _holder(sample: Sample, kept_ns: int, recording: Recording) -> str | None:
    """Return where another Python thread was that held the interpreter; ``None`` where none did."""
    busiest = max(sample.others, key=lambda other: other[0], default=None)
    was_taken = _was_interrupted(sample, recording.switch_ns) or sample.late_ns >= _LATE * recording.switch_ns
    was_taken |= sample.asleep is Asleep.INTERPRETER
    if busiest is None or busiest[0] < _HOLDS * kept_ns or not was_taken:
        return None
    where = recording.user_site(busiest[1])
    return f"{where.file}:{where.line}" if where else ""


def running_state(sample: Sample, switch_ns: int) -> State:
    """Return what a thread did when it was looked at, if it ran."""
    innermost = sample.stack[0].file if sample.stack else ""
    if any(part in site.file for site in sample.stack[:12] for part in _IO_FILES):
        return State.IO
    was_interrupted = _was_interrupted(sample, switch_ns)
    # Python within torch is part of an operator's cost, and no code that the user could write otherwise.
    return State.PYTHON if was_interrupted and not any(part in innermost for part in _TORCH) else State.COMPUTE


def _was_interrupted(sample: Sample, switch_ns: int) -> bool:
    """Return whether somebody had to have the interpreter taken away for the sampler to get it."""
    return sample.late_ns >= _LATE * switch_ns if sample.in_bytecode is None else sample.in_bytecode


def _kept_state(sample: Sample, kept_ns: int, running: State, recording: Recording) -> tuple[State, str]:
    """Return what kept a thread from running for ``kept_ns``."""
    length = sample.end_ns - sample.start_ns
    innermost = sample.stack[0].file if sample.stack else ""
    if running is State.IO:
        return State.IO, ""
    waits = any(part in innermost for part in _WAITS_FOR_OTHERS)
    other = None if waits else _holder(sample, kept_ns, recording)
    if other is not None:
        return State.GIL, other
    if waits:
        return State.WAITING, ""
    if sample.ready_ns is not None and sample.ready_ns >= _RUNS * kept_ns:
        return State.DESCHEDULED, str(State.PYTHON) if running is State.PYTHON else ""
    native_ns = (sample.process_ns or 0) - (sample.cpu_ns or 0) - sum(other[0] for other in sample.others)
    if native_ns >= _RUNS * length:
        return State.COMPUTE, ""  # an operator's own threads compute, and this one waits for them
    # Between two instructions a thread does not wait: it had no processor, which the system did not say.
    return (running if _was_interrupted(sample, recording.switch_ns) else State.WAITING), ""


def others_held(look: Sample) -> bool:
    """Return whether other threads of Python's ran enough to have held the interpreter."""
    return sum(ran for ran, _ in look.others) >= _HOLDS * (look.end_ns - look.start_ns)
