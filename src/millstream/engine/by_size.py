"""One executable for each size that a symbolic program is called with.

**Contract**
- Every call runs a checked plan of the concrete program for its sizes.
- Executables are bounded in number and in bytes of temporaries and outputs; the one unused for longest goes.
- The first size is planned as the user asked. Others take as many streams as the first was found to want, and are not
  measured; one that is used often is looked at again, for by then the first may have been.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from millstream.engine.build import Executable
from millstream.locks import ForkSafeLock
from millstream.lower import Lowered, LoweredForSizes

MOST_SIZES = 64
"""So many sizes of a program are kept ready."""
MOST_BYTES = 256 << 20
"""So much all but the largest may take for temporaries and outputs."""
OFTEN = 8
"""At so many calls with one size its number of streams is looked at again."""

#: Makes the executable of a concrete program. Programs with the same key belong together, as forward and backward; the
#: number of streams is ``None`` where the user's settings hold.
Build = Callable[[Lowered, Hashable, int | None], Executable]


@dataclass(slots=True)
class _Entry:
    executable: Executable
    num_bytes: int
    num_calls: int = 0


class BySize(ForkSafeLock):
    """Runs a symbolic program: makes it concrete for each new size, and keeps what it has made.

    Args:
        lowered: What to run.
        build: Makes executables.
    """

    def __init__(self, lowered: LoweredForSizes, build: Build) -> None:
        super().__init__()  # one thread at a time makes executables; those of different sizes run side by side
        self._lowered, self._build = lowered, build
        self._sizes = lowered.program.sizes
        self._entries: OrderedDict[tuple[int, ...], _Entry] = OrderedDict()
        self._first: Executable | None = None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        sizes = self._sizes(inputs)
        with self.lock:
            entry = self._entries.get(sizes)
            if entry is None:
                entry = self._make(sizes)
            else:
                self._entries.move_to_end(sizes)
                entry.num_calls += 1
                if entry.num_calls == OFTEN:
                    self._look_again(sizes, entry)
        return entry.executable(inputs)

    def __iter__(self) -> Iterator[Executable]:
        with self.lock:
            return iter([entry.executable for entry in self._entries.values()])

    def release(self) -> None:
        """Give back the memory that is held between calls."""
        for executable in self:
            executable.release()

    def _make(self, sizes: tuple[int, ...]) -> _Entry:
        num_streams = None if self._first is None else self._first.num_streams
        executable = self._build(self._lowered.at(sizes), self._key(sizes), num_streams)
        self._first = self._first or executable
        entry = self._entries[sizes] = _Entry(executable, executable.peak_bytes)
        self._release_oldest()
        return entry

    def _look_again(self, sizes: tuple[int, ...], entry: _Entry) -> None:
        first = self._first
        if first is None or entry.executable is first or first.num_streams == entry.executable.num_streams:
            return
        before, entry.executable = (
            entry.executable,
            self._build(entry.executable.lowered, self._key(sizes), first.num_streams),
        )
        before.release()

    def _key(self, sizes: tuple[int, ...]) -> Hashable:
        return frozenset(zip(self._lowered.program.symbols, sizes, strict=True))

    def _release_oldest(self) -> None:
        numbers = [entry.num_bytes for entry in self._entries.values()]
        total, largest = sum(numbers), max(numbers)
        while len(self._entries) > MOST_SIZES or (len(self._entries) > 1 and total > largest + MOST_BYTES):
            _, oldest = self._entries.popitem(last=False)
            total -= oldest.num_bytes
            oldest.executable.release()
