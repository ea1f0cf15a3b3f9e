"""Pinned host memory, allocated rarely and cut into many blocks.

Pinning is slow (milliseconds), synchronises the device on some drivers, and is forbidden while a CUDA graph is being
captured, so it must not happen once a program is warm. PyTorch moreover rounds each pinned allocation up to a power of
two. The arena therefore pins a few chunks whose sizes are powers of two, keeps them until it is closed, and serves
requests from within: a request that was served once is served again without asking the system.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream.device.handles import Event
from millstream.errors import ArgumentError, DeviceError, warn_user

ALIGNMENT_BYTES = 256
"""Blocks start and end on this boundary: enough for every dtype, and what the copy engines like best."""

MIN_CHUNK_BYTES = 1 << 20
"""The smallest chunk: pinning 1 MiB costs hardly more than pinning one page, and small requests then share it."""


class FreeRanges:
    """The free byte ranges of one chunk: first fit, and neighbours join when they are given back."""

    def __init__(self, num_bytes: int) -> None:
        self._ranges = [(0, num_bytes)]  # (start, end), sorted, never touching each other

    def take(self, num_bytes: int) -> int | None:
        """Cut ``num_bytes`` out of the first range that has them; the offset, or ``None`` when none has."""
        for i, (start, end) in enumerate(self._ranges):
            if end - start >= num_bytes:
                if end - start == num_bytes:
                    del self._ranges[i]
                else:
                    self._ranges[i] = (start + num_bytes, end)
                return start
        return None

    def give_back(self, start: int, num_bytes: int) -> None:
        """Make a range that ``take`` cut out free again."""
        end = start + num_bytes
        i = bisect.bisect(self._ranges, (start, end))
        if i < len(self._ranges) and self._ranges[i][0] == end:
            end = self._ranges.pop(i)[1]
        if i > 0 and self._ranges[i - 1][1] == start:
            i -= 1
            start = self._ranges.pop(i)[0]
        self._ranges.insert(i, (start, end))

    @property
    def num_bytes(self) -> int:
        """Bytes free in all."""
        return sum(end - start for start, end in self._ranges)


@dataclass(frozen=True, slots=True)
class _Chunk:
    memory: Tensor
    free: FreeRanges


@dataclass(frozen=True, slots=True)
class _Block:
    chunk: _Chunk
    start: int
    num_bytes: int


class PinnedArena:
    """Blocks of pinned memory, cut from chunks that live as long as the arena.

    **Contract**

    - A block handed out overlaps no other block that is lent, and none whose last reader on the device is not done.
    - Once a set of requests has been served and given back, serving it again allocates nothing.
    - ``give_back`` never blocks and takes no lock, so finalizers may call it at any moment, even in the middle of
      ``take``.
    - When the system refuses to pin, requests are served from pageable memory, with one warning.

    Args:
        pin: Makes a uint8 tensor of the given number of pinned bytes; ``RuntimeError`` when the system refuses.
        recycle: Receives each event that came with ``give_back``, once it has been reached.
    """

    def __init__(self, pin: Callable[[int], Tensor], recycle: Callable[[Event], None]) -> None:
        self._pin = pin
        self._recycle = recycle
        self._lock = threading.RLock()
        self._chunks: list[_Chunk] = []
        self._lent: dict[int, _Block] = {}  # by address
        self._returned: deque[tuple[_Block, Event | None]] = deque()
        self._warned = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks, used or free."""
        return sum(chunk.memory.numel() for chunk in self._chunks)

    @property
    def num_lent(self) -> int:
        """Blocks handed out and not given back."""
        return len(self._lent)

    def take(self, num_bytes: int, reserve_bytes: int = 0) -> Tensor:
        """Lend a uint8 tensor of ``num_bytes`` pinned bytes; see ``DeviceContext.pinned``."""
        if num_bytes < 0:
            raise ArgumentError(f"num_bytes must not be negative; it is {num_bytes}.")
        size = max(_round_up(num_bytes, ALIGNMENT_BYTES), ALIGNMENT_BYTES)
        with self._lock:
            self._collect(wait=False)
            block = self._cut(size)
            if block is None and self._returned:
                # What is missing may only be waiting for a copy to end. A new chunk would stay for good; the copy is
                # over in milliseconds, because everything it waits for has been enqueued already.
                self._collect(wait=True)
                block = self._cut(size)
            if block is None:
                self._add_chunk(size, reserve_bytes)
                block = self._cut(size)
                assert block is not None
            tensor = block.chunk.memory[block.start : block.start + num_bytes]
            self._lent[_address_of(tensor)] = block
            return tensor

    def give_back(self, tensor: Tensor, after: Event | None) -> None:
        """Take a lent block back; its bytes are lent again only once ``after`` is reached."""
        # dict.pop and deque.append are atomic. A lock here could deadlock: a finalizer may run on this very thread
        # while it holds the lock inside ``take``.
        block = self._lent.pop(_address_of(tensor), None)
        if block is None:
            raise DeviceError(
                "This tensor is not a pinned block that is lent: it was given back before, or comes from elsewhere."
            )
        self._returned.append((block, after))

    def clear(self) -> None:
        """Forget all chunks. The caller has made sure that the device reads none of them."""
        with self._lock:
            self._returned.clear()
            self._lent.clear()
            self._chunks.clear()

    def _collect(self, *, wait: bool) -> None:
        for _ in range(len(self._returned)):
            block, after = self._returned.popleft()
            if after is not None and not after.query():
                if not wait:
                    self._returned.append((block, after))
                    continue
                after.synchronize()
            block.chunk.free.give_back(block.start, block.num_bytes)
            if after is not None:
                self._recycle(after)

    def _cut(self, size: int) -> _Block | None:
        for chunk in self._chunks:
            start = chunk.free.take(size)
            if start is not None:
                return _Block(chunk, start, size)
        return None

    def _add_chunk(self, size: int, reserve_bytes: int) -> None:
        sizes = {_power_of_two(max(size, reserve_bytes)), _power_of_two(size)}
        refusal = RuntimeError()
        # When all that is expected cannot be pinned, pin what is needed now.
        for num_bytes in sorted(sizes, reverse=True):
            try:
                memory = self._pin(num_bytes)
            except RuntimeError as error:
                refusal = error
            else:
                break
        else:
            memory = torch.empty(_power_of_two(size), dtype=torch.uint8, device="cpu")
            if not self._warned:
                self._warned = True
                warn_user(
                    f"The system refuses to pin {_power_of_two(size):,} bytes of host memory ({refusal}); pageable "
                    "memory is used instead, so copies to the device do not overlap with it computing. In a "
                    "container, raise the limit of locked memory (ulimit -l); or feed smaller batches.",
                )
        self._chunks.append(_Chunk(memory, FreeRanges(memory.numel())))


def _address_of(block: Tensor) -> int:
    # By way of the storage, because a tensor without elements reports the address 0.
    return block.untyped_storage().data_ptr() + int(block.storage_offset())


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _power_of_two(num_bytes: int) -> int:
    return max(MIN_CHUNK_BYTES, 1 << (num_bytes - 1).bit_length())
