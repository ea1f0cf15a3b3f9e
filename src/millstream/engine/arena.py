"""Memory of a plan in one piece."""

from __future__ import annotations

import torch

from millstream._torch.tensors import reinterpret
from millstream.graph import MemoryLayout
from millstream.lower.program import Program


def bind_arena(program: Program, layout: MemoryLayout) -> dict[str, torch.Tensor]:
    """Allocate the arena of a layout and return the buffers in it as tensors, by buffer id."""
    arena = torch.empty(layout.arena_bytes, dtype=torch.uint8, device=layout.device)
    bound = {}
    for name, offset in layout.offset_of.items():
        spec = program.layouts[name]
        memory = arena[offset : offset + program.graph.buffer_of[name].num_bytes].view(spec.dtype)
        bound[name] = reinterpret(memory, spec.size, spec.stride, 0)
    return bound
