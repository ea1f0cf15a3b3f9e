"""Running a program on its caller's memory without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from millstream._torch.tensors import storage_view
from millstream.lower.program import Program


@contextmanager
def unchanged(program: Program, written: Sequence[torch.Tensor], generator: torch.Generator) -> Iterator[None]:
    """Put back, after the body, the tensors that a program writes and, where it draws from it, a generator's state."""
    memory = [storage_view(tensor.detach()) for tensor in written]
    saved = [tensor.clone() for tensor in memory]
    draws = any(buffer.id.startswith("rng:") for buffer in program.graph.buffers)
    state = generator.get_state() if draws else None
    try:
        yield
    finally:
        if memory:
            torch._foreach_copy_(memory, saved)
        if state is not None:
            generator.set_state(state)
