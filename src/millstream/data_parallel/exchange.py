"""A collective on memory that stays where it is: a bucket of gradients, buffers, or a note of which were used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d  # whose functions nobody replaces for a while, as in a profile

from millstream._torch.distributed.collectives import (
    all_gather,
    issue_together,
    reduce_scatter,
    register_exchange,
)
from millstream._torch.tensors import real_tensors
from millstream.data_parallel.agreement import Agreement, PeriodicComparison, board_known
from millstream.data_parallel.board import UNEVEN, Board
from millstream.data_parallel.buckets import Bucket
from millstream.data_parallel.communicators import Communicator, communicators_of
from millstream.errors import DataParallelError

PATIENCE_S = 1.0
"""So long a process may take to end whose connection has broken."""


class Progress:
    """The exchanges of this process so far: how many, and the last that was waited for."""

    def __init__(self) -> None:
        self.num_started = 0
        self.last = ""


PROGRESS = Progress()


class ExchangeMemory:
    """Memory that collectives travel in: there as long as somebody uses it.

    A step that runs as one graph has its collectives' memory in its arena, and needs this one no more.

    Args:
        tensors: All of it. Views of them stay valid when they go and come back, elsewhere and with zeros.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self._sizes = [each.untyped_storage().nbytes() for each in tensors]
        self._users: WeakSet[Any] = WeakSet()

    @property
    def held_bytes(self) -> int:
        """What it takes of the device at present."""
        return sum(each.untyped_storage().nbytes() for each in self.tensors)

    def take(self, user: object) -> None:
        """See that it is there, until this user gives it back."""
        self._users.add(user)
        self.make_ready()

    def make_ready(self) -> None:
        """See that it is there now."""
        for tensor, num_bytes in zip(self.tensors, self._sizes, strict=True):
            if tensor.untyped_storage().nbytes() < num_bytes:
                tensor.untyped_storage().resize_(num_bytes)
                tensor.zero_()

    def give_back(self, user: object) -> None:
        """Say that a user needs it no more; after the last one it goes."""
        self._users.discard(user)
        if not self._users:
            for tensor in self.tensors:
                tensor.untyped_storage().resize_(0)


Sent: TypeAlias = int | slice | tuple[slice, tuple[int, ...]]
"""Where a value goes, see ``Exchange``."""


def _part(sent: Sent, views: Sequence[Tensor], memory: Tensor) -> Tensor:
    if isinstance(sent, tuple):
        return memory[sent[0]].view(sent[1])
    return views[sent] if isinstance(sent, int) else memory[sent]


