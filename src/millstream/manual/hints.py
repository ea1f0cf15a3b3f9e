"""Streams written down inside a captured region: hints of the kernel graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from millstream._torch.compiler.node_notes import annotate_stream, current_stream_hint
from millstream.errors import ArgumentError
from millstream.manual.operator_rules import Functions, look_up
from millstream.manual.thread_streams import scope_is_over

P = ParamSpec("P")
R = TypeVar("R")


class HintedScope:
    """A stand-in for ``streams`` while a graph is being captured: operators are noted as written for a stream.

    Attributes:
        num_streams: How many.
    """

    def __init__(self, num_streams: int) -> None:
        self.num_streams = num_streams
        self._names: list[str] = []

    def __enter__(self) -> HintedScope:
        # A stream is named by the way to it: "2.1" is stream 1 of a group that was opened on stream 2.
        base = current_stream_hint() or ""
        group = f"{base}." if base else ""
        self._names = [base, *(f"{group}{index}" for index in range(1, self.num_streams))]
        return self

    def __exit__(self, *_: object) -> None:
        self._names = []

    def __len__(self) -> int:
        return self.num_streams

    def __getitem__(self, index: int) -> HintedHandle:
        if type(index) is not int or index < 0:
            raise ArgumentError(f"Streams have numbers, from 0; {index!r} is none.")
        if not self._names:
            raise scope_is_over()
        return HintedHandle(self._names[index % self.num_streams])

    def run(self, branches: Iterable[Callable[[], R]]) -> list[R]:
        """Call functions without arguments, each noted as written for a stream; return the results."""
        return [self[position](branch) for position, branch in enumerate(branches)]

    def join(self) -> None:
        """Do nothing: a kernel graph knows what depends on what."""

    def wait(self, *tensors: Any) -> None:
        """Do nothing: a kernel graph knows what depends on what."""


class HintedStreams:
    """A stand-in for ``aux_streams`` while a graph is being captured."""

    def __init__(self, num_streams: int) -> None:
        self._scope = HintedScope(num_streams)

    def __enter__(self) -> tuple[HintedHandle, ...]:
        scope = self._scope.__enter__()
        return tuple([scope[index] for index in range(scope.num_streams)])

    def __exit__(self, *_: object) -> None:
        self._scope.__exit__()


class HintedHandle(Functions):
    """One stream of a ``HintedScope``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._blocks: list[Iterator[None]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = look_up(name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with annotate_stream(self._name):
                return call(*args, **kwargs)

        return run

    def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call any function, noted as written for this stream."""
        with annotate_stream(self._name):
            return function(*args, **kwargs)

    def __enter__(self) -> HintedHandle:
        block = _block(self._name)  # a generator: Dynamo enters contexts of PyTorch's by ``with`` alone
        next(block)
        self._blocks.append(block)
        return self

    def __exit__(self, *_: object) -> None:
        next(self._blocks.pop(), None)

    @property
    def stream(self) -> None:
        """None: nothing is switched."""
        return


def _block(name: str) -> Iterator[None]:
    with annotate_stream(name):
        yield
