"""Running a program on its caller's memory without leaving a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from millstream._torch.tensors import storage_view
from millstream.program import Program


@contextmanager
def unchanged(
    program: Program, written: Sequence[torch.Tensor], generator: torch.Generator
) -> Iterator[Callable[[], None]]:
    """Put back, after the body, the tensors that a program writes and, where it draws from it, a generator's state.

    The body is given a function to call before each run: see ``rewinding``.
    """
    memory = [storage_view(tensor.detach()) for tensor in written]
    saved = [tensor.clone() for tensor in memory]
    draws = any(buffer.id.startswith("rng:") for buffer in program.graph.buffers)
    state = generator.get_state() if draws else None
    try:
        yield rewinding(memory, saved)
    finally:
        if memory:
            torch._foreach_copy_(memory, saved)
        if state is not None:
            generator.set_state(state)


@contextmanager
def replays_unchanged(
    program: Program, written: Sequence[torch.Tensor], generator: torch.Generator, replay: Callable[[], None]
) -> Iterator[Callable[[], None]]:
    """Give a function that replays a program's graph, each time from the same counts; see ``unchanged``."""
    with unchanged(program, written, generator) as rewind:

        def replay_again() -> None:
            rewind()
            replay()

        yield replay_again


def rewinding(memory: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a function that puts back what counts: integers, and tensors of a single element.

    A program that is run again and again counts on, and leaves the cache, the queue or the table in which it counts
    positions: an index out of range is an error on a CPU, and ends all work on a GPU.
    """
    pairs = [(now, before) for now, before in zip(memory, saved, strict=True) if may_count(now)]

    def rewind() -> None:
        for now, before in pairs:
            now.copy_(before)

    return rewind


def may_count(tensor: torch.Tensor) -> bool:
    """Return whether a program may count in a tensor."""
    return tensor.numel() == 1 or not (tensor.is_floating_point() or tensor.is_complex())


def bits_of(value: Any) -> torch.Tensor:
    """A copy of a result as bytes, in which even NaNs are equal."""
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(float("nan") if value is None else value)
    return value.detach().contiguous().clone().reshape(-1).view(torch.uint8)


def written(program: Program, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The inputs that a program changes."""
    return [tensor for name, tensor in zip(program.inputs, inputs, strict=True) if name in program.mutated]
