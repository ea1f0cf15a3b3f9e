"""Exchange tensors where PyTorch's C++ takes them from Python, or returns them, past function modes.

A trace has other tensors for PyTorch than the user's code has. Function modes exchange them, but for what is here:
what calls the user's code (autograd functions, hooks on saved tensors, dispatch modes), and what is given tensors
unseen. Private APIs; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn, overrides
from torch._functorch import eager_transforms, vmap
from torch.autograd.function import BackwardCFunction, Function, FunctionCtx, FunctionMeta
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from millstream._torch.one_thread import attributes_here, leave_to_python, patched

Other = Callable[[Any], Any]
"""Gives a value with the other tensors in it, also in lists and tuples; in threads that do not trace, what it is."""


@contextmanager
def exchanged(
    fake: Other, real: Other, mode: overrides.TorchFunctionMode, on: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """For the length of the context, give PyTorch ``fake(value)`` in this thread, and the user's code ``real(value)``.

    Args:
        fake: From what the user's code has to what PyTorch has.
        real: The other way round.
        mode: Which sees all other calls, and which stays where the user's code switches function modes off.
        on: Gives a context in which it is active.
    """
    with ExitStack() as patches:
        for patch in (
            _transforms(fake, real),
            _functions(fake, real),
            _saved(fake, real, on),
            _dispatched(fake, real, on),
            patched(nn.Parameter, "__new__", _parameter_of(fake)),
            attributes_here(torch._C, DisableTorchFunction=lambda: _alone(mode)),
        ):
            patches.enter_context(patch)
        yield


@contextmanager
def _transforms(fake: Other, real: Other) -> Iterator[None]:
    """What ``torch.func`` wraps and unwraps."""
    wrap, unwrap, add = eager_transforms._wrap_for_grad, eager_transforms._unwrap_for_grad, vmap._add_batch_dim
    with (
        patched(eager_transforms, "_wrap_for_grad", lambda tensor, level: wrap(fake(tensor), level)),
        patched(eager_transforms, "_unwrap_for_grad", lambda tensor, level: real(unwrap(tensor, level))),
        patched(vmap, "_add_batch_dim", lambda tensor, *how: add(fake(tensor), *how)),
    ):
        yield


@contextmanager
def _functions(fake: Other, real: Other) -> Iterator[None]:
    """Autograd functions: what they are given, keep and return."""
    utils, thread = torch._functorch.utils, threading.get_ident()
    unwrap, backward, unset = utils.unwrap_dead_wrappers, BackwardCFunction.apply, Function.setup_context
    saved: Any = torch._C._FunctionBase.saved_tensors

    def read(kind: Any, name: str) -> Any:
        found = type.__getattribute__(kind, name)
        if threading.get_ident() != thread or found is unset:
            return found
        if name == "apply":
            return functools.wraps(found)(lambda *args, **kwargs: real(found(*args, **kwargs)))
        if name in ("forward", "setup_context"):
            return functools.wraps(found)(lambda *args, **kwargs: fake(found(*real(args), **kwargs)))
        return found

    def noting(original: Callable[..., None]) -> Callable[..., None]:
        return lambda ctx, *tensors: original(ctx, *fake(tensors))

    with ExitStack() as patches:
        patches.enter_context(attributes_here(utils, unwrap_dead_wrappers=lambda args: unwrap(fake(args))))
        for name in ("save_for_backward", "save_for_forward", "mark_dirty", "mark_non_differentiable"):
            patches.enter_context(patched(FunctionCtx, name, noting(getattr(FunctionCtx, name))))
        patches.enter_context(
            patched(BackwardCFunction, "apply", lambda ctx, *grads: fake(backward(ctx, *real(grads))))
        )
        leave_to_python(read)
        FunctionMeta.__getattribute__ = read  # type: ignore[method-assign]
        patches.callback(delattr, FunctionMeta, "__getattribute__")
        setattr(BackwardCFunction, "saved_tensors", property(lambda ctx: real(saved.__get__(ctx))))  # noqa: B010
        patches.callback(delattr, BackwardCFunction, "saved_tensors")
        yield


def _saved(fake: Other, real: Other, on: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """Hooks on tensors that autograd saves, which it calls while an operator runs."""
    push = torch._C._autograd._push_saved_tensors_default_hooks

    def push_seen(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        def pack_seen(tensor: Any) -> Any:
            with on():
                return pack(real(tensor))

        def unpack_seen(packed: Any) -> Any:
            with on():
                return fake(unpack(packed))

        push(pack_seen, unpack_seen)

    return attributes_here(torch._C._autograd, _push_saved_tensors_default_hooks=push_seen)


def _dispatched(
    fake: Other, real: Other, on: Callable[[], AbstractContextManager[Any]]
) -> AbstractContextManager[None]:
    """Dispatch modes of the user's: on PyTorch's stack is another in the place of each."""

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self, mode: Any) -> None:
            super().__init__()
            self._mode = mode
            self.supports_higher_order_operators = mode.supports_higher_order_operators

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = {key: real(each) for key, each in (kwargs or {}).items()}
            with on():
                return fake(self._mode.__torch_dispatch__(func, types, real(args), kwargs))

    push = _python_dispatch._push_on_torch_dispatch_stack

    def push_seen(mode: Any) -> None:
        is_users = type(mode).__module__.partition(".")[0] not in ("torch", "millstream")
        push(Seen(mode) if is_users else mode)

    return patched(_python_dispatch, "_push_on_torch_dispatch_stack", push_seen)


def _parameter_of(fake: Other) -> Callable[..., Any]:
    new = nn.Parameter.__new__
    return lambda cls, data=None, *how, **kwargs: new(cls, fake(data), *how, **kwargs)


@contextmanager
def _alone(mode: overrides.TorchFunctionMode) -> Iterator[None]:
    """No function mode sees what is called, as within ``torch._C.DisableTorchFunction()``, but for one."""
    others = [overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    overrides._push_mode(mode)
    try:
        with torch._C.DisableTorchFunctionSubclass():
            yield
    finally:
        overrides._pop_mode()
        for other in reversed(others):
            overrides._push_mode(other)
