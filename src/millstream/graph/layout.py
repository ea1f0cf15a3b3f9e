"""Offsets of buffers in one piece of memory."""

from __future__ import annotations

from dataclasses import dataclass

_CPU_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
_DEVICE_ALIGNMENT = 512  # bytes: what PyTorch's CUDA allocator gives, which kernels were compiled to rely on


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


def alignment_of(device: str) -> int:
    """Bytes to which buffers on a device are aligned."""
    return _CPU_ALIGNMENT if device.partition(":")[0] == "cpu" else _DEVICE_ALIGNMENT
