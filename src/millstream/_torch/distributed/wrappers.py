"""PyTorch's data-parallel wrappers: what they own and how they are set, and how to run them without their reducer.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from millstream.heap import instances
from millstream.locks import ForkSafeLock


def data_parallel_wrappers() -> list[nn.Module]:
    """The wrappers alive in this process that reduce gradients outside of autograd's graph.

    ``DistributedDataParallel`` and ``FullyShardedDataParallel`` leave no trace on the modules or parameters that they
    own, other than C++ hooks that Python cannot see, so they are looked for among all objects. Without a process group
    there are none.
    """
    if not is_distributed_run():
        return []
    kinds = (DistributedDataParallel, *_fully_sharded())
    return instances(kinds)


NUM_WRAPPED = [0]
"""How many ``DistributedDataParallel`` were made since somebody watches: looked at in every call of a step."""

_asking: weakref.WeakSet[Any] = weakref.WeakSet()
_handles: list[RemovableHandle] = []
_lock = ForkSafeLock()


def watch_wrapping(who: object) -> None:
    """Have ``NUM_WRAPPED`` count, as long as ``who`` lives.

    PyTorch calls the hook for each module that becomes part of another. Once nobody is left to watch the hook goes,
    too.
    """
    with _lock.lock:
        _asking.add(who)
        if not _handles and dist.is_available():
            _handles.append(register_module_module_registration_hook(_on_registration))


def _on_registration(module: nn.Module, *_: Any) -> None:
    if isinstance(module, DistributedDataParallel):
        NUM_WRAPPED[0] += 1
    elif not _asking:
        with _lock.lock:
            while _handles and not _asking:
                _handles.pop().remove()


def _fully_sharded() -> Iterator[type[nn.Module]]:
    module = sys.modules.get("torch.distributed.fsdp")  # without it nobody has made one
    for name in ("FullyShardedDataParallel", "FSDPModule"):
        if (kind := getattr(module, name, None)) is not None:
            yield kind


def call_around(wrapper: DistributedDataParallel, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of ``wrapper``, buffers broadcast and reducer prepared, with ``compiled`` in place of its module.

    The result shares all state with ``wrapper``, ``no_sync()`` included, and leaves it as it is: a property of the
    class comes before the submodule of that name.
    """
    kind = type(type(wrapper).__name__, (type(wrapper),), {"module": property(lambda _: compiled)})
    around = object.__new__(kind)
    around.__dict__ = wrapper.__dict__
    return around


def why_not_ours(wrapper: DistributedDataParallel) -> str:
    """Return why gradients of ``wrapper`` cannot be reduced in its reducer's place; empty where they can.

    A matter of settings alone, so that all processes say the same.
    """
    hooks = [hook for hook, _ in wrapper._comm_hooks]
    foreign = next((hook for hook in hooks if hook not in _compressions()), None)
    reasons = {
        f"the communication hook {getattr(foreign, '__name__', foreign)}": foreign is not None,
        "mixed_precision": wrapper.mixed_precision is not None,
        "delayed parameters": bool(wrapper._delay_all_reduce_params),
        "a hook for buffers": hasattr(wrapper, "buffer_hook"),
        "the context manager Join": wrapper._join_config.enable,
        "DTensor parameters": any(_is_distributed(parameter) for parameter in wrapper.parameters()),
        "sparse gradients": any(getattr(module, "sparse", False) is True for module in wrapper.modules()),
        "torch.compile's own reducer": wrapper._use_python_reducer,
    }
    return next((what for what, is_there in reasons.items() if is_there), "")


def _compressions() -> dict[Any, torch.dtype]:
    hooks = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    if hooks is None:  # nobody has registered one
        return {}
    return {hooks.fp16_compress_hook: torch.float16, hooks.bf16_compress_hook: torch.bfloat16}


def _is_distributed(parameter: Tensor) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(parameter, kind)


def compression_of(wrapper: DistributedDataParallel) -> torch.dtype | None:
    """The dtype in which a communication hook lets gradients travel; ``None`` for their own."""
    return next((_compressions()[hook] for hook, _ in wrapper._comm_hooks), None)


def reduced_parameters(wrapper: DistributedDataParallel) -> list[tuple[str, Tensor]]:
    """Names and parameters whose gradients are reduced, shared ones once."""
    ignored = wrapper.parameters_to_ignore
    named = wrapper.module.named_parameters()
    return [(name, each) for name, each in named if each.requires_grad and name not in ignored]


def broadcast_buffers(wrapper: DistributedDataParallel) -> list[Tensor]:
    """The buffers that are now to be those of the first process; none where they need not be."""
    if not (wrapper.require_forward_param_sync and wrapper.broadcast_buffers):
        return []
    ignored = wrapper.parameters_to_ignore
    return [buffer for name, buffer in wrapper.module.named_buffers() if name not in ignored]


