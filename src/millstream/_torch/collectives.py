"""An operator that stands for one collective in a graph: where the graph is cut, see ``lower/segments.py``.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx.node import has_side_effect


class Exchange(Protocol):
    """A collective on memory that stays where it is.

    Attributes:
        label: What it is, for people.
        views: What it reads and writes.
    """

    label: str
    views: list[Tensor]

    def start(self) -> None: ...

    def wait(self) -> None: ...


_exchanges: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
_keys = itertools.count()

_library = torch.library.Library("millstream", "FRAGMENT")
_library.define("exchange(Tensor[] values, int key) -> Tensor[]")

EXCHANGE = torch.ops.millstream.exchange.default
"""``exchange(values, key)``: what the collective ``key`` makes of ``values``, laid out as its views."""

has_side_effect(EXCHANGE)  # other processes take part, whether or not anyone here uses the results


def register_exchange(exchange: Exchange) -> int:
    """A number by which graphs may refer to ``exchange``, as long as anybody holds it."""
    key = next(_keys)
    _exchanges[key] = exchange
    return key


def exchange_of(key: Any) -> Exchange:
    """The collective that a graph refers to."""
    return _exchanges[key]


@torch.library.impl(_library, "exchange", "CompositeExplicitAutograd")
def _exchange(values: Sequence[Tensor], key: int) -> list[Tensor]:
    exchange = _exchanges[key]
    torch._foreach_copy_(exchange.views, list(values))
    exchange.start()
    exchange.wait()
    return [view.clone(memory_format=torch.preserve_format) for view in exchange.views]


@torch.library.register_fake("millstream::exchange", lib=_library)
def _describe_exchange(values: Sequence[Tensor], key: int) -> list[Tensor]:  # noqa: ARG001  as the operator has them
    views = _exchanges[key].views
    return [torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device) for view in views]


def unsaved_writes(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Let a backward pass that has saved ``tensors`` go on after they are written, as DDP does with its buffers."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined, no-any-return]
