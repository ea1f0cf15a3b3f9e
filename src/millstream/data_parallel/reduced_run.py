"""One run of a step's function, eager or traced, in which we reduce gradients in the place of DDP's reducer.

DDP's reducer issues its collectives from hooks of autograd, which no graph has. All runs of a step, captured or not,
reduce in our way instead, so that a process may replay while another one captures or runs plain Python.

**Contract**
- The semantics are DDP's: what is broadcast and when, ``no_sync``, which backward pass ends with a reduction, which
  gradients stay ``None``, and what is an error.
- Which wrappers are reduced in this way is a matter of their settings; others keep their own reducer in all processes.
- Other threads notice nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from millstream._torch.autograd.checkpointing import regions_wrapped
from millstream._torch.autograd.hooks import OwnHook
from millstream._torch.distributed.fully_sharded import (
    any_sharded,
    is_shard,
    is_shared,
    local_of_shared,
    reshard_left,
    with_gradient,
)
from millstream._torch.distributed.wrappers import (
    broadcast_buffers,
    calls_replaced,
    compression_of,
    inputs_on_device,
    is_distributed_run,
    put_reducer_away,
    put_reducer_off,
    reduced_parameters,
    why_not_ours,
)
from millstream.data_parallel.reducer import Reducer, ReducerSettings
from millstream.data_parallel.sharding.parameters import ShardedRun, adopt
from millstream.data_parallel.sharding.sharded_reducer import ShardedReducer
from millstream.data_parallel.sharding.units import agree, units
from millstream.data_parallel.sync_batch_norm import group_of, normalize
from millstream.errors import DataParallelError
from millstream.locks import ForkSafeLock

_reducers: WeakKeyDictionary[DistributedDataParallel, Reducer] = WeakKeyDictionary()


class ReducedRun:
    """One run of a step's function; the next has another.

    Args:
        replica: Reduces what every backward pass of the run gives; ``None`` where models are wrapped.
        optimizers: Gives those that the run reaches, which processes compare when they agree on a model.
    """

    def __init__(
        self, replica: Reducer | None = None, optimizers: Callable[[], Sequence[Optimizer]] = lambda: ()
    ) -> None:
        self._replica, self._optimizers = replica, optimizers
        self._armed: dict[Reducer, set[int]] = {}  # forward has run; parameters that have got gradients since
        if replica is not None and replica.num_processes > 1:
            self._armed[replica] = set()
        self._times: Counter[Any] = Counter()
        self._depth = 0

    # --- what a trace does otherwise ----------------------------------------------------------------------------------

    def reducer_of(self, wrapper: DistributedDataParallel) -> Reducer | None:
        """The reducer of ``wrapper``, made where it has none: in all processes at once. ``None``: it keeps its own."""
        if why_not_ours(wrapper):
            return None
        if wrapper not in _reducers:
            _reducers[wrapper] = new_reducer(wrapper, self._optimizers())
            put_reducer_away(wrapper)
        put_reducer_off(wrapper)
        return _reducers[wrapper]

    def used_by_all(self, reducer: Reducer, used: list[bool], time: int) -> frozenset[int]:
        """Positions of parameters that no process has used, in the reduction of that number in this step."""
        known = reducer.unused(time)
        if known is not None:
            return known
        result = reducer.exchange_use(used, time).tolist()
        unused = frozenset(position for position, is_used in enumerate(result) if not is_used)
        if reducer.settings.is_static:
            reducer.note_unused(time, unused)
        return unused

    def rows_of(self, shard: Tensor) -> Tensor:
        """This process's rows of a parameter under ``fully_shard``, whose gradient becomes the parameter's."""
        return with_gradient(shard)

    def uses_shard(self, shard: Tensor) -> bool:  # noqa: ARG002  for traces
        """Return whether a parameter under ``fully_shard`` may be one of the step's."""
        return True

    def prepare_sharded(self, module: nn.Module) -> None:
        """Agree with all processes on a model under ``fully_shard`` that runs for the first time."""
        agree(module)

    # --- the run ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within the context, this thread's calls of DDP models and backward passes go through here.

        Raises:
            DataParallelError: Some parameters of a model have got gradients, and others that should have not.
        """
        if not is_distributed_run():
            yield
            return
        outer = getattr(_running, "session", None)
        reshard_left()
        self.sharded = ShardedRun(self.rows_of, self.prepare_sharded)
        _running.session = self
        try:
            with (
                _PATCHES.applied(),
                regions_wrapped(self.sharded.region) if any_sharded() else contextlib.nullcontext(),
            ):
                yield
        finally:
            _running.session = outer
            self.sharded.close()
            del self.sharded  # the two know each other, and the function holds a batch
            if isinstance(self._replica, ShardedReducer):
                for sharding in self._replica.shardings.values():
                    sharding.leave()  # where a step has ended early
        for reducer, touched in self._armed.items():
            self._check_complete(reducer, touched)

    def forward(self, original: Callable[..., Any], wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        """Run a wrapper's module as the wrapper does, but for its reducer."""
        reducer = self.reducer_of(wrapper)
        if reducer is None:
            return original(wrapper, *args, **kwargs)
        buffers = broadcast_buffers(wrapper) if reducer.num_processes > 1 else []
        if buffers:
            with torch.no_grad():
                reducer.broadcast(buffers, self._count(reducer, "buffers"))
        args, kwargs = inputs_on_device(wrapper, (args, kwargs))
        result = wrapper.module(*args, **kwargs)
        is_synchronised = bool(torch.is_grad_enabled() and wrapper.require_backward_grad_sync)
        if wrapper.require_forward_param_sync != is_synchronised:
            wrapper.require_forward_param_sync = is_synchronised
        if is_synchronised and reducer.num_processes > 1:
            self._check_complete(reducer, self._armed.get(reducer, set()))
            self._armed[reducer] = set()
        return result

    def backward(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, and reduce what is complete after it."""
        if self._depth or not self._armed:  # a checkpointed region runs passes of its own within one
            return original(*args, **kwargs)
        sharded = self._replica if isinstance(self._replica, ShardedReducer) else None
        shares = [] if sharded is None else sharded.take_shares()
        before = {reducer: [*map(_state_of, reducer.parameters)] for reducer in self._armed}
        self._depth += 1
        try:
            original(*args, **kwargs)
        except BaseException:
            if sharded is not None:
                sharded.add_shares(shares)
            raise
        finally:
            self._depth -= 1
        for reducer, states in before.items():
            now = map(_state_of, reducer.parameters)
            self._armed[reducer] |= {i for i, pair in enumerate(zip(states, now, strict=True)) if _differ(*pair)}
            self._reduce_if_complete(reducer)
        if sharded is not None:
            with torch.no_grad():
                sharded.add_shares(shares)
        return None

    def sync_batch_norm(self, original: Callable[..., Tensor], module: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        """``SyncBatchNorm.forward``, with collectives that a graph may have."""
        group = group_of(module)
        if group is None:
            return original(module, x)
        module._check_input_dim(x)
        module._check_non_zero_input_channels(x)
        self._times[module, "statistics"] += 1
        time = self._times[module, "statistics"] - 1
        self.prepare_statistics(module, time, x)
        return normalize(module, x, group, time)

    def prepare_statistics(self, module: nn.SyncBatchNorm, time: int, x: Tensor) -> None:
        """A call of ``module`` is about to exchange statistics."""

    def total_norm(
        self,
        original: Callable[..., Tensor],
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """``torch.nn.utils.get_total_norm``, which ``clip_grad_norm_`` calls, also of shares of gradients."""
        reducer = self._replica
        gradients = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        if isinstance(reducer, ShardedReducer):
            time = self._count(reducer, "norms")
            with torch.no_grad():
                return reducer.total_norm(original, gradients, float(norm_type), error_if_nonfinite, foreach, time)
        given = {id(each) for each in gradients}
        shards = {
            id(gradient): unit
            for unit in units()
            for parameter in unit.parameters
            if self.uses_shard(parameter.tensor)
            for gradient in (parameter.tensor.grad,)
            if id(gradient) in given
        }
        if not shards:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        with torch.no_grad():
            return self.sharded.total_norm(original, gradients, shards, float(norm_type), error_if_nonfinite, foreach)

    def clip_gradients(
        self,
        original: Callable[..., None],
        parameters: Any,
        max_norm: float,
        total_norm: Tensor,
        *how: Any,
        **more: Any,
    ) -> None:
        """``torch.nn.utils.clip_grads_with_norm_``, also of shards and whole parameters, which no operator mixes."""
        given = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        whole = [each for each in given if not is_shard(each)]
        if not is_shared(total_norm) or not whole:
            return original(given, max_norm, total_norm, *how, **more)
        original([each for each in given if is_shard(each)], max_norm, total_norm, *how, **more)
        return original(whole, max_norm, local_of_shared(total_norm), *how, **more)

    def divides(self, optimizer: Optimizer) -> bool:
        """Return whether its steps are those of a share."""
        return isinstance(self._replica, ShardedReducer) and optimizer in self._replica.shardings

    def before_step(self, optimizer: Optimizer) -> None:
        """Have an optimizer that is divided see this process's share."""
        with torch.no_grad():
            self._replica.shardings[optimizer].enter()  # type: ignore[union-attr]

    def after_step(self, optimizer: Optimizer) -> None:
        """Make its parameters whole again in all processes."""
        reducer: Any = self._replica
        sharding = reducer.shardings[optimizer]
        with torch.no_grad():
            reducer.gather(sharding.owner, sharding.leave(), self._count(reducer, ("gathers", sharding.owner)))

    def _reduce_if_complete(self, reducer: Reducer) -> None:
        touched, settings = self._armed[reducer], reducer.settings
        is_lenient = settings.finds_unused or settings.is_static
        if not touched or not (is_lenient or len(touched) == len(reducer.parameters)):
            return
        del self._armed[reducer]
        time = self._count(reducer, "gradients")
        with torch.no_grad():
            unused = self.used_by_all(reducer, [i in touched for i in range(len(reducer.parameters))], time)
            if not touched.isdisjoint(unused):
                name = reducer.names[min(touched & unused)]
                raise DataParallelError(
                    f"{name} of {reducer.name} gets a gradient, which it got in no process when the step first ran. "
                    "Let every step use the same parameters, or DistributedDataParallel find them out in each."
                )
            reducer.reduce(unused, time)
        if reducer is self._replica:
            self._armed[reducer] = set()

    def _check_complete(self, reducer: Reducer, touched: set[int]) -> None:
        if touched:
            missing = [name for i, name in enumerate(reducer.names) if i not in touched]
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise DataParallelError(
                f"{', '.join(missing[:3])}{more} of {reducer.name} got no gradient, so that none was reduced. Give "
                "DistributedDataParallel find_unused_parameters=True, or static_graph=True where the same parameters "
                "are unused in every step; the latter is captured."
            )

    def _count(self, reducer: Reducer, what: Any) -> int:
        self._times[reducer, what] += 1
        return self._times[reducer, what] - 1


def reducer_known(wrapper: DistributedDataParallel) -> Reducer | None:
    """The reducer of ``wrapper``, if an eager run has made it."""
    return _reducers.get(wrapper)


def new_reducer(wrapper: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> Reducer:
    """Agree with all processes on the buckets of ``wrapper``, and compare optimizers that train it.

    Raises:
        DataParallelError: They have other models or settings.
    """
    settings = ReducerSettings(
        cap_bytes=wrapper.bucket_bytes_cap,
        compress=compression_of(wrapper),
        finds_unused=wrapper.find_unused_parameters and not wrapper.static_graph,
        is_static=wrapper.static_graph,
    )
    group: Any = wrapper.process_group
    return Reducer(type(wrapper.module).__name__, reduced_parameters(wrapper), group, settings, optimizers)


def _state_of(parameter: Tensor) -> tuple[Tensor | None, int]:
    gradient = parameter.grad
    return gradient, 0 if gradient is None else gradient._version


def _differ(before: tuple[Tensor | None, int], now: tuple[Tensor | None, int]) -> bool:
    return before[0] is not now[0] or before[1] != now[1]


_running = threading.local()


def adopt_sharded(modules: Iterable[nn.Module]) -> None:
    """Have models under ``fully_shard`` run in our way in every run of a step, if their settings allow it."""
    reshard_left()
    adopt(modules, _sharded_now)


def _sharded_now() -> ShardedRun | None:
    session = getattr(_running, "session", None)
    return None if session is None else session.sharded


def watch_steps(optimizer: Optimizer) -> None:
    """Have each step of an optimizer that is divided go by the session that runs; an error where none does."""

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = getattr(_running, "session", None)
        if session is None or not session.divides(optimizer):
            raise DataParallelError(
                f"{type(optimizer).__name__} is divided between processes by ms.step(shard_optimizer=True), and steps "
                "within such a step alone. Outside of it each process would train its own share by its own gradients."
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the optimizer comes first
        loss = None
        if closure is not None:  # with all parameters in their places
            with torch.enable_grad():
                loss = closure()
        session.before_step(optimizer)
        return None if closure is None else ((optimizer, lambda: loss), {})

    def after(optimizer: Optimizer, *_: Any) -> None:
        _running.session.after_step(optimizer)

    optimizer.register_step_pre_hook(OwnHook(before))
    optimizer.register_step_post_hook(OwnHook(after))


def _choose(name: str) -> Callable[..., Any] | None:
    session = getattr(_running, "session", None)
    return None if session is None else getattr(session, name, None)


class _Patches:
    """PyTorch's functions are replaced as long as any thread wants it; for threads that don't, they do as ever."""

    def __init__(self) -> None:
        self._lock, self._num_users = ForkSafeLock(), 0
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with self._lock.lock:
            if not self._num_users:
                self._stack.enter_context(calls_replaced(_choose))
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock.lock:
                self._num_users -= 1
                if not self._num_users:
                    self._stack.close()


_PATCHES = _Patches()
