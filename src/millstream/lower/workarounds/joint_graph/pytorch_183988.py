"""``x[torch.randperm(n)]`` compiles, as in mixup.

A pattern of Inductor's looks for ``x[torch.randperm(n)[:k]]``, finds this too, where there is no ``k``, and raises an
error. What it would do is to leave out a check of the indices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor import pattern_matcher

from millstream._torch.workarounds import Workaround, replaced

aten = torch.ops.aten


@contextlib.contextmanager
def _match_no_shuffle() -> Iterator[None]:
    is_match = pattern_matcher.is_match

    def is_match_of_others(match: Any) -> bool:
        return is_match(match) and not _is_shuffle(match)

    with replaced(pattern_matcher, "is_match", is_match_of_others):
        yield


def _is_shuffle(match: Any) -> bool:
    targets = {node.target for node in match.nodes}
    return {aten.index.Tensor, aten.randperm.default} <= targets


WORKAROUND = Workaround(
    "pytorch#183988",
    "an error on a shuffle by randperm",
    tracing=_match_no_shuffle,
    error="slice_shape",
)
