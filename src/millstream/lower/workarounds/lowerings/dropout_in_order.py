"""Let dropout draw the numbers that it draws in eager mode, with ``fallback_random``.

``bernoulli`` with a number, as dropout in place and of channels calls it, was a line of text that cannot be taken for a
kernel: Inductor makes a copy and fills that. Here it is a call of PyTorch's.

Numbers are drawn in the order in which the input lies in memory, which before 2.13 Inductor chose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.lowering import constrain_to_fx_strides, fallback_handler, lowerings
from torch._inductor.virtualized import V

from millstream._torch.workarounds import Workaround

aten = torch.ops.aten


@contextlib.contextmanager
def _draw_as_it_lies() -> Iterator[None]:
    before: dict[Any, Any] = {each: lowerings[each] for each in (aten.bernoulli.p, aten.native_dropout.default)}
    call = fallback_handler(aten.bernoulli.p, add_to_fallback_set=False)
    lowerings[aten.bernoulli.p] = partial(_lower, before[aten.bernoulli.p], call)
    lowerings[aten.native_dropout.default] = partial(_lower, *[before[aten.native_dropout.default]] * 2)
    try:
        yield
    finally:
        lowerings.update(before)


def _lower(usual: Callable[..., Any], in_place: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not config.fallback_random:
        return usual(*args, **kwargs)
    args, kwargs = constrain_to_fx_strides(V.graph.current_node, *args, **kwargs)
    return in_place(*args, **kwargs)


WORKAROUND = Workaround(
    "dropout-in-order",
    "an error on dropout in place or of channels, with fallback_random, and before 2.13 other numbers of any dropout",
    lowering=_draw_as_it_lies,
)
