"""C++ kernels that work on tiles write no more than they should.

Inductor computes what is read along one dimension and written along another in tiles of a vector by a vector. Two
faults of that write beside a tile, and behind the end of memory: wrong numbers, or a process that dies later.

- *Sums into places that several threads may meet* (``fold``, ``index_put`` that accumulates): the row within a tile is
  added to the place twice. A transformer with outlook attention (VOLO) gets wrong results. pytorch/pytorch#191837.
- *Reductions whose tiled dimensions have another between them*: the last tile is written as if it were whole.
  pytorch/pytorch#196681.

Both are so under ``torch.compile``, too.

Private API of Inductor's code generation, tried on torch 2.13; the code of 2.11 is the same there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._inductor import config
from torch._inductor.codegen.cpp import CppKernelProxy, CppTile2DKernel, CppVecKernel


@contextlib.contextmanager
def tiles_stay_within() -> Iterator[None]:
    """Generate such kernels right. Not for several threads at once, as ``shortcuts``."""
    store, aggregate = CppTile2DKernel.store, CppKernelProxy.aggregate_reduction_buffers

    def store_once(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
        is_atomic = mode == "atomic_add" and (config.cpp.dynamic_threads or self.num_threads != 1)
        if is_atomic and not self.need_vec_transpose(self.rename_indexing(index)):
            CppVecKernel.store(self, name, index, value, mode)  # finds the row within the tile by itself
        else:
            store(self, name, index, value, mode)

    def aggregate_by_tiles(self: Any, inner_reduces: bool, outer_loop: Any) -> None:
        tiled = next((each.tiling_indices for each in self.kernels if isinstance(each, CppTile2DKernel)), None)
        if tiled is not None:  # the inner of two tiled loops is asked about, and not the one behind the outer
            outer, inner = (self.loop_nest.loops[level] for level in tiled)
            inner_reduces = inner.is_reduction and not outer.is_reduction
        aggregate(self, inner_reduces, outer_loop)

    CppTile2DKernel.store, CppKernelProxy.aggregate_reduction_buffers = store_once, aggregate_by_tiles  # type: ignore[method-assign]
    try:
        yield
    finally:
        CppTile2DKernel.store, CppKernelProxy.aggregate_reduction_buffers = store, aggregate  # type: ignore[method-assign]