class Exchange:
    """One collective and its memory.

    On a GPU no host waits: it runs after what the current stream has been given so far, on that stream, or on one of
    its own where something is to be computed meanwhile. A second stream slows all kernels a little
    (docs/decisions/side-by-side.md), so that it is not taken for nothing.

    Args:
        bucket: How ``like`` lie in the memory; its members are counted in the order of ``like``.
        like: Tensors that look as what is exchanged; each view has the strides of one, where those are dense.
        group: The processes.
        over: ``over(group)(memory, async_op=...)`` begins the collective, on that group or another of the processes;
            ``over(group)(memory, result, async_op=...)`` where it has memory for results.
        label: What it is, for people.
        dtype: Of what travels; ``None`` for that of ``like``.
        device: Where it is; ``None`` for where ``like`` are.
        agreement: Of the group, where processes ask each other whether to replay one capture, or compare.
        is_first: Whether it is the first of those that belong together, which is when they do.
        shares: An earlier one whose memory it takes; ``None`` for its own.
        sent: Where its values go: to the view of that number, or that part of the memory, maybe in a shape;
            ``None``: to all views.
        is_paced: Whether it is to begin no earlier than what comes before its use needs, as it takes memory till then.
        own: Elements of a memory for its results alone, in which the bucket says how they lie; 0 where they lie where
            its values do. The other memory is needed no longer than it travels.

    Attributes:
        key: By which graphs refer to it.
        memory: All of what travels; see ``held``.
        result: Memory for its results; ``None`` where it has none.
        held: Who has to be asked before it is used.
        views: Parts of the memory, or of that for results, in the order of ``like``.
        sent: Parts of the memory where its values go.
        is_beside: Whether something is computed meanwhile.
    """

    def __init__(  # noqa: PLR0913  all but the first five by name, each with a default
        self,
        bucket: Bucket,
        like: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        over: Callable[[Any], Callable[..., Any]],
        label: str,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        *,
        agreement: Agreement | PeriodicComparison | None = None,
        is_first: bool = False,
        shares: Exchange | None = None,
        sent: Sequence[Sent] | None = None,
        is_paced: bool = False,
        own: int = 0,
    ) -> None:
        device = device or like[0].device
        self.agreement, self._is_first, self.is_paced = agreement, is_first, is_paced
        self.group, self.label = group, label
        self._over, self._issue = over, over(group)
        self._communicators = communicators_of(group)
        self._communicator: Communicator | None = None  # on which ``_issue`` does
        with real_tensors():  # a trace may be the first to get here, and eager runs use the same memory
            if shares is None:
                sizes = [bucket.num_elements, *filter(None, [own])]
                dtype = dtype or like[0].dtype
                self.held = ExchangeMemory(*(torch.zeros(size, dtype=dtype, device=device) for size in sizes))
            else:
                self.held = shares.held
            self.memory = memory = self.held.tensors[0]
            self.result = self.held.tensors[1] if own else None
            results = self.held.tensors[-1]
            self.views = [
                results.as_strided(tensor.shape, dense_strides(tensor), offset)
                for tensor, offset in zip(like, bucket.offsets, strict=True)
            ]
            self.sent = self.views
            if sent is not None:
                self.sent = [_part(each, self.views, memory) for each in sent]
        self.num_uses = 0
        self._board: Board | None = None
        self._work: Any = None
        self.is_beside = False
        self._done: Any = None
        self.key = register_exchange(self)

    @property
    def operation(self) -> str:
        """What is done, by the name of the function that does it."""
        return str(getattr(getattr(self._issue, "func", self._issue), "__name__", ""))

    @property
    def is_divided(self) -> bool:
        """Whether each process gets another part of the result."""
        return self.operation == "scatter"

    @property
    def memories(self) -> tuple[Tensor, ...]:
        """What ``perform`` is given."""
        return (self.memory,) if self.result is None else (self.memory, self.result)

    @property
    def num_bytes(self) -> int:
        """Of the memory."""
        return self.memory.numel() * self.memory.element_size()

    def start(self) -> None:
        """Begin; what the current stream has been given so far comes before.

        Raises:
            DataParallelError: The other processes cannot be reached.
        """
        if self._is_first and self.agreement is not None:
            self.agreement.decline(f"exchange {self.label}")
        self._begin(*self.memories)

    def perform(self, memory: Tensor, result: Tensor | None = None) -> None:
        """Do all of it, as a kernel of a graph: on the current stream, or for the host to wait for.

        Args:
            memory: As its own, or that itself.
            result: Likewise, where it has one.

        Raises:
            DataParallelError: As ``start`` and ``wait``.
        """
        given = (memory,) if result is None else (memory, result)
        if memory.device.type == "cuda":
            self._use_current()
            self._issue(*given, async_op=False)
        else:
            self._begin(*given)
            self.wait()

    def _use_current(self) -> None:
        """Go by the communicator that processes have agreed on."""
        current = self._communicators.current
        if current is not self._communicator:
            self._communicator = current
            self._issue = self._over(self.group if current is None else current.group)

    def _begin(self, *memories: Tensor) -> None:
        self.num_uses += 1
        PROGRESS.num_started += 1
        if self._board is None:
            self._board = board_known(self.group)
        if self._board is not None:
            self._board.count_exchange()
        self._use_current()
        try:
            device = memories[0].device
            if device.type != "cuda":
                self._work = self._issue(*memories, async_op=True)
            elif not self.is_beside:  # NCCL launches on the current stream where it is not asynchronous
                self._issue(*memories, async_op=False)
            else:
                stream = comm_stream(device)
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    self._issue(*memories, async_op=False)
                    self._done = stream.record_event(self._done)
        except RuntimeError as error:
            raise self._failure(error) from error

    def wait(self) -> None:
        """Let what comes next, on the host or on the current stream, come after.

        Raises:
            DataParallelError: A process is gone, or did not come within the group's timeout.
        """
        if self._done is not None and self.is_beside:
            torch.cuda.current_stream(self.memory.device).wait_event(self._done)
        elif self._work is not None:
            work, self._work = self._work, None
            self.finish(work)
        PROGRESS.last = f"{self.label}, use {self.num_uses}"

    def finish(self, work: Any) -> None:
        """Have the host wait for a collective of a CPU's: once for each.

        Raises:
            DataParallelError: As ``wait``.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, error: RuntimeError) -> DataParallelError:
        rank = dist.get_rank(self.group) if dist.is_initialized() else "?"
        last = f"the last that came through was {PROGRESS.last}" if PROGRESS.last else "none came through before"
        missing = self._board.missing(PATIENCE_S) if self._board is not None else ""
        missing = missing or "another process is gone or does not answer"
        return DataParallelError(
            f"Rank {rank} could not exchange {self.label}, use {self.num_uses} ({last}): {missing}. {UNEVEN} "
            f"Parameters may differ now: go on from a checkpoint. What was told of the exchange: {error}"
        )


@functools.cache
def comm_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which all collectives run, in the order in which they are issued."""
    return torch.cuda.Stream(device, priority=-1)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of ``tensor``, or those of a contiguous one where they leave gaps or repeat memory."""
    size, stride = tensor.shape, tensor.stride()
    expected = 1
    for step, length in sorted(pair for pair in zip(stride, size, strict=True) if pair[1] != 1):
        if step != expected:
            return torch.empty(size, device="meta").stride()
        expected *= length
    return stride


def sum_over(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Sums over all processes: the mean, where each divides its own values by their number before."""
    return functools.partial(c10d.all_reduce, op=dist.ReduceOp.SUM, group=group)