def put_reducer_off(wrapper: DistributedDataParallel) -> None:
    """Let hooks of the reducer do nothing in the next backward pass, also where a forward pass has prepared it."""
    if not isinstance(wrapper.reducer, _Remade):
        wrapper.reducer._reset_state()


def put_reducer_away(wrapper: DistributedDataParallel) -> None:
    """Give back the buckets of ``wrapper``, as large as all gradients: they go with its reducer, and come with another.

    The wrapper gets a new one as soon as it needs it, as when it is loaded from a file. To be called in all processes
    at once: in its first backward pass a reducer asks the others for their buckets.
    """
    names = {getattr(hook, "__qualname__", None) for hook, _ in wrapper._comm_hooks} | {""}
    if wrapper.logger is None or wrapper.logger._get_ddp_logging_data().strs_map.get("comm_hook", "") not in names:
        return  # a hook that nobody can register again
    wrapper.reducer, wrapper.logger = _Remade(wrapper, "reducer"), _Remade(wrapper, "logger")  # type: ignore[assignment]


class _Remade:
    """Stands for a wrapper's reducer or logger until anything is asked of it; there are new ones then.

    Args:
        wrapper: That has it.
        name: Where.
    """

    def __init__(self, wrapper: DistributedDataParallel, name: str) -> None:
        self._wrapper, self._name = weakref.ref(wrapper), name

    def __getattr__(self, attribute: str) -> Any:
        wrapper = self._wrapper()
        if wrapper is None:
            raise AttributeError(attribute)
        with _lock.lock:
            if getattr(wrapper, self._name) is self:
                _make_reducer(wrapper)
        return getattr(getattr(wrapper, self._name), attribute)


def _make_reducer(wrapper: DistributedDataParallel) -> None:
    """As ``DistributedDataParallel.__setstate__`` does, and with the hooks that the last one had."""
    parameters, are_sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, are_sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()  # type: ignore[union-attr]
    for hook, state in wrapper._comm_hooks:
        wrapper.logger._set_comm_hook_name(hook.__qualname__)  # type: ignore[union-attr]
        dist._register_comm_hook(wrapper.reducer, state, hook)  # type: ignore[attr-defined]


def inputs_on_device(wrapper: DistributedDataParallel, inputs: Any) -> Any:
    """Arguments of the forward pass with tensors on the device of ``wrapper``, where it has one."""
    if not wrapper.device_ids:
        return inputs
    device = torch.device(wrapper.device_type, wrapper.device_ids[0])
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)


REPLACED: tuple[tuple[str, Any, str], ...] = (
    ("forward", DistributedDataParallel, "forward"),
    ("backward", torch.autograd, "backward"),
    ("all_reduce", dist, "all_reduce"),
    ("broadcast", dist, "broadcast"),
    ("sync_batch_norm", nn.SyncBatchNorm, "forward"),
    ("total_norm", clip_grad, "_get_total_norm"),  # which clip_grad_norm_ calls
    ("total_norm", nn.utils, "get_total_norm"),
    ("clip_gradients", clip_grad, "_clip_grads_with_norm_"),
)
"""What a run of a step does in its own way: a name, and where PyTorch has the function."""


@contextlib.contextmanager
def calls_replaced(choose: Callable[[str], Callable[..., Any] | None]) -> Iterator[None]:
    """For the length of the context, these functions of PyTorch's go through others.

    Args:
        choose: Asked in each call, with a name of ``REPLACED``: gives what is called instead, with the original and its
            arguments, or ``None`` for the original alone.
    """
    replaced = [each for each in REPLACED if hasattr(*each[1:])]
    originals = [vars(owner)[attribute] for _, owner, attribute in replaced]
    for (name, owner, attribute), original in zip(replaced, originals, strict=True):
        setattr(owner, attribute, _choosing(original, functools.partial(choose, name)))
    try:
        yield
    finally:
        for (_, owner, attribute), original in zip(replaced, originals, strict=True):
            setattr(owner, attribute, original)


def _choosing(original: Any, choose: Callable[[], Callable[..., Any] | None]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = choose()
        return original(*args, **kwargs) if chosen is None else chosen(original, *args, **kwargs)

    return call


def is_distributed_run() -> bool:
    """Return whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def copy_from_first(group: dist.ProcessGroup, tensors: list[Tensor]) -> None:
    """Give all processes of a group the values of the first, as DDP does at construction."""
    with torch.no_grad():
        dist._broadcast_coalesced(group, [tensor.detach() for tensor in tensors], 250 * 2**20, 0)
