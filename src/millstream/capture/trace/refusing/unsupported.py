"""Refuse what is known to be impossible to capture, before code runs that uses it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, SparseAdam

from millstream._torch.autograd.hooks import (
    backward_hooks_of,
    backward_hooks_of_all_modules,
    has_accumulation_hooks,
    has_tensor_hooks,
)
from millstream._torch.distributed.fully_sharded import (
    fully_sharded_modules,
    hooks_are_off,
    why_not_sharded_by_us,
)
from millstream._torch.distributed.wrappers import data_parallel_wrappers, why_not_ours
from millstream._torch.modes.active_modes import modes_of_caller
from millstream.capture.state.discover import Found
from millstream.capture.trace.patches.ddp import uses_own_reducer
from millstream.errors import CaptureError

Unsupported: TypeAlias = tuple[Any, CaptureError]
"""Something that must not be used, or ``None`` for all modules; and why."""


def find_unsupported(found: Found) -> Iterator[Unsupported]:
    """Optimizers that read values, and what autograd would run in eager mode and a trace not see.

    Raises:
        CaptureError: There is what cannot even be left alone.
    """
    for name, optimizer in found.optimizers:
        if isinstance(optimizer, LBFGS):
            error = CaptureError(
                f"{name} is LBFGS, which evaluates its closure as often as the values demand.",
                remedy="Run this step without ms.step.",
            )
            yield optimizer, error
        if isinstance(optimizer, SparseAdam):
            error = CaptureError(
                f"{name} is SparseAdam, whose gradients are sparse.",
                remedy="Use Adam, and embeddings that are not sparse.",
            )
            yield optimizer, error
    if hooks := backward_hooks_of_all_modules():
        error = CaptureError(
            "All modules have a backward hook, which would not run in a graph.",
            where=_place_of(hooks[0]),
            remedy="Remove the hook.",
        )
        yield None, error
    for name, root in found.modules:
        yield from _in_module(name, root)
    for name, tensor in _tensors_of(found):
        if not is_lazy(tensor) and (has_tensor_hooks(tensor) or has_accumulation_hooks(tensor)):
            error = CaptureError(
                f"{name} has a hook on its gradient, which would not run in a graph.",
                remedy="Remove the hook and change the gradient in the step, after backward.",
            )
            yield tensor, error
    yield from _in_data_parallel(found)


def check_used(used: Found, unsupported: Sequence[Unsupported]) -> None:
    """Refuse what must not be used.

    Args:
        used: What code uses.
        unsupported: What must not be, of all that the step reaches.

    Raises:
        CaptureError: It is there.
    """
    objects: list[Any] = [optimizer for _, optimizer in used.optimizers]
    objects += (module for _, root in used.modules for module in root.modules())
    objects += (tensor for _, tensor in _tensors_of(used))
    there = {*map(id, objects)}
    for each, error in unsupported:
        if id(each) in there or (each is None and used.modules):
            raise error


def check_function(function: Callable[..., Any]) -> None:
    """Refuse a function whose code runs when the call is over.

    Raises:
        CaptureError: It is a generator function, or asynchronous.
    """
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_kind(function) for is_kind in kinds):
        code = getattr(function, "__code__", None)  # a functools.partial has none
        raise CaptureError(
            "The step is a generator or a coroutine, whose code runs after the call.",
            where="" if code is None else f"{code.co_filename}:{code.co_firstlineno}",
            remedy="Let a plain function be the step, and call that in the generator or coroutine.",
        )


def within_transform() -> CaptureError:
    """Why what is called within ``torch.func.jvp`` and its like, whose tensors a graph does not know, runs eagerly."""
    return CaptureError(
        "It is called within a transform such as torch.func.grad or vmap, or with forward-mode differentiation on.",
        remedy="Compile the function that does that; what is compiled here runs as plain Python there.",
    )


def check_modes() -> None:
    """Refuse modes of the caller's that see or change each operator: a graph has them no more.

    Raises:
        CaptureError: There is one.
    """
    for mode in modes_of_caller():
        if not isinstance(mode, torch.device):
            raise CaptureError(
                f"It is called within {mode}, which is to see each operator.", remedy="Call it outside of that."
            )


def _in_module(name: str, root: nn.Module) -> Iterator[Unsupported]:
    for path, module in root.named_modules(prefix=name):
        if isinstance(module, torch.jit.ScriptModule):  # nor does what compares modules with what they were
            raise CaptureError(
                f"{path} is a module of torch.jit, which no trace sees into.", remedy="Use the module it was made from."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield module, CaptureError(f"{path} gives sparse gradients.", remedy="Make it with sparse=False.")
        if hooks := backward_hooks_of(module):
            error = CaptureError(
                f"{path} has a backward hook, which would not run in a graph.",
                where=_place_of(hooks[0]),
                remedy="Remove the hook.",
            )
            yield module, error


def _place_of(hook: Any) -> str:
    """The line where a hook is written, which may be a library's."""
    function = getattr(hook, "func", hook)  # of a partial
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _in_data_parallel(found: Found) -> Iterator[Unsupported]:
    """Parameters whose gradients a wrapper averages between processes in a way that no graph has.

    A ``DistributedDataParallel`` that the step reaches is captured, if its settings allow it; where the step goes
    around its wrapper, nobody can know whether it is to be averaged.
    """
    for _, root in found.modules:
        yield from _in_sharded(root, found)
    wrappers = [each for each in data_parallel_wrappers() if not _is_sharded_by_us(each)]
    reached = {id(module) for _, root in found.modules for module in root.modules()}
    owners: dict[int, list[nn.Module]] = {}
    for wrapper in wrappers:
        is_captured = isinstance(wrapper, DistributedDataParallel) and id(wrapper) in reached
        if is_captured and (obstacle := why_not_ours(wrapper)) != "":
            yield wrapper, uses_own_reducer(type(wrapper.module).__name__, obstacle)
        for parameter in wrapper.parameters():
            owners.setdefault(id(parameter), []).append(wrapper)
    for name, tensor in _tensors_of(found):
        those = owners.get(id(tensor), [])
        if those and not any(isinstance(each, DistributedDataParallel) and id(each) in reached for each in those):
            kind = type(those[0]).__name__
            error = CaptureError(
                f"{name} belongs to {kind}, which averages gradients between processes while backward runs; "
                "a captured step would train each process on its own.",
                remedy=f"Let the step call the {kind} itself, or compile the model instead, ms.compile(model) around "
                f"{kind}, and leave the step to Python.",
            )
            yield tensor, error


def _in_sharded(root: nn.Module, found: Found) -> Iterator[Unsupported]:
    """Modules under ``fully_shard`` that are not captured."""
    modules = fully_sharded_modules([root])
    if not modules:
        return
    name = type(modules[0]).__name__.removeprefix("FSDP")
    reason = next(filter(None, map(why_not_sharded_by_us, modules)), "")
    if not reason and found.scalers:
        reason = f"{found.scalers[0][0]}, a GradScaler"
    if reason:
        yield (
            modules[0],
            CaptureError(
                f"{name} is under fully_shard with {reason}, which is not captured.",
                remedy="Leave that out, or compile the model instead, ms.compile(model), and leave the step to Python.",
            ),
        )


def _is_sharded_by_us(wrapper: nn.Module) -> bool:
    """Return whether steps run a model under ``fully_shard`` without its hooks."""
    return any(wrapper is each for each in fully_sharded_modules([wrapper])) and hooks_are_off(wrapper)


def _tensors_of(found: Found) -> Iterator[tuple[str, Tensor]]:
    for name, root in found.modules:
        yield from root.named_parameters(name)
    yield from found.tensors
    for name, optimizer in found.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            yield from ((f"A parameter of {name}.param_groups[{number}]", tensor) for tensor in group["params"])
