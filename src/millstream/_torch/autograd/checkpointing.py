"""Activation checkpointing: the recomputation must see the random numbers of the forward.

In eager mode a checkpoint saves and restores the state of the random number generator. A graph has no such state to
restore, so that the results themselves are kept, one list for each checkpointed region, and used again.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch import Tensor
from torch.utils import checkpoint

from millstream._torch.one_thread import patched
from millstream.errors import InternalError


class _Region:
    """One checkpointed region: what random operators gave in its forward, and where its recomputation is."""

    def __init__(self) -> None:
        self.results: list[list[Tensor]] = []
        self.next = 0
        self.is_replaying = False


class RandomRecords:
    """Random results of the checkpointed regions that are running, innermost last."""

    def __init__(self) -> None:
        self._running: list[_Region] = []

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a random operator, or give its result of the forward again."""
        replaying = next((region for region in reversed(self._running) if region.is_replaying), None)
        result = operator(*args, **kwargs) if replaying is None else _repeat(operator, args, replaying)
        recording = [region for region in self._running if not region.is_replaying]
        if recording:
            # Copies, because the program may go on to change its own results in place (noise.bernoulli_().div_()).
            copies = [tensor.clone() for tensor in (result if isinstance(result, tuple | list) else (result,))]
            for region in recording:
                region.results.append(copies)
        return result

    @contextlib.contextmanager
    def within(self, region: _Region) -> Iterator[None]:
        """The code that runs belongs to ``region``."""
        self._running.append(region)
        try:
            yield
        finally:
            self._running.remove(region)


def _repeat(operator: Any, args: tuple[Any, ...], region: _Region) -> Any:
    if region.next == len(region.results):
        raise InternalError("a checkpointed region draws more random numbers in its recomputation than in its forward")
    copies = region.results[region.next]
    region.next += 1
    if operator._schema.is_mutable:
        args[0].copy_(copies[0])
        return args[0]
    # Copies again: a region may be recomputed more than once, and changes its results in place each time.
    again = [copy.clone() for copy in copies]
    return again[0] if len(operator._schema.returns) == 1 else tuple(again)


@contextlib.contextmanager
def checkpoints_reuse_randoms(records: RandomRecords) -> Iterator[None]:
    """While tracing, let ``torch.utils.checkpoint`` tell ``records`` when a region runs and when it runs again.

    Both kinds of checkpoint go the way of the non-reentrant one: they differ in how they reach the same gradients.

    Private: the generator that implements the non-reentrant checkpoint. Tried on torch 2.11 and 2.13.
    """
    generate: Callable[..., Generator[None, None, None]] = checkpoint._checkpoint_without_reentrant_generator

    def generate_recorded(
        function: Callable[..., Any], _preserve: bool, *settings: Any, **kwargs: Any
    ) -> Generator[None, None, None]:
        region = _Region()

        def recompute(*args: Any, **kwargs: Any) -> Any:
            region.next = 0
            with records.within(region):
                return function(*args, **kwargs)

        # False: there is no state of a generator to save and restore.
        generator = generate(recompute, False, *settings, **kwargs)
        with records.within(region):
            next(generator)
            yield
        region.is_replaying = True
        yield from generator

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)

    with _going_through(apply, generate_recorded):
        yield


@contextlib.contextmanager
def regions_wrapped(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """For the length of the context, functions of checkpointed regions of this thread go through another.

    Args:
        wrap: Given a region's function when it is entered; what it returns is called then, and to compute it again.
    """
    generate = checkpoint._checkpoint_without_reentrant_generator
    original: Any = checkpoint.CheckpointFunction

    def generate_wrapped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, None, None]:
        return generate(wrap(function), *args, **kwargs)

    def apply(function: Callable[..., Any], *args: Any) -> Any:
        return original.apply(wrap(function), *args)

    with _going_through(apply, generate_wrapped):
        yield


@contextlib.contextmanager
def _going_through(apply: Callable[..., Any], generate: Callable[..., Generator[None, None, None]]) -> Iterator[None]:
    """For the length of the context, both kinds of checkpoint of this thread go through these.

    The reentrant kind reaches its function through its autograd class, which is looked up by name.
    """
    reentrant = types.SimpleNamespace(apply=checkpoint.CheckpointFunction.apply)
    original, checkpoint.CheckpointFunction = checkpoint.CheckpointFunction, reentrant  # type: ignore[misc, assignment]
    try:
        with (
            patched(reentrant, "apply", apply),
            patched(checkpoint, "_checkpoint_without_reentrant_generator", generate),
        ):
            yield
    finally:
        checkpoint.CheckpointFunction = original  # type: ignore[misc]
