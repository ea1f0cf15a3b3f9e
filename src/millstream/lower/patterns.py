"""Patterns of Inductor's that match what they should not.

One looks for sums with matrix products, and not at ``alpha``: ``weight.add_(weight.grad, alpha=-0.1)`` adds the whole
gradient where that is a product's result, by torch.compile, too (seen on torch 2.13; pytorch#167313 is the like of it).

Another one raises an error where it should only not match. It looks for ``x[torch.randperm(n)[:k]]`` and finds
``x[torch.randperm(n)]`` too, as in mixup, where there is no ``k``: torch.compile fails there (seen on torch 2.11 and
2.13). What it would do is to leave out a check of the indices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._inductor import pattern_matcher

aten = torch.ops.aten


Decompositions = Mapping[Any, Callable[..., Any]]


def multiply_before_adding(table: Decompositions) -> dict[Any, Callable[..., Any]]:
    """Add to a table of decompositions that sums of scaled tensors are products and sums."""
    upstream = table.get(aten.add.Tensor)

    def add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
        if isinstance(y, torch.Tensor) and alpha != 1 and not isinstance(alpha, bool):
            return x + y * alpha
        return NotImplemented if upstream is None else upstream(x, y, alpha=alpha)

    return {**table, aten.add.Tensor: add}


@contextlib.contextmanager
def shuffles_match_nothing() -> Iterator[None]:
    """For the length of the context, that pattern does not match. Not for several threads at once, as ``shortcuts``."""
    is_match = pattern_matcher.is_match

    def is_match_of_others(match: Any) -> bool:
        return is_match(match) and not _is_shuffle(match)

    pattern_matcher.is_match = is_match_of_others  # type: ignore[assignment]
    try:
        yield
    finally:
        pattern_matcher.is_match = is_match  # type: ignore[assignment]


def _is_shuffle(match: Any) -> bool:
    targets = {node.target for node in match.nodes}
    return {aten.index.Tensor, aten.randperm.default} <= targets
