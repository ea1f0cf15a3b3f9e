"""Exchange small messages between the processes of one host through shared memory: microseconds, no device.

**Contract**
- ``gather`` is a barrier: each process gives a number and gets those of all.
- Who waits for another gives up at the timeout, or as soon as that process has ended, with an error that names it.
- Who cannot go on says so, and all others hear it where they wait.
- Nothing is left behind, however the processes end: the file has no name any more once all have opened it.

When a process came to a round lies beside it, on the clock that all processes of a host share.

Each number lies in one word with that of its round, so that a torn or an old one is never taken for it. There are two
sets of words in turn: a process is in the next round only when all have written in this one, and in the one after that
only when all have read it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from millstream.errors import DataParallelError

_VALUE_BITS = 44
"""Of a word. The rest, without the sign, counts rounds; their number is even, as there are two sets of words."""
_NUM_ROUNDS = 1 << (63 - _VALUE_BITS)
MOST = (1 << _VALUE_BITS) - 2
"""The greatest number that can be told: in ns almost five hours."""
_FAILED = MOST + 1

_SETS = 9
"""Of words, one for each process: two of numbers in turn, ids of processes, what is noted, two of times in turn, who
has come to meet, (the first process's) what has been decided of that, and how many exchanges have begun."""

UNEVEN = (
    "Where it ran out of batches: deal as many to all, with a DistributedSampler and drop_last=True, or give ms.feed "
    "uneven='drop' or 'pad'."
)
"""What helps where a process has taken fewer steps than others."""

PAYLOAD_BYTES = 1 << 20
SPIN_S, NAP_S, LOOK_S = 1e-3, 2e-5, 0.2
"""So long a process waits without sleeping, then sleeps between two looks; so often it sees whether others live."""


class NotTogetherError(RuntimeError):
    """Some process could not do what all were to do at the same time; all of them get this error."""


class Board:
    """One process's end of the shared memory.

    Args:
        path: Of a file as long as ``num_bytes`` says, of zeros when the first process opens it.
        rank: Of this process.
        size: Number of processes.
        timeout_s: How long one waits for the others.
        is_alive: Whether the process of that id runs; ``None`` to ask the system.
    """

    def __init__(
        self, path: str, rank: int, size: int, timeout_s: float, is_alive: Callable[[int], bool] | None = None
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._is_alive = is_alive or is_running
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), num_bytes(size))
        memory = memoryview(self._map)
        self._words = memory[: 8 * _SETS * size].cast("q")
        self._payload = memory[-PAYLOAD_BYTES:]
        self._words[2 * size + rank] = os.getpid()
        self._round = self._num_exchanges = 0
        self._has_failed = False

    def gather(self, value: int, what: str = "") -> list[int]:
        """Tell all processes a number from 0 to ``MOST`` and hear theirs, in the order of ranks.

        Args:
            value: This process's.
            what: What the others are waited for to do, for an error.

        Raises:
            DataParallelError: Some process has ended, or does not come within the timeout.
            NotTogetherError: Some process has failed.
        """
        if self._has_failed:  # others may still have to read the round before that, whose words the next one takes
            self._await(what)
            self._has_failed = False
        self._tell(value)
        values = self._await(what)
        if _FAILED in values:
            raise NotTogetherError(f"rank {values.index(_FAILED)} could not {what or 'go on'}")
        return values

    def _await(self, what: str) -> list[int]:
        """Wait until all are in this round; what they tell."""
        words, turn = self._words_of_round()
        start = look_at = 0.0
        while True:
            seen = words.tolist()
            if all(word >> _VALUE_BITS == turn for word in seen):
                return [word & _FAILED for word in seen]
            now = time.monotonic()
            start = start or now
            if now - start > SPIN_S:
                time.sleep(NAP_S)
            if now > look_at:
                self._look(seen, turn, now - start if look_at else 0.0, what)
                look_at = now + LOOK_S

    def fail(self) -> None:
        """Have all others get an error from what they gather next, which all do; nobody waits."""
        self._tell(_FAILED)
        self._has_failed = True

    def _tell(self, value: int) -> None:
        """Begin a round."""
        self._round += 1
        first = (4 + (self._round & 1)) * self.size
        self._words[first + self.rank] = time.monotonic_ns()  # before others may think that it is there
        words, turn = self._words_of_round()
        words[self.rank] = turn << _VALUE_BITS | value

    def _words_of_round(self) -> tuple[memoryview, int]:
        """The words of this round, and its number as they have it."""
        first = (self._round & 1) * self.size
        return self._words[first : first + self.size], self._round % _NUM_ROUNDS

    def share(self, payload: bytes, what: str = "") -> bytes:
        """Return what the first process gives, in all of them."""
        length = self.gather(len(payload), what)[0]
        parts = []
        for start in range(0, length, PAYLOAD_BYTES):
            part = payload[start : start + PAYLOAD_BYTES]
            if self.rank == 0:
                self._payload[: len(part)] = part
            checksum = self.gather(zlib.crc32(part), what)[0]
            end = time.monotonic() + self.timeout_s
            read = bytes(self._payload[: min(PAYLOAD_BYTES, length - start)])
            while zlib.crc32(read) != checksum and time.monotonic() < end:  # the number has come before the bytes
                read = bytes(self._payload[: len(read)])
            parts.append(read)
            self.gather(0, what)  # all have read it
        return b"".join(parts)

    def meet(self, patience_s: float, what: str = "") -> bool:
        """Come together with all others, if they come soon; all get the same answer, and nobody waits for long.

        The first process decides. Another one that loses patience says so, and then looks whether the first has come
        meanwhile: in that case it was seen, or will be missed, and either way the answer is on its way.

        Args:
            patience_s: How long one waits for the others.
            what: What they meet for, for an error.

        Raises:
            DataParallelError: The first process has ended after it came.
        """
        come, decided = 6 * self.size, 7 * self.size
        words, own, before = self._words, come + self.rank, self._words[decided]
        number = before // 2 + 1  # of this decision: who came for an older one is not here
        end = time.monotonic() + patience_s
        words[own] = number
        if self.rank == 0:
            all_here = False
            while not all_here and time.monotonic() < end:
                all_here = all(word == number for word in words[come : come + self.size])
                time.sleep(0 if all_here else NAP_S)
            words[decided] = 2 * number + all_here  # before this process goes, see above
            words[own] = 0
        else:
            while words[decided] == before:
                if time.monotonic() >= end:
                    words[own] = 0
                    if words[come] != number and words[decided] == before:
                        return False
                    if not self._lives(0):
                        who = self.name(0)
                        raise DataParallelError(f"Rank {self.rank} waited for {who}, which has ended, to {what}.")
                time.sleep(NAP_S)
            words[own] = 0
        is_met = bool(words[decided] % 2)
        if is_met:
            self.gather(0, what)
        return is_met

    def note(self, count: int) -> None:
        """Let others see how far this process is, in whatever it counts; nobody waits."""
        self._words[3 * self.size + self.rank] = count

    def counts(self) -> list[int]:
        """Return what each process has noted last."""
        return self._words[3 * self.size : 4 * self.size].tolist()

    def count_exchange(self) -> None:
        """Let others see that this process begins another exchange of the group's."""
        self._num_exchanges += 1
        self._words[8 * self.size + self.rank] = self._num_exchanges

    def missing(self, patience_s: float = 0.0) -> str:
        """Return which processes are gone, or have begun fewer exchanges than this one, for people.

        Empty where none is seen.

        Args:
            patience_s: So long one that has broken off may take to end.
        """
        end = time.monotonic() + patience_s
        while not (ended := self.ended()) and time.monotonic() < end:
            time.sleep(NAP_S)
        begun = self._words[8 * self.size : 9 * self.size].tolist()
        late = [rank for rank, count in enumerate(begun) if count < self._num_exchanges]
        told = [f"{self.name(rank)} has ended, after it had begun {begun[rank]}" for rank in ended]
        told += [f"{self.name(rank)} has begun {begun[rank]} only" for rank in late if rank not in ended]
        return f"of {self._num_exchanges} exchanges {'; '.join(told)}" if told else ""

    def arrivals_ns(self) -> list[int]:
        """When each process came to the round that was gathered last, by ``time.monotonic_ns``.

        Who is in the next round already has another word for that.
        """
        first = (4 + (self._round & 1)) * self.size
        return self._words[first : first + self.size].tolist()

    def ended(self) -> list[int]:
        """Ranks of the processes that have ended."""
        return [rank for rank in range(self.size) if not self._lives(rank)]

    def _lives(self, rank: int) -> bool:
        return rank == self.rank or self._is_alive(self._words[2 * self.size + rank])

    def name(self, rank: int) -> str:
        """A process, for people."""
        return f"rank {rank} (process {self._words[2 * self.size + rank]})"

    def _look(self, seen: Sequence[int], turn: int, waited_s: float, what: str) -> None:
        late = [rank for rank, word in enumerate(seen) if word >> _VALUE_BITS != turn]
        ended = [self.name(rank) for rank in late if not self._lives(rank)]
        if not ended and waited_s <= self.timeout_s:
            return
        names = ", ".join(ended or map(self.name, late))
        happened = "has ended" if ended else f"did not come within {self.timeout_s:.0f} s"
        raise DataParallelError(
            f"Rank {self.rank} waited for {names}, which {happened}, to {what or 'begin a step'} (time {self._round} "
            f"that all agree). {UNEVEN} Parameters of the processes may differ by a step now: go on from a checkpoint."
        )


def num_bytes(size: int) -> int:
    """Length of the memory for so many processes."""
    return -(-8 * _SETS * size // mmap.PAGESIZE) * mmap.PAGESIZE + PAYLOAD_BYTES


def make_file(size: int) -> str:
    """Make the memory of a board, in a place that is memory where the system has one."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    descriptor, path = tempfile.mkstemp(prefix="millstream-", dir=folder)
    os.truncate(descriptor, num_bytes(size))
    os.close(descriptor)
    return path


def is_running(process: int) -> bool:
    """Return whether a process of this system runs; one that has ended and whose parent does not know yet does not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:  # another system, or it has ended just now
        return not Path("/proc/self/stat").exists()
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
