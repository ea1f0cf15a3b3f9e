"""``check=True``: proof, at a price, that no byte is read or written when it should not be.

- What lands is what was staged: each batch is read back and its checksum compared.
- A buffer that the user has dropped is filled with 0xFF (not-a-number in every floating type, -1 in integers) and kept
  back for the length of one batch. What still reads it, a stream or a graph that the feed does not know of, gets values
  that cannot pass for data. What still writes it is found: the poison is looked at before the buffer is used again.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from millstream.data.transfer.buffers import Buffer
from millstream.data.transfer.layout import Layout
from millstream.data.transfer.staging import StagingBuffer, wait_until_reached
from millstream.device import DeviceContext, Event
from millstream.errors import FeedError

POISON = 0xFF


@dataclass(slots=True, eq=False)
class _Echo:
    """Device memory on its way back to the host."""

    memory: Tensor  # pinned
    arrived: Event
    expected: int  # checksum
    complaint: str


class Verifier:
    """Watches over the buffers of one transfer; see the top of this file.

    Args:
        context: Of the device.
    """

    def __init__(self, context: DeviceContext) -> None:
        self._context = context
        self._echoes: deque[_Echo] = deque()
        self._quarantine: deque[Buffer] = deque()  # the worker's
        self._poison: Tensor | None = None
        self._num_sent = 0

    def rotate(self, buffer: Buffer) -> Buffer | None:
        """Worker: poison a buffer that came back, and return one poisoned before; ``None`` if there is none."""
        if not buffer.was_lent:
            return buffer  # never used, or never seen by the user
        context, stream = self._context, self._context.copy_stream
        with context.capture_lock:
            stream.wait_event(buffer.released)
            context.copy([(memory, self._poison_for(memory.numel())) for memory in _memories(buffer)], stream)
            buffer.copied.record(stream)
            self._quarantine.append(buffer)
            if len(self._quarantine) < 2:
                return None
            oldest = self._quarantine.popleft()
            for memory in _memories(oldest):
                self._listen(
                    memory,
                    zlib.crc32(bytes([POISON]) * memory.numel()),
                    f"Memory of buffer {oldest.number} was written after the batch in it had been dropped (noticed "
                    f"before batch {self._num_sent}).",
                )
        return oldest

    def add(self, checksums: dict[int, int], pinned: StagingBuffer) -> None:
        """Worker: note what is about to be copied, by number of the segment. What belongs to one comes in order."""
        for number, _, sent in pinned.copies:
            checksums[number] = _checksum(sent, checksums.get(number, 0))

    def follow(self, layout: Layout, buffer: Buffer, checksums: dict[int, int]) -> None:
        """Worker: all copies of a batch were enqueued; read back what they bring."""
        for number, (segment, memory) in enumerate(zip(layout.segments, buffer.memories, strict=True)):
            self._listen(
                memory[: segment.num_bytes],
                checksums[number],
                f"Batch {self._num_sent} did not arrive as it was staged (buffer {buffer.number}, segment {number}).",
            )
        buffer.copied.record(self._context.copy_stream)
        self._num_sent += 1

    def verify(self, stopped: threading.Event, leave: int) -> None:
        """Worker: compare what has come back, but for the latest few.

        Raises:
            FeedError: Something is not what it has to be.
        """
        while len(self._echoes) > leave:
            echo = self._echoes[0]
            if not wait_until_reached(self._context, echo.arrived, stopped):
                return
            self._echoes.popleft()
            found = _checksum(echo.memory)
            self._context.release_pinned(echo.memory)
            self._context.release_event(echo.arrived)
            if found != echo.expected:
                raise FeedError(
                    f"{echo.complaint} Work that reads or writes a batch must be queued on the stream that was current "
                    "when the batch was asked for, or that stream must wait for it, before the batch is dropped. If "
                    "yours does, this is a bug in Millstream."
                )

    def _listen(self, memory: Tensor, expected: int, complaint: str) -> None:
        context = self._context
        echo = context.pinned(memory.numel())
        context.copy([(echo, memory)], context.copy_stream)
        arrived = context.acquire_event()
        arrived.record(context.copy_stream)
        self._echoes.append(_Echo(echo, arrived, expected, complaint))

    def _poison_for(self, num_bytes: int) -> Tensor:
        if self._poison is None or self._poison.numel() < num_bytes:
            if self._poison is not None:
                self._give_back(self._poison)
            self._poison = self._context.pinned(num_bytes)
            self._poison.fill_(POISON)
        return self._poison[:num_bytes]

    def _give_back(self, memory: Tensor) -> None:
        event = self._context.acquire_event()
        event.record(self._context.copy_stream)
        self._context.release_pinned(memory, after=event)

    def close(self) -> None:
        """Give everything back."""
        if self._context.closed:
            return
        for echo in self._echoes:
            self._context.release_pinned(echo.memory, after=echo.arrived)
        self._echoes.clear()
        if self._poison is not None:
            self._give_back(self._poison)
            self._poison = None


def _checksum(memory: Tensor, before: int = 0) -> int:
    array: Any = memory.numpy()
    return zlib.crc32(array, before)


def _memories(buffer: Buffer) -> list[Tensor]:
    return [segment.tensor for segment in buffer.segments if segment is not None]
