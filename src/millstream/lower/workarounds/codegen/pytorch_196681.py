"""Reductions in tiles write no more of the last tile than there is.

Where the two tiled dimensions of a C++ kernel have another between them, Inductor takes the last tile for a whole one:
the write ends after the end of memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._inductor.codegen.cpp import CppKernelProxy, CppTile2DKernel

from millstream._torch.workarounds import Workaround, replaced


@contextlib.contextmanager
def _aggregate_by_tiles() -> Iterator[None]:
    aggregate = CppKernelProxy.aggregate_reduction_buffers

    def aggregate_by_tiles(self: Any, inner_reduces: bool, outer_loop: Any) -> None:
        tiled = next((each.tiling_indices for each in self.kernels if isinstance(each, CppTile2DKernel)), None)
        if tiled is not None:  # the inner of two tiled loops is asked about, and not the one after the outer
            outer, inner = (self.loop_nest.loops[level] for level in tiled)
            inner_reduces = inner.is_reduction and not outer.is_reduction
        aggregate(self, inner_reduces, outer_loop)

    with replaced(CppKernelProxy, "aggregate_reduction_buffers", aggregate_by_tiles):
        yield


WORKAROUND = Workaround(
    "pytorch#196681",
    "wrong numbers and writes after the end of memory, of sums in tiles on CPUs",
    lowering=_aggregate_by_tiles,
)
