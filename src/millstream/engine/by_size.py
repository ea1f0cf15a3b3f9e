"""A symbolic program: one text for all sizes, and an executable for each size that is called often.

**Contract**
- The first calls with a size run the kernels one after another, from a text in which the sizes are left open. A new
  size costs nothing then. On a GPU they do so while no other thread captures, tries or replays, as serial runs of
  other programs do.
- A size that comes again gets an executable: the checked plan of its concrete program. The first of them is planned as
  the user asked, and others wait for that; they take its order and streams, and nothing is measured for them. On a GPU
  they are captured at once.
- Executables have one arena in turn, as large as the largest needs, as far as nothing in it outlives a call: not those
  of a forward pass, whose backward pass reads what it has saved. On a CPU a call that finds it taken, as one of another
  thread may, runs from the open text. On a GPU it is there for calls on one stream, and no more once a second comes.
- Executables are bounded in number, in kernels and in bytes that they hold for themselves; the one unused for longest
  goes. Where they go soon, they are made later.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from millstream.check import check_plan
from millstream.device import context, guard
from millstream.engine.arena import Arena
from millstream.engine.assembly import OneOfMany
from millstream.engine.engine import Engine
from millstream.engine.plan_source import CompiledPlan, compile_plan
from millstream.locks import ForkSafeLock
from millstream.lower import Lowered, LoweredForSizes
from millstream.schedule import plan_serial

MOST_SIZES = 512
"""So many sizes of a program have executables: one for each token of a text of middling length."""
MOST_KERNELS = 36_000
"""So many kernels are in these: a driver takes about 10 KiB for each kernel of a CUDA graph, and so 370 MiB for all."""
MOST_BYTES = 256 << 20
"""So much all but the largest may take for temporaries and outputs, beside the arena."""
OPEN_CALLS = {"cpu": 7, "cuda": 1}
"""So many calls with a size are run from the open text: on a CPU an executable is hardly quicker."""
MOST_COUNTED = 4096
"""So many sizes are counted before all counts start again."""
PATIENCE = 4
"""So many more calls with a size wait for the plan of another one."""

NO_PLAN = "this size has no plan of its own yet: its kernels run one after another, from a text for all sizes"

#: Makes the executable of a concrete program. Programs with the same key belong together, as forward and backward.
Build = Callable[[Lowered, Hashable, OneOfMany], Engine]


class OpenEngine(Engine):
    """Runs the kernels of a symbolic program one after another, at any size.

    Args:
        symbolic: What to run.
        sizes: Of a call, at which ``lowered`` and ``plan`` are shown.
        notes: What it is to say of itself.
    """

    name = "serial"

    def __init__(self, symbolic: LoweredForSizes, sizes: tuple[int, ...], notes: Iterable[str]) -> None:
        lowered = symbolic.at(sizes)
        super().__init__(lowered, plan_serial(lowered.program.graph))
        check_plan(self.plan)
        self.notes += notes
        self._place = next((name for name in sorted(self.lowered.program.devices) if name != "cpu"), "cpu")
        program = symbolic.program
        self._run: CompiledPlan = compile_plan(program.open_at(sizes), self.plan, numbers=program)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self._place == "cpu":
            return self._run(inputs)
        with context(self._place).graphs.lock, guard(self._place):
            return self._run(inputs)


@dataclass(slots=True)
class _Entry:
    executable: Engine
    peak_bytes: int
    calls: int

    @property
    def own_bytes(self) -> int:
        """What it takes beside the arena."""
        return 0 if self.executable.shares_memory else self.peak_bytes


class BySize(ForkSafeLock):
    """Runs a symbolic program.

    Args:
        lowered: What to run.
        build: Makes executables.
        at_once: Whether each size gets one in its first call: the user wants a certain engine.

    Attributes:
        arena: Memory of all executables.
        notes: What each executable is to say of itself.
    """

    def __init__(self, lowered: LoweredForSizes, build: Build, *, at_once: bool) -> None:
        super().__init__()  # one thread at a time makes executables; calls run side by side
        self._lowered, self._build = lowered, build
        self._sizes = lowered.program.sizes
        self.arena, self.notes = Arena(), list[str]()
        self._thread = threading.local()  # has ``ran``: sizes with which it has run the open text
        self._entries: OrderedDict[tuple[int, ...], _Entry] = OrderedDict()
        self._first: Engine | None = None
        self._open: Engine | None = None
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._least_open_calls = 0 if at_once else OPEN_CALLS.get(lowered.program.device_type, 1)
        self._open_calls = self._least_open_calls

    def __call__(self, inputs: list[Any]) -> list[Any]:
        sizes = self._sizes(inputs)
        with self.lock:
            executable = self._find(sizes)
        if self._lowered.program.device_type != "cpu" or executable is self._open:
            return executable(inputs)
        lock = self.arena.lock
        if not lock.acquire(blocking=False):
            return self._open_engine(sizes)(inputs)
        try:
            return executable(inputs)
        finally:
            lock.release()

    def __iter__(self) -> Iterator[Engine]:
        with self.lock:
            made = [entry.executable for entry in self._entries.values()]
            return iter(made or [self._open] if self._open is not None else made)

    def calls(self) -> list[tuple[tuple[int, ...], int, Engine]]:
        """The sizes that have executables: values of the program's symbols, how many calls had them, and those."""
        with self.lock:
            return [(sizes, entry.calls, entry.executable) for sizes, entry in self._entries.items()]

    def open_calls(self) -> list[tuple[tuple[int, ...], int]]:
        """The sizes that have none yet, and how many calls had them, the most frequent first."""
        with self.lock:
            return [(sizes, calls) for sizes, calls in self._counts.most_common() if sizes not in self._entries]

    def open_at(self, sizes: tuple[int, ...]) -> Engine:
        """Return what runs a size that has no executable, to be looked at."""
        with self.lock:
            return OpenEngine(self._lowered, sizes, [*self.notes, NO_PLAN])

    def release(self) -> None:
        """Give back the memory that is held between calls."""
        for executable in self:
            executable.release()

    def _find(self, sizes: tuple[int, ...]) -> Engine:
        entry = self._entries.get(sizes)
        if entry is not None:
            self._entries.move_to_end(sizes)
            entry.calls += 1
            return entry.executable
        waits = 0 if self._first is None or self._first.is_settled or not self._least_open_calls else PATIENCE
        if self._counts[sizes] >= self._open_calls + waits:
            return self._make(sizes)
        if len(self._counts) > MOST_COUNTED:
            self._counts.clear()
            self._open_calls = self._least_open_calls
        self._counts[sizes] += 1
        return self._open_engine(sizes)

    def _open_engine(self, sizes: tuple[int, ...]) -> Engine:
        with self.lock:
            if self._open is None:
                self._open = OpenEngine(self._lowered, sizes, self.notes)
        ran = self._thread.__dict__.setdefault("ran", set())
        if len(ran) > MOST_COUNTED:
            ran.clear()
        ran.add(sizes)
        return self._open

    def _make(self, sizes: tuple[int, ...]) -> Engine:
        like = self._first if self._first is not None and self._first.is_settled else None
        key = frozenset(zip(self._lowered.program.symbols, sizes, strict=True))
        is_warm = like is not None and sizes in self._thread.__dict__.get("ran", ())
        executable = self._build(self._lowered.at(sizes), key, OneOfMany(self.arena, like, is_warm))
        executable.notes.extend(self.notes)
        self._first = like or executable
        self._entries[sizes] = _Entry(executable, executable.peak_bytes, self._counts[sizes] + 1)
        self._release_oldest()
        return executable

    def _release_oldest(self) -> None:
        numbers = [entry.own_bytes for entry in self._entries.values()]
        total, largest = sum(numbers), max(numbers)
        kernels = sum(entry.executable.num_kernels for entry in self._entries.values())
        while len(self._entries) > 1 and (
            len(self._entries) > MOST_SIZES or kernels > MOST_KERNELS or total > largest + MOST_BYTES
        ):
            sizes, oldest = self._entries.popitem(last=False)
            total -= oldest.own_bytes
            kernels -= oldest.executable.num_kernels
            oldest.executable.release()
            del self._counts[sizes]
            self._open_calls = min(2 * self._open_calls, MOST_COUNTED)
