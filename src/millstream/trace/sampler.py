"""Looks at every Python thread some hundred times a second: where it is, and how long it has run since.

The sampler is a Python thread itself, so it waits for the interpreter like any other. How long it waits tells who keeps
the interpreter: operators give it away at once, Python code only when it is taken away.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from millstream.heap import frames_of_threads
from millstream.insight import Asleep, Sample, Site
from millstream.trace.agenda import Agenda
from millstream.trace.frames import RawStack, Stacks, is_between_instructions, sites_of

HERTZ, NUM_FIRST = 250, 5_000
"""So often at first, for twenty seconds, where a look takes 20 to 80 µs, as the processor's caches are."""
HERTZ_LATER = 50
"""After that, so that a long run is slowed by less than half a percent."""
FIRST_NS = 10_000_000
MOST_SHARE, NUM_PRICED = 0.005, 16
"""Of the time: looks become rarer where they take more of it. What they take is measured every so many looks; before
that they are made every ten milliseconds."""
MAX_LOOKS = 150_000  # most of an hour; of a longer run the last ones are kept
MAX_THREADS = 16  # looked at in one look, the main thread first
_LOCKS = {"x86_64": frozenset((b"202", b"449")), "aarch64": frozenset((b"98", b"449"))}
"""Numbers of the system calls in which a thread waits for a lock (futex, futex_waitv)."""
_RUNTIME_BYTES = 1 << 20  # of Python's own state, which holds its lock: 0.2 MB in 3.11, 0.6 in 3.12
WAKING_NS = 60_000  # what a thread that sleeps wakes up late by, as Linux has it
KEPT = 0.9  # of the time: a thread that ran less of it was kept waiting, and one asks the system for what


class ThreadLook(NamedTuple):
    """A thread at one moment; what it has run in its life and been ready to run; -1 where the system does not say."""

    ident: int
    stack: RawStack
    cpu_ns: int
    ready_ns: int
    asleep: Asleep | None


class Look(NamedTuple):
    """All threads at one moment, ``late_ns`` after it was planned.

    ``held_ns`` says how long somebody held the interpreter from that moment on, and from each later one that was
    planned for a look, too, and came meanwhile.
    """

    at_ns: int
    late_ns: int
    held_ns: tuple[int, ...]
    process_ns: int
    threads: tuple[ThreadLook, ...]


