"""An operator that stands for one collective in a graph: where the graph is cut, see ``lower/segmented/segments.py``.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.node import has_side_effect


class CollectiveMemory(Protocol):
    """Memory that collectives travel in, which may be gone while nobody uses it."""

    def make_ready(self) -> None: ...

    def take(self, user: object) -> None: ...

    def give_back(self, user: object) -> None: ...


class BoundCollective(Protocol):
    """A collective on memory that stays where it is.

    Attributes:
        label: What it is, for people.
        operation: What is done, by the name of the function that does it.
        is_divided: Whether each process gets another part of the result.
        is_paced: Whether it is to begin no earlier than what comes before its use needs.
        memory: What it reads; others may use it before and after.
        result: What it writes; ``None`` where that is the same memory.
        held: Sees that the memory is there.
        sent: Parts of the memory where it has its values.
        views: Parts of what it writes where it has its results.
    """

    label: str
    memory: Tensor
    result: Tensor | None
    held: CollectiveMemory
    sent: list[Tensor]
    views: list[Tensor]
    is_paced: bool

    @property
    def operation(self) -> str: ...

    @property
    def is_divided(self) -> bool: ...

    def start(self) -> None: ...

    def wait(self) -> None: ...

    def perform(self, memory: Tensor, result: Tensor | None = None) -> None: ...


_exchanges: WeakValueDictionary[int, BoundCollective] = WeakValueDictionary()
_keys = itertools.count()

_library = torch.library.Library("millstream", "FRAGMENT")
_library.define("exchange(Tensor[] values, int key) -> Tensor[]")

EXCHANGE = torch.ops.millstream.exchange.default
"""``exchange(values, key)``: what the collective ``key`` makes of ``values``, one or more, laid out as its views."""

has_side_effect(EXCHANGE)  # other processes take part, whether or not anyone here uses the results


def register_exchange(exchange: BoundCollective) -> int:
    """A number by which graphs may refer to ``exchange``, as long as anybody holds it."""
    key = next(_keys)
    _exchanges[key] = exchange
    return key


def exchange_of(key: Any) -> BoundCollective:
    """The collective that a graph refers to."""
    return _exchanges[key]


@torch.library.impl(_library, "exchange", "CompositeExplicitAutograd")
def _exchange(values: Sequence[Tensor], key: int) -> list[Tensor]:
    exchange = _exchanges[key]
    exchange.held.make_ready()
    torch._foreach_copy_(exchange.sent, list(values))
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


#: ``reduce_scatter(output, input, op=..., group=..., async_op=...)``; its first name is of torch before 2.13.
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
#: ``all_gather(output, input, group=..., async_op=...)``, likewise.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def issue_together(issues: Sequence[Callable[..., Any]], group: dist.ProcessGroup, *, async_op: bool) -> Any:
    """Begin several gathers, or several scatters, as one.

    Args:
        issues: Each begins one of them on that group.
        group: The processes.
        async_op: As of each.

    Returns:
        What to wait for; nothing, unless asynchronous.
    """
    with dist.distributed_c10d._coalescing_manager(group, async_ops=async_op) as begun:
        for issue in issues:
            issue()
    return begun if async_op else None


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of what exchanges tensors of a device, such as ``nccl``; empty where nothing does."""
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:
        return ""


def gather_later(group: dist.ProcessGroup, device: torch.device, number: int) -> Callable[[], list[int]]:
    """Have all processes of a group know a number of each; nobody waits.

    Args:
        group: The processes, all of which do this at the same place among their collectives.
        device: Where it is exchanged, after what the current stream has been given so far.
        number: This process's.

    Returns:
        Waits for the numbers; raises ``RuntimeError`` where a process is gone.
    """
    mine = torch.full((1,), number, dtype=torch.int64, device=device)
    told = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    if device.type == "cpu":
        work = all_gather(told, mine, group=group, async_op=True)
        return lambda: (work.wait(), told.tolist())[1]
    all_gather(told, mine, group=group)
    on_host = torch.empty(told.shape, dtype=told.dtype, device="cpu", pin_memory=True)
    on_host.copy_(told, non_blocking=True)
    event = torch.cuda.current_stream(device).record_event()
    return lambda: (event.synchronize(), on_host.tolist())[1]


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which a process gives up waiting for the others of its group."""
    device = group._device_types[0]
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None) or dist.distributed_c10d.default_pg_timeout
    return float(timeout.total_seconds())
