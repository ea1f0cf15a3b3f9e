"""Where buffers stand in one piece of memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryLayout:
    """Temporaries of one device packed into one arena.

    Attributes:
        offset_of: Byte offset in the arena, by buffer id.
        arena_bytes: Size of the arena.
        device: Place it lies on.
    """

    offset_of: dict[str, int]
    arena_bytes: int
    device: str
