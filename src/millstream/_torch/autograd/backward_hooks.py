"""Seeing backward passes before they run. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from millstream._torch.one_thread import leave_to_python

_lock = threading.Lock()
_thread = threading.local()
_original: list[Any] = []
_num_watching = [0]


@contextmanager
def backward_watched(on_backward: Callable[[Sequence[Any]], AbstractContextManager[Any] | None]) -> Iterator[None]:
    """For the length of the context, call ``on_backward`` with the nodes at which a backward of this thread begins.

    The pass runs within the context that it returns, if any.

    Where all of PyTorch's ways to a backward pass meet, a function of its Python part stands; nothing is left there
    once no thread watches.
    """
    watchers = _thread.__dict__.setdefault("watchers", [])
    watchers.append(on_backward)
    with _lock:
        _num_watching[0] += 1
        if _num_watching[0] == 1:
            _original[:] = [torch.autograd._engine_run_backward]  # type: ignore[attr-defined]
            leave_to_python(_run_backward)
            torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined]
    try:
        yield
    finally:
        watchers.remove(on_backward)
        with _lock:
            _num_watching[0] -= 1
            if _num_watching[0] == 0:
                torch.autograd._engine_run_backward = _original[0]  # type: ignore[attr-defined]


def _run_backward(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if not (watchers := _thread.__dict__.get("watchers")):
        return _original[0](tensors, *args, **kwargs)
    roots = [each.grad_fn if isinstance(each, Tensor) else getattr(each, "node", each) for each in tensors]
    with ExitStack() as within:
        for watcher in watchers:
            if (context := watcher([root for root in roots if root is not None])) is not None:
                within.enter_context(context)
        return _original[0](tensors, *args, **kwargs)


def is_active(mode: TorchFunctionMode) -> bool:
    """Return whether a mode sees what this thread calls: not while it handles a call itself. Tried on 2.11 and 2.13."""
    return any(torch._C._get_function_stack_at(i) is mode for i in range(torch._C._len_torch_function_stack()))


def reaches_before(roots: Sequence[Any], number: int) -> bool:
    """Return whether a backward from these nodes comes to one that was made before autograd's node of that number."""
    seen, todo = set(roots), [*roots]
    while todo:
        node = todo.pop()
        if node.name() != "torch::autograd::AccumulateGrad" and node._sequence_nr() < number:
            return True
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        todo += new
    return False
