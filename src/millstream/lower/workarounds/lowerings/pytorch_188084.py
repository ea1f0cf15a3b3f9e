"""Elements that share memory get memory of their own before one of them is written.

``index_put`` and its like may write into what they are given where nobody reads it later. Inductor looks for readers,
and not whether that has as much memory as elements: where it was expanded, as by ``vmap`` over the gradient of
``index_select``, each row gets the sum of all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._inductor.fx_passes import reinplace

from millstream._torch.compiler.symbols import may_overlap_itself
from millstream._torch.workarounds import Workaround, replaced


@contextlib.contextmanager
def _write_into_memory_for_all() -> Iterator[None]:
    upstream = reinplace.inplaceable_ops
    careful = {target: replace(each, extra_check=partial(_may_write, each)) for target, each in upstream.items()}
    with replaced(reinplace, "inplaceable_ops", careful):
        yield


def _may_write(operator: reinplace.InplaceableOp, node: torch.fx.Node) -> bool:
    values = (part.meta.get("val") for part in _written(operator, node) if isinstance(part, torch.fx.Node))
    is_shared = any(isinstance(value, torch.Tensor) and may_overlap_itself(value) for value in values)
    return not is_shared and operator.extra_check(node)


def _written(operator: reinplace.InplaceableOp, node: torch.fx.Node) -> list[Any]:
    first = 0 if node.target in reinplace.inplaceable_ops else 2  # within an operator with effects, after that itself
    return [node.args[first + position] for position in operator.mutated_args]


WORKAROUND = Workaround(
    "pytorch#188084",
    "wrong numbers of what is written by index into an expanded tensor, as of vmap over gradients of index_select",
    lowering=_write_into_memory_for_all,
)
