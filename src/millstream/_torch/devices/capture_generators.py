"""Random numbers of other threads while a CUDA graph is captured.

PyTorch before 2.12 (pytorch#176752) puts a device's default generator into a state for the length of a capture in
which every draw outside of the capture is an error, whatever thread draws. But a generator is only a handle: its state
can be exchanged. So all threads get another state for that time, which continues from the same number; what is captured
draws from the generator's own, which every graph reads when it is replayed.

Private APIs, tried on torch 2.11; later versions need nothing of this.
``MILLSTREAM_WITHOUT=pytorch#176752`` switches it off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from millstream._torch.workarounds import Workaround

WORKAROUND = Workaround(
    "pytorch#176752", "an error on random numbers of other threads while a CUDA graph is captured", until=(2, 12)
)


def aside(graph: torch.cuda.CUDAGraph) -> NoExchange:
    """How to capture a graph on the current device without taking its default generator away from other threads."""
    return GeneratorExchange(graph) if WORKAROUND.applies and isinstance(graph, torch.cuda.CUDAGraph) else NoExchange()


class NoExchange:
    """Where PyTorch needs no help: nothing is done."""

    def begin(self) -> AbstractContextManager[object]:
        """A context in which the capture begins."""
        return nullcontext()

    def body(self) -> AbstractContextManager[object]:
        """A context for what is captured."""
        return nullcontext()

    def end(self) -> None:
        """To be called when the capture has ended, also by an error."""


class GeneratorExchange(NoExchange):
    """The default generator of the current device while a graph is captured: one state for it, one for all others."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph
        self._default = torch.cuda.default_generators[torch.cuda.current_device()]
        self._own = self._default.graphsafe_get_state()
        self._others: torch.Generator | None = None

    @contextmanager
    def begin(self) -> Iterator[None]:
        """PyTorch registers whatever state the default generator has, and then sets it to capturing.

        So it is given one that nobody needs. As that one is new, memory is allocated for it in between: by then it is
        replaced.
        """
        self._graph.register_generator_state(self._own)
        self._default.graphsafe_set_state(self._default.clone_state())
        try:
            with _AfterAllocation(self._give_others):
                yield
        finally:
            self._give_others()

    def body(self) -> AbstractContextManager[object]:
        return _DrawFrom(self._own, self._exchanged)

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        """For a call that takes no generator; a thread that draws in these microseconds still gets PyTorch's error."""
        self._default.graphsafe_set_state(self._own)
        try:
            yield
        finally:
            self._give_others()

    def _give_others(self) -> None:
        if self._others is None:  # from the number that they have come to
            self._others = self._default.clone_state()
        self._default.graphsafe_set_state(self._others)

    def end(self) -> None:
        """Go on from the number that other threads have come to."""
        try:
            seed, offset = self._default.initial_seed(), self._default.get_offset()
            if seed != self._own.initial_seed():
                self._own.manual_seed(seed)
            self._own.set_offset(offset)
        finally:
            self._default.graphsafe_set_state(self._own)


class _AfterAllocation(TorchDispatchMode):
    """Calls a function after memory has been allocated, also by PyTorch itself."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self._act()
        return result


class _DrawFrom(TorchDispatchMode):
    """Has operators that draw from the default generator draw from another one.

    Args:
        generator: For operators that can be given one.
        drawing: A context for calls of others, and of those of which it isn't known.
    """

    def __init__(self, generator: torch.Generator, drawing: Callable[[], Any]) -> None:
        super().__init__()
        self._generator, self._drawing = generator, drawing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None or not _may_draw(func):
            return func(*args, **kwargs)
        taking = _with_generator(func)
        if taking is not None:
            return taking(*args, **kwargs, generator=self._generator)
        with self._drawing():
            return func(*args, **kwargs)


@cache
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in ("aten", "prims", "prim")


@cache
def _with_generator(func: Any) -> Any:
    """The operator, or its overload, that can be given a generator by name."""
    packet, wanted = func.overloadpacket, {argument.name for argument in func._schema.arguments} | {"generator"}
    overloads = [func, *(getattr(packet, name) for name in packet.overloads())]
    for each in overloads:
        if {argument.name for argument in each._schema.arguments} == wanted:
            return each
    return None
