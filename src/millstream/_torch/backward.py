"""Seeing backward passes before they run. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_lock = threading.Lock()
_thread = threading.local()
_original: list[Any] = []
_num_watching = [0]


@contextmanager
def backward_watched(on_backward: Callable[[Sequence[Any]], object]) -> Iterator[None]:
    """For the length of the context, call ``on_backward`` with the nodes at which a backward of this thread begins.

    Where all of PyTorch's ways to a backward pass meet, a function of its Python part stands; nothing is left there
    once no thread watches.
    """
    watchers = _thread.__dict__.setdefault("watchers", [])
    watchers.append(on_backward)
    with _lock:
        _num_watching[0] += 1
        if _num_watching[0] == 1:
            _original[:] = [torch.autograd._engine_run_backward]  # type: ignore[attr-defined]
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
    roots = [each.grad_fn if isinstance(each, Tensor) else getattr(each, "node", each) for each in tensors]
    for watcher in _thread.__dict__.get("watchers", ()):
        watcher([root for root in roots if root is not None])
    return _original[0](tensors, *args, **kwargs)


def reaches_before(roots: Sequence[Any], number: int) -> bool:
    """Whether a backward from these nodes comes to one that was made before autograd's node of that number."""
    seen, todo = set(roots), [*roots]
    while todo:
        node = todo.pop()
        if node.name() != "torch::autograd::AccumulateGrad" and node._sequence_nr() < number:
            return True
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        todo += new
    return False
