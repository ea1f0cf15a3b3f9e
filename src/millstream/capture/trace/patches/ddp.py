"""DDP models in a step that is traced: their reductions become nodes of the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from millstream._torch.distributed.collectives import EXCHANGE
from millstream._torch.distributed.fully_sharded import is_shard
from millstream._torch.distributed.wrappers import data_parallel_wrappers, why_not_ours
from millstream._torch.one_thread import reads_seen
from millstream.capture.lines import here, raise_refusal
from millstream.capture.trace.request import FoundLate, StateMissing
from millstream.capture.trace.twins import fake_of, is_traced
from millstream.capture.trace.watches.function_watch import FunctionWatch
from millstream.data_parallel.buckets import Bucket
from millstream.data_parallel.exchange import Exchange
from millstream.data_parallel.reduced_run import ReducedRun, reducer_known
from millstream.data_parallel.reducer import Reducer
from millstream.data_parallel.sync_batch_norm import is_known
from millstream.errors import CaptureError, DataParallelError


def reads_of_wrappers(read: dict[tuple[int, str], nn.Module]) -> AbstractContextManager[None]:
    """Note which attributes of DDP are read, by id and name: code of ours takes the place of DDP's."""

    def note(wrapper: nn.Module, name: str, _: FrameType) -> None:
        read[id(wrapper), name] = wrapper

    return reads_seen(DistributedDataParallel, note) if data_parallel_wrappers() else nullcontext()


class TracedSession(ReducedRun):
    """A run on fake tensors.

    What processes have to agree on they agree on in an eager run, which all of them begin with: a trace waits for
    nobody, and may be repeated.

    Args:
        functions: The function mode in force.
        modules: Those that the step is known to use.
        report: Raises what it is given, and remembers it.
        replica: As of ``ReducedRun``.
        others: By name, tensors that may get gradients besides those which ``replica`` reduces.

    Attributes:
        exchanges: Collectives of the user's own, which nobody else holds.
    """

    def __init__(
        self,
        functions: FunctionWatch,
        modules: Callable[[], list[nn.Module]],
        report: Callable[[Exception], NoReturn],
        replica: Reducer | None,
        others: Sequence[tuple[str, Tensor]],
    ) -> None:
        super().__init__(replica)
        self._functions, self._modules, self._report = functions, modules, report
        known = set(map(id, replica.parameters)) if replica is not None else set()
        others = [pair for pair in others if id(pair[1]) not in known and not is_shard(pair[1])]
        self._others = others if replica is not None else []
        self.exchanges: list[Exchange] = []

    def reducer_of(self, wrapper: DistributedDataParallel) -> Reducer:
        """The reducer that an eager run has made."""
        if not any(wrapper is module for root in self._modules() for module in root.modules()):
            self._report(FoundLate(type(wrapper).__name__, wrapper, here()))
        if (obstacle := why_not_ours(wrapper)) != "":
            self._report(uses_own_reducer(type(wrapper.module).__name__, obstacle))
        reducer = reducer_known(wrapper)
        if reducer is None or (reducer.settings.is_static and reducer.unused() is None):
            self._report(StateMissing(f"{type(wrapper).__name__}'s buckets"))
        return reducer

    def rows_of(self, shard: Tensor) -> Tensor:
        """The twin of a shard is that of this process's rows."""
        return fake_of(shard)  # type: ignore[no-any-return]

    def uses_shard(self, shard: Tensor) -> bool:
        """Return those of other models are left alone: whoever reads one makes it an input of the graph."""
        return self._functions.shards.holds(shard)

    def prepare_sharded(self, module: nn.Module) -> None:
        """Stop: processes agree on it in an eager run."""
        self._report(StateMissing(f"{type(module).__name__}'s shards"))

    def total_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        """Of gradients, rows of sharded parameters among them."""
        with self._functions.shards.trusted():
            return super().total_norm(*args, **kwargs)

    def used_by_all(self, reducer: Reducer, used: list[bool], time: int) -> frozenset[int]:
        """Return what is known for good; where it is not, this process has to use all parameters."""
        known = reducer.unused(time)
        if known is not None:
            return known
        if reducer.settings.is_static:
            self._report(StateMissing(f"what {reducer.name} uses"))
        if not all(used):
            name = reducer.names[used.index(False)]
            raise_refusal(
                self._report,
                f"{name} of {reducer.name} gets no gradient, and find_unused_parameters=True lets each step decide "
                "anew which processes use it.",
                "Give DistributedDataParallel static_graph=True if it is the same in every step.",
            )
        reducer.exchange_use(used, time)
        return frozenset()

    def backward(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, and see that nothing gets a gradient that would not be reduced.

        Raises:
            DataParallelError: Something does.
        """
        with self._functions.on():  # gradients are those of twins
            before = [tensor.grad for _, tensor in self._others]
            super().backward(original, *args, **kwargs)
            changed = [
                name
                for (name, tensor), gradient in zip(self._others, before, strict=True)
                if tensor.grad is not gradient
            ]
        if changed:
            raise DataParallelError(
                f"{changed[0]} gets a gradient, but was not there when the step was first called, so that processes "
                "would train it apart. Let the step's function reach it from the first call on."
            )

    def prepare_statistics(self, module: nn.SyncBatchNorm, time: int, x: Tensor) -> None:
        """Those of the graph are those that an eager run has made."""
        if not is_known(module, time, x):
            self._report(StateMissing("what SyncBatchNorm exchanges"))

    # --- collectives of the user's own --------------------------------------------------------------------------------

    def all_reduce(
        self, original: Callable[..., Any], tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **how: Any
    ) -> None:
        """``torch.distributed.all_reduce`` as a node of the graph."""
        self._exchange(f"all_reduce ({op})", functools.partial(original, op=op), tensor, group, how)

    def broadcast(self, original: Callable[..., Any], tensor: Tensor, *source: Any, **how: Any) -> None:
        """``torch.distributed.broadcast`` as a node of the graph."""
        group = source[1] if len(source) > 1 else how.pop("group", None)
        origin = {"src": source[0]} if source else {key: how.pop(key) for key in ("src", "group_src") if key in how}
        self._exchange("broadcast", functools.partial(original, **origin), tensor, group, how)

    def _exchange(self, name: str, issue: Callable[..., Any], tensor: Tensor, group: Any, how: dict[str, Any]) -> None:
        if how.get("async_op") or not is_traced(tensor):
            raise_refusal(
                self._report,
                f"The step calls {name.partition(' ')[0]} with async_op=True, or on what is no tensor of the step.",
                "Call it with async_op=False.",
            )
        like = torch.empty(tensor.numel(), dtype=tensor.dtype, device="meta")
        whole = Bucket((0,), (0,), tensor.numel())
        over = functools.partial(_over, issue)
        exchange = Exchange(whole, [like], group, over, f"{name} at {here()}", device=tensor.device)
        self.exchanges.append(exchange)
        with torch.no_grad():
            (result,) = EXCHANGE([tensor.detach().reshape(-1)], exchange.key)
            tensor.copy_(result.view(tensor.shape))


def _over(issue: Callable[..., Any], group: Any) -> Callable[..., Any]:
    return functools.partial(issue, group=group)


def uses_own_reducer(name: Any, obstacle: str) -> CaptureError:
    """A wrapper is not reduced in our way, in no process."""
    return CaptureError(
        f"{name} is in a DistributedDataParallel with {obstacle}, which is not captured.",
        remedy="Compile the model instead, ms.compile(model), and leave the step to Python.",
    )
