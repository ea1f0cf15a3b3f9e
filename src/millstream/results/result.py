"""A result on its way: the future that its caller has, what is copied, and how it becomes the value on the host."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Generator, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor

from millstream.data.transfer.batch_layout import LeafSpec, view_leaf
from millstream.device import Stream, StreamMarker
from millstream.errors import never_the_end, skip_frames
from millstream.results.pool import Stretch
from millstream.tree.batches import Unflatten, flatten_batch

T = TypeVar("T")
OnResult = Callable[[Any], object] | None


class Fetched(Future[T]):
    """A result on its way: a ``concurrent.futures.Future`` that can also be awaited, and not be cancelled.

    Attributes:
        step: The step it belongs to.
    """

    def __init__(self, step: int | None) -> None:
        super().__init__()
        self.step = step
        self.set_running_or_notify_cancel()  # it comes in any case, and to a future that was cancelled it could not

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


@dataclass(slots=True, eq=False)
class Result:
    """A result on its way."""

    future: Fetched[Any]
    unflatten: Unflatten
    others: dict[int, Any]  # the leaves that are on the host
    staged: Sequence[int] = ()  # the leaves that are on their way
    specs: Sequence[LeafSpec] = ()
    offsets: Sequence[int] = ()  # of the leaves, from its start
    stretch: Stretch = field(default_factory=Stretch)  # of the pool, if it does not travel by itself
    num_bytes: int = 0
    own: Tensor | None = None  # device memory of a large one
    ready: StreamMarker | None = None  # after the copy on the caller's stream
    home: Stream | None = None
    host: Tensor | None = None  # where it arrives: the whole pinned pool, or memory of its own


def flatten(value: Any) -> tuple[list[Any], Unflatten]:
    """The leaves of a value, and the way back."""
    try:
        return flatten_batch(value)
    except StopIteration as error:  # of a type that the user has registered
        raise never_the_end(error) from error


def bring(leaf: Any) -> Any:
    """A leaf that is on the host, or that only its own method can bring there."""
    if isinstance(leaf, Tensor):
        leaf = leaf.detach()
        return leaf.clone() if leaf.is_cpu else leaf.cpu()
    if not hasattr(leaf, "to"):
        return copy.copy(leaf)
    try:
        leaf = copy.deepcopy(leaf)  # its ``to`` may move the very object that the user continues with, or return it
    except RuntimeError:  # of tensors that autograd has made
        leaf = copy.copy(leaf)
    try:
        return leaf.to("cpu")
    except StopIteration as error:
        raise never_the_end(error) from error


def read(result: Result) -> list[Any]:
    """The leaves as the user gets them."""
    values = dict(result.others)
    base = result.stretch.start
    for i, offset, spec in zip(result.staged, result.offsets, result.specs, strict=True):
        assert result.host is not None
        view = view_leaf(result.host, base + offset, spec)
        values[i] = view.item() if view.dim() == 0 else view.clone()
    for i, value in result.others.items():
        if isinstance(value, Tensor) and value.dim() == 0 and value.layout is torch.strided:
            values[i] = value.item()
    return [values[i] for i in range(len(values))]


def fail(result: Result, error: BaseException, own: Set[CodeType] = frozenset()) -> None:
    """Complete the future of a result with an error, without the frames of the functions ``own``."""
    error = never_the_end(error)  # which asyncio would refuse, and never complete what awaits it
    with suppress(Exception):  # which not every error lets be done
        made = copy.copy(error)  # each result gets its own note
        made.__cause__, made.__context__ = error.__cause__, error.__context__
        made.__suppress_context__ = error.__suppress_context__
        if hasattr(error, "__notes__"):
            made.__notes__ = [*error.__notes__]
        error = made.with_traceback(skip_frames(error.__traceback__, own))
    if result.future.step is not None:
        error.add_note(f"Raised while the result of step {result.future.step} was fetched.")
    result.future.set_exception(error)
