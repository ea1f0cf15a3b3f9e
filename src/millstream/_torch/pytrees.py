"""Classes known to PyTorch's own trees, and the parts that these find in them. Tried on 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils import _pytree


def is_registered(kind: type) -> bool:
    """Return whether ``torch.utils._pytree`` takes objects of a class apart."""
    return kind in _pytree.SUPPORTED_NODES


def find_take_apart(kind: type) -> Callable[[Any], tuple[Sequence[Any], Callable[[Sequence[Any]], Any]]] | None:
    """Return what lists the parts of an object of a class, and says how to make one of others.

    ``None`` if nobody knows.
    """
    node = _pytree.SUPPORTED_NODES.get(kind)
    return None if node is None else partial(_take_apart, node.flatten_fn, node.unflatten_fn)


def _take_apart(
    flatten: Callable[[Any], tuple[Any, Any]], unflatten: Callable[[Any, Any], Any], value: Any
) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Any]]:
    parts, context = flatten(value)
    return [*parts], lambda others: unflatten(others, context)