def scatter_over(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Sums of which each process gets its own part of the memory, as long as those of the others."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def scatter(memory: Tensor, **how: Any) -> Any:
        return reduce_scatter(memory.chunk(size)[rank], memory, op=dist.ReduceOp.SUM, group=group, **how)

    return scatter


def gather_over(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Each process's own part of the memory, in all of them."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def gather(memory: Tensor, **how: Any) -> Any:
        return all_gather(memory, memory.chunk(size)[rank], group=group, **how)

    return gather


def gather_parts(parts: Sequence[tuple[int, int]]) -> Callable[..., Any]:
    """``gather_over`` for memory in parts, each with so many elements of each process.

    Args:
        parts: Where each begins, and elements of a process.
    """

    def over(group: dist.ProcessGroup) -> Callable[..., Any]:
        rank, size = dist.get_rank(group), dist.get_world_size(group)

        def gather(memory: Tensor, *, async_op: bool) -> Any:
            wholes = [memory[begin : begin + size * count] for begin, count in parts]
            issues = [functools.partial(all_gather, each, each.chunk(size)[rank], group=group) for each in wholes]
            return issue_together(issues, group, async_op=async_op)

        return gather

    return over


def scatter_parts(parts: Sequence[tuple[int, int, int]]) -> Callable[..., Any]:
    """``scatter_over`` for memory in parts, with memory for results.

    Args:
        parts: Where each begins, elements of a process, and where its result begins.
    """

    def over(group: dist.ProcessGroup) -> Callable[..., Any]:
        size = dist.get_world_size(group)

        def scatter(memory: Tensor, result: Tensor, *, async_op: bool) -> Any:
            issues = [
                functools.partial(
                    reduce_scatter,
                    result[own : own + count],
                    memory[begin : begin + size * count],
                    op=dist.ReduceOp.SUM,
                    group=group,
                )
                for begin, count, own in parts
            ]
            return issue_together(issues, group, async_op=async_op)

        return scatter

    return over


def greatest_over(group: dist.ProcessGroup) -> Callable[..., Any]:
    """The greatest value of all processes."""
    return functools.partial(c10d.all_reduce, op=dist.ReduceOp.MAX, group=group)


def first_of(group: dist.ProcessGroup) -> Callable[..., Any]:
    """The values of the group's first process."""
    return functools.partial(c10d.broadcast, group=group, group_src=0)
