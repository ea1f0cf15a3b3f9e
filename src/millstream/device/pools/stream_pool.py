"""The streams of a context."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import overload

from millstream.device.drivers.driver import Driver
from millstream.device.handles import Stream
from millstream.device.pools.lifetime import ContextLifetime, capture_lock
from millstream.errors import ArgumentError, DeviceError
from millstream.locks import ForkSafeLock

MAX_STREAMS = 32
"""PyTorch has this many streams per device and priority and then hands out the same ones again."""

MAX_LENT_STREAMS = 128
"""So many kernels run at one time on any device of today: more streams could only take more workspaces."""


class StreamPool(Sequence[Stream]):
    """All streams of a context, made on first use: ``pool[i]``, two for copies, and those that are lent.

    They are different streams, so that work on them can overlap. Nobody else is handed them, where CUDA's driver makes
    them; PyTorch's own it shares among all.

    Args:
        driver: Makes them.
        lifetime: Of the context.
    """

    def __init__(self, driver: Driver, lifetime: ContextLifetime) -> None:
        self._driver = driver
        self._lifetime = lifetime
        self._lock = ForkSafeLock()  # re-entrant: a finalizer may run while its own thread holds it
        self._numbered: dict[int, Stream] = {}
        self._for_copies: dict[str, Stream] = {}
        self._lendable: dict[tuple[int, int], list[Stream]] = {}  # by thread and by the stream that they start from
        self._lent: set[int] = set()  # identities of those that are out
        self._num_moved = 0  # how many of them have gone from one thread or base to another

    def __len__(self) -> int:
        return MAX_STREAMS

    def __iter__(self) -> Iterator[Stream]:
        return map(self.__getitem__, range(MAX_STREAMS))

    @overload
    def __getitem__(self, index: int) -> Stream: ...

    @overload
    def __getitem__(self, index: slice) -> list[Stream]: ...

    def __getitem__(self, index: int | slice) -> Stream | list[Stream]:
        """Stream number ``index``, the same one for the life of the context; a list of them for a slice.

        Raises:
            ArgumentError: ``index`` is negative or at least ``MAX_STREAMS``.
            DeviceError: The context is closed.
        """
        self._lifetime.check()
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(MAX_STREAMS))]
        if not 0 <= index < MAX_STREAMS:
            raise ArgumentError(
                f"Stream {index} of {self._lifetime.place} does not exist: the numbers go from 0 to {MAX_STREAMS - 1}, "
                f"because PyTorch has {MAX_STREAMS} streams and then hands out the same ones again."
            )
        stream = self._numbered.get(index)
        if stream is None:
            with self._lock.lock:
                if index not in self._numbered:
                    self._numbered[index] = self._make_distinct(high_priority=False)
                stream = self._numbered[index]
        return stream

    @property
    def to_device(self) -> Stream:
        """The one stream for batches on their way to the device; of kernels, only users' transforms run on it.

        It is of high priority. That does not speed copies up, but it takes the stream from another of PyTorch's sets
        than the one that users, capture and numbered streams draw from: were a user to capture a graph on the stream
        that the feeder copies on, the copies would end up in the graph.
        """
        return self._find_for_copies("to the device")

    @property
    def to_host(self) -> Stream:
        """The one stream for results on their way to the host, of high priority.

        Another than ``to_device``: what is to be fetched comes at the end of a step, and batches that were enqueued
        after it would wait for that.
        """
        return self._find_for_copies("to the host")

    def _find_for_copies(self, way: str) -> Stream:
        self._lifetime.check()
        stream = self._for_copies.get(way)
        if stream is None:
            with self._lock.lock:
                if way not in self._for_copies:
                    self._for_copies[way] = self._make_distinct(high_priority=True)
                stream = self._for_copies[way]
        return stream

    @property
    def num_lent(self) -> int:
        """Streams that are out."""
        return len(self._lent)

    def lend(self, base: Stream, count: int) -> list[Stream]:
        """Lend streams for work that starts from ``base`` and is joined to it, to be given to ``take_back``.

        The same thread gets the same ones for the same base, lowest first. That keeps memory safe after the join: what
        was allocated on such a stream and is freed later goes back to it, and whoever works there next starts from the
        stream that used it.

        Raises:
            DeviceError: The context is closed, or ``MAX_LENT_STREAMS`` are out.
        """
        self._lifetime.check()
        key = threading.get_ident(), self._driver.stream_id(base)
        with self._lock.lock:
            found = self._lend(key, count, moves=False)
        if found is None:
            with capture_lock(), self._lock.lock:  # in the order in which graph pools are made
                found = self._lend(key, count, moves=True)
        return found or []

    def _lend(self, key: tuple[int, int], count: int, *, moves: bool) -> list[Stream] | None:
        """Find the streams to lend; ``None`` where idle ones of others would have to move."""
        own = self._lendable.setdefault(key, [])
        found = [stream for stream in own if id(stream) not in self._lent][:count]
        while len(found) < count:
            is_full = sum(map(len, self._lendable.values())) >= MAX_LENT_STREAMS
            if is_full and not moves:
                return None
            stream = self._take_idle() if is_full else self._make_distinct(high_priority=False)
            own.append(stream)
            found.append(stream)
        self._lent.update(map(id, found))
        return found

    def take_back(self, streams: Sequence[Stream]) -> int:
        """Take lent streams back: all work on them is joined to the stream that they started from.

        Returns:
            What ``lend_again`` asks for.
        """
        self._lent.difference_update(map(id, streams))
        return self._num_moved

    def lend_again(self, streams: Sequence[Stream], ticket: int) -> bool:
        """Lend the same streams to the one that returned them; False where they may be somebody else's by now."""
        with self._lock.lock:
            if ticket != self._num_moved or self._lifetime.end:
                return False
            self._lent.update(map(id, streams))
        return True

    def _take_idle(self) -> Stream:
        """One that another thread or base has left idle, as there are as many as there may be."""
        for own in self._lendable.values():
            for stream in own:
                if id(stream) not in self._lent:
                    self._driver.synchronize()  # nothing tells when its last user was done with memory from it
                    own.remove(stream)
                    self._num_moved += 1
                    return stream
        raise DeviceError(
            f"{MAX_LENT_STREAMS} streams of {self._lifetime.place} are in use at one time; fork fewer, or smaller "
            "groups."
        )

    def _make_distinct(self, *, high_priority: bool) -> Stream:
        # PyTorch hands its 32 streams out in turn, and others draw from the same 32: a full turn shows each of them.
        for _ in range(2 * MAX_STREAMS):
            stream = self._driver.make_stream(high_priority=high_priority)
            lendable = (lent for own in self._lendable.values() for lent in own)
            if all(stream != other for other in (*self._numbered.values(), *self._for_copies.values(), *lendable)):
                return stream
        raise DeviceError(
            f"PyTorch hands out no stream of {self._lifetime.place} beyond the {len(self._numbered)} in use."
        )

    def clear(self) -> None:
        """Drop all streams."""
        self._numbered.clear()
        self._for_copies.clear()
        self._lendable.clear()
        self._lent.clear()

    def __repr__(self) -> str:
        return f"<streams of {self._lifetime.place}, {len(self._numbered)} made>"
