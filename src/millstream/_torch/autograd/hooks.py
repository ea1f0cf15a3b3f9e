"""Hooks on tensors, modules and optimizers. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
import torch.nn.modules.module as nn_module
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils.hooks import RemovableHandle

from millstream._torch.one_thread import reads_seen


def count_hooks() -> int:
    """Number of hooks registered so far in this process, on tensors, modules and optimizers. Tried on 2.11 and 2.13."""
    return RemovableHandle.next_id


#: ``count_hooks`` without a call of Python's.
next_hook: Any = functools.partial(getattr, RemovableHandle, "next_id")


def hooks_of_all_modules() -> tuple[Any, ...]:
    """Hooks that run whenever any module is called. Tried on 2.11 and 2.13."""
    return *nn_module._global_forward_pre_hooks.values(), *nn_module._global_forward_hooks.values()


HOOKS_FOR_ALL: tuple[dict[int, Any], ...] = (
    nn_module._global_forward_pre_hooks,
    nn_module._global_forward_hooks,
    nn_module._global_backward_pre_hooks,
    nn_module._global_backward_hooks,
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
)
"""Where hooks are that run whenever any module is called, or any optimizer steps."""


def hooks_for_all() -> list[Any]:
    """Hooks that run whenever any module is called, or any optimizer steps, but for our own."""
    return [hook for hooks in HOOKS_FOR_ALL for hook in [*hooks.values()] if not isinstance(hook, OwnHook)]


class OwnHook:
    """Our own hook: captured steps do not depend on it, nor on what it reaches."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


HOOKS_OF_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that hold its hooks. Tried on 2.11 and 2.13."""


def hooks_of_module(module: torch.nn.Module) -> tuple[Any, ...]:
    """Hooks that run when ``module`` is called, but for our own. Tried on 2.11 and 2.13."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return tuple(hook for hook in hooks if not isinstance(hook, OwnHook))


def hooks_of_optimizer(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Hooks that run when ``optimizer`` steps, but for our own. Tried on 2.11 and 2.13."""
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    return tuple(hook for hook in hooks if not isinstance(hook, OwnHook))


def optimizer_steps_seen(
    before: Callable[[torch.optim.Optimizer], None],
    updates: Callable[[torch.optim.Optimizer], None],
    after: Callable[[torch.optim.Optimizer], None],
) -> AbstractContextManager[None]:
    """For the length of the context, see each step of an optimizer in this thread.

    The wrapper that every optimizer has around its ``step`` looks for hooks there, and those of PyTorch have another
    one within it that looks for defaults. A hook for all optimizers would be one of all threads, and guards of models
    compiled with their optimizers see it. Tried on 2.11 and 2.13.

    Args:
        before: Called before the user's hooks.
        updates: Called after them, where the step is one of PyTorch's own.
        after: Called after the step, before the user's hooks for that.
    """
    calls = {
        "_optimizer_step_pre_hooks": ("wrapper", before),  # and no function that registers hooks
        "defaults": ("_use_grad", updates),
        "_optimizer_step_post_hooks": ("wrapper", after),
    }

    def see(optimizer: Any, name: str, reader: FrameType) -> None:
        function, call = calls.get(name, ("", None))
        is_pytorchs = reader.f_globals.get("__name__") == torch.optim.Optimizer.__module__
        if call is not None and reader.f_code.co_name == function and is_pytorchs:
            call(optimizer)

    return reads_seen(torch.optim.Optimizer, see)


def runs_foreach(group: dict[str, Any]) -> bool:
    """Return whether an eager optimizer takes its foreach form for a parameter group. Tried on 2.11 and 2.13."""
    if group.get("fused") or group.get("foreach") is not None:
        return not group.get("fused") and bool(group["foreach"])
    devices = _get_foreach_kernels_supported_devices()
    return not group.get("differentiable") and all(each.device.type in devices for each in group["params"])


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Return whether the user registered a hook on ``tensor`` that runs during backward. Tried on 2.11 and 2.13."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def hook_leaf(leaf: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Have ``hook`` called with the gradient of a new leaf; ``count_hooks`` does not notice. Tried on 2.13."""
    leaf._backward_hooks = OrderedDict({0: hook})


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Return whether a hook is registered on the node that accumulates the gradient of ``tensor``, as Horovod does.

    Such a node shows its hooks only to code that registers one. Tried on 2.11 and 2.13.
    """
    if not (tensor.is_leaf and tensor.requires_grad):
        return False
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    for register in (node.register_hook, node.register_prehook):
        handle = register(_do_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _do_nothing(*_: Any) -> None:
    pass


def backward_hooks_of(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return hooks that the user registered on ``module``, which run during backward. Tried on 2.11 and 2.13."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def backward_hooks_of_all_modules() -> list[Callable[..., Any]]:
    """Return those that the user registered on all modules. Tried on 2.11 and 2.13."""
    return [*nn_module._global_backward_hooks.values(), *nn_module._global_backward_pre_hooks.values()]


def current_backward_pass() -> int:
    """A number of the backward pass that is running in this thread; -1 where none is."""
    return int(torch._C._current_graph_task_id())


def after_backward(callback: Callable[[], None]) -> None:
    """Have a function called when the backward pass that is running in this thread is done."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
