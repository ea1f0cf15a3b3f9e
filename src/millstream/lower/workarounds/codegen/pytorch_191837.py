"""Sums into places that several threads may meet are added once, also where a C++ kernel works on tiles.

Inductor computes what is read along one dimension and written along another in tiles of a vector by a vector. Where it
adds atomically (``fold``, ``index_put`` that accumulates), the row within a tile is added to the place twice: it writes
beside the tile, and after the end of memory. A transformer with outlook attention (VOLO) gets wrong results, or the
process dies later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._inductor import config
from torch._inductor.codegen.cpp import CppTile2DKernel, CppVecKernel

from millstream._torch.workarounds import Workaround, replaced


@contextlib.contextmanager
def _store_once() -> Iterator[None]:
    store = CppTile2DKernel.store

    def store_once(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
        is_atomic = mode == "atomic_add" and (config.cpp.dynamic_threads or self.num_threads != 1)
        if is_atomic and not self.need_vec_transpose(self.rename_indexing(index)):
            CppVecKernel.store(self, name, index, value, mode)  # finds the row within the tile by itself
        else:
            store(self, name, index, value, mode)

    with replaced(CppTile2DKernel, "store", store_once):
        yield


WORKAROUND = Workaround(
    "pytorch#191837",
    "wrong numbers and writes after the end of memory, of fold and scattered sums on CPUs",
    since=(2, 12),
    lowering=_store_once,
)