class Sampler:
    """A daemon thread that looks until it is stopped.

    Args:
        on_look: Called now and then in the sampler's thread.

    Attributes:
        looks: What it saw.
        is_hurried: Set it for steps that matter: looks are as frequent then as they can be.
        busy_ns: Its own time.
        hurried_ns: What of that it took while it was hurried.
    """

    def __init__(self, on_look: Callable[[], None] | None = None) -> None:
        self.looks: deque[Look] = deque(maxlen=MAX_LOOKS)
        self.busy_ns = self.hurried_ns = 0
        self.is_hurried = False
        self._on_look = on_look
        self._stopped = threading.Event()
        self._stacks = Stacks()
        self._latest: dict[int, tuple[int, ThreadLook]] = {}  # by thread: when it was looked at, and what was seen
        self._native_of: dict[int, int] = {}
        self._files: dict[tuple[int, str], int] = {}  # by number of the thread, and name: what the system says of it
        self._tells = {name for name in ("schedstat", "syscall") if Path("/proc/self", name).is_file()}
        self._locks = _LOCKS.get(platform.machine(), frozenset())
        self._interpreter = _addresses_of_interpreter()
        self._text = ctypes.create_string_buffer(128)
        self._pread = ctypes.PyDLL(None).pread if self._tells else None
        self._thread = threading.Thread(target=self._run, name="millstream-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a forked child has no sampler to wait for."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _run(self) -> None:
        usual_ns, num_looks = FIRST_NS, 0
        mine, began_ns = threading.get_ident(), time.thread_time_ns()
        agenda = Agenda(time.perf_counter_ns(), usual_ns)
        while not self._stopped.is_set():
            begin, waited_ns = time.perf_counter_ns(), self._ready_ns(mine)
            agenda.skip_to(begin)
            if agenda.due_ns > begin:
                time.sleep((agenda.due_ns - begin) / 1e9)
                if self._stopped.is_set():
                    break
            now, before_ns = time.perf_counter_ns(), time.thread_time_ns()
            late_ns, own_ns = now - agenda.due_ns, self._ready_ns(mine) - waited_ns + WAKING_NS  # for a processor
            held_ns = agenda.take(now - own_ns if waited_ns >= 0 else 0)
            self.looks.append(self._look(mine, now, late_ns, held_ns))
            num_looks += 1
            if self.is_hurried:
                self.hurried_ns += time.thread_time_ns() - before_ns
            self.busy_ns = time.thread_time_ns() - began_ns
            if num_looks % NUM_PRICED == 0:
                price_ns = self.busy_ns / num_looks
                hertz = HERTZ if num_looks < NUM_FIRST else HERTZ_LATER
                usual_ns = max(1_000_000_000 // hertz, round(price_ns / MOST_SHARE))
            if self._on_look is not None:
                self._on_look()
            agenda.interval_ns = 1_000_000_000 // HERTZ if self.is_hurried else usual_ns

    def _look(self, mine: int, now: int, late_ns: int, held_ns: tuple[int, ...]) -> Look:
        with frames_of_threads() as frames:
            frames.pop(mine, None)
            if len(frames) > MAX_THREADS:
                main = threading.main_thread().ident
                frames = dict(sorted(frames.items(), key=lambda item: item[0] != main)[:MAX_THREADS])
            threads = [self._look_at(ident, frame, now) for ident, frame in frames.items()]
        if len(self._latest) > 2 * MAX_THREADS or len(self._files) > 4 * MAX_THREADS:
            self._forget_all_but(frames)
        frames.clear()
        return Look(now, late_ns, held_ns, time.process_time_ns(), tuple(threads))

    def _forget_all_but(self, idents: Collection[int]) -> None:
        """Threads come and go, and each has an open file."""
        self._latest = {ident: self._latest[ident] for ident in idents if ident in self._latest}
        natives = {self._native_of.get(ident) for ident in idents}
        for key in [each for each in self._files if each[0] not in natives]:
            os.close(self._files.pop(key))

    def _look_at(self, ident: int, frame: FrameType, now: int) -> ThreadLook:
        """A thread that has not run since is where it was; one that has run all the time was not kept waiting."""
        ran_ns = self._ran_ns(ident)
        before_ns, before = self._latest.get(ident, (0, None))
        has_rested = before is not None and ran_ns == before.cpu_ns >= 0 and frame.f_lasti == before.stack[0][1]
        if before is not None and has_rested and before.asleep is not Asleep.AWAKE:
            return before
        stack = self._stacks.take(frame)
        was_kept = before is None or ran_ns < 0 or ran_ns - before.cpu_ns < KEPT * (now - before_ns)
        ready_ns = self._ready_ns(ident) if was_kept or before is None else before.ready_ns
        look = ThreadLook(ident, stack, ran_ns, ready_ns, self._sleeps_in(ident) if was_kept else Asleep.AWAKE)
        self._latest[ident] = now, look
        return look

    def _ran_ns(self, ident: int) -> int:
        """Time that a thread has run. Linux names a thread's clock by its number; asking for a dead one is an error."""
        for _ in range(2):
            native = self._native_of.get(ident)
            if native is not None:
                try:
                    return time.clock_gettime_ns((~native << 3) | 6)
                except OSError:
                    pass
            threads = threading.enumerate()
            self._native_of = {each.ident: each.native_id for each in threads if each.ident and each.native_id}
        return -1

    def _ready_ns(self, ident: int) -> int:
        """Time that a thread was ready and had no processor, on kernels that count it."""
        told = self._ask(ident, "schedstat")
        return int(told[1]) if len(told) > 1 else -1

    def _sleeps_in(self, ident: int) -> Asleep | None:
        """Return whether a thread sleeps, and in which system call: the system writes its number, or ``running``."""
        told = self._ask(ident, "syscall")
        if not told or not self._locks or not self._interpreter:
            return None
        if told[0] in (b"running", b"-1"):
            return Asleep.AWAKE
        if told[0] not in self._locks:
            return Asleep.CALL
        return Asleep.INTERPRETER if int(told[1], 16) in self._interpreter else Asleep.LOCK

    def _ask(self, ident: int, name: str) -> list[bytes]:
        """The words of a file that the system has for each thread; none where it has none, or the thread has ended."""
        native = self._native_of.get(ident, -1)
        if name not in self._tells or self._pread is None:
            return []
        try:
            if (native, name) not in self._files:
                self._files[native, name] = os.open(f"/proc/self/task/{native}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return []
        # Not by os.pread, which gives the interpreter away: a thread that waits for it would be awake by the time of
        # reading.
        size = self._pread(self._files[native, name], self._text, len(self._text), 0)
        return self._text.raw[: max(size, 0)].split()


def _addresses_of_interpreter() -> range:
    """Return where Python's global lock lies; empty where that cannot be determined."""
    try:
        begin = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    except (ValueError, AttributeError):
        return range(0)
    return range(begin, begin + _RUNTIME_BYTES)


def cpu_ns_of_threads(looks: Sequence[Look]) -> dict[int, int]:
    """Return how long each thread ran from the first look to its last one.

    A thread that has begun since, from its start.
    """
    sees_all = bool(looks) and len(looks[0].threads) < MAX_THREADS
    ran: dict[int, tuple[int, int]] = {}
    for look in looks:
        for each in (each for each in look.threads if each.cpu_ns >= 0):
            first_ns = 0 if sees_all and look is not looks[0] else each.cpu_ns
            ran[each.ident] = (ran.get(each.ident, (first_ns,))[0], each.cpu_ns)
    return {ident: last_ns - first_ns for ident, (first_ns, last_ns) in ran.items()}


def samples_of(looks: Iterable[Look], thread: int) -> list[Sample]:
    """Return what the looks say of one thread, each for the time since the one before."""
    found: list[Sample] = []
    before: Look | None = None
    ran: dict[int, int] = {}
    ready = -1
    for look in looks:
        mine = next((each for each in look.threads if each.ident == thread), None)
        if before is not None and mine is not None and thread in ran:
            cpu_ns = mine.cpu_ns - ran[thread] if mine.cpu_ns >= 0 and ran[thread] >= 0 else None
            others: list[tuple[int, tuple[Site, ...]]] = [
                (each.cpu_ns - ran[each.ident], sites_of(each.stack))
                for each in look.threads
                if each.ident != thread and each.cpu_ns - ran.get(each.ident, each.cpu_ns) > 100_000
            ]
            found.append(
                Sample(
                    thread,
                    before.at_ns,
                    look.at_ns,
                    sites_of(mine.stack),
                    cpu_ns,
                    look.late_ns,
                    is_between_instructions(*mine.stack[0]) if mine.stack else None,
                    look.process_ns - before.process_ns,
                    tuple(others),
                    mine.ready_ns - ready if min(mine.ready_ns, ready) >= 0 else None,
                    mine.asleep,
                    look.held_ns,
                )
            )
        ready = mine.ready_ns if mine is not None else -1
        before, ran = look, {each.ident: each.cpu_ns for each in look.threads}
    return found
