"""A view of a tensor that is a part of a buffer begins where that part begins.

What is concatenated may be computed where the whole has it. Of such a part Inductor's FX wrapper knows no offset: a
transposed part, as a matrix product reads it, was a view of the beginning of the whole. The same holds for what is
computed in place of a part. Inductor's Python wrapper counts from where the part begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor.codegen.wrapper_fxir import FxConverter

from millstream._torch.workarounds import Workaround, replaced


@contextlib.contextmanager
def _count_from_the_part() -> Iterator[None]:
    create = FxConverter._create_as_strided

    def create_there(self: Any, tensor: torch.fx.Node, size: Any, stride: Any, offset: Any) -> torch.fx.Node:
        begin: Any = tensor.args[3] if tensor.target is torch.as_strided else 0
        return create(self, tensor, size, stride, offset + begin)

    with replaced(FxConverter, "_create_as_strided", create_there):
        yield


WORKAROUND = Workaround(
    "parts-of-buffers",
    "wrong numbers of views of a part of what was concatenated, as matrix products read it",
    lowering=_count_from_the_part,
)
