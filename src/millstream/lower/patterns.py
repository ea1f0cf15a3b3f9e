"""A pattern of Inductor's whose check raises an error where it should only not match.

It looks for ``x[torch.randperm(n)[:k]]`` and finds ``x[torch.randperm(n)]`` too, as in mixup, where there is no ``k``:
torch.compile fails there (seen on torch 2.11 and 2.13). What it would do is to leave out a check of the indices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor import pattern_matcher

aten = torch.ops.aten


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
