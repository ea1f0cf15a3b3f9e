"""A float times the whole number 0 is NaN where it was NaN or infinite, as in eager mode.

Inductor writes zeros in its place. A sum of losses, one of them with a weight of 0, would hide that this one diverged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

from millstream._torch.workarounds import Workaround, replaced


@contextlib.contextmanager
def _fold_whole_numbers_only() -> Iterator[None]:
    find = UniformValueConstantFolder._add_peephole_patterns

    def find_whole_numbers(self: Any) -> None:
        find(self)  # nothing else has been replaced yet
        for node in [*self.node_replacements]:
            dtype = node.meta["val"].dtype
            if dtype.is_floating_point or dtype.is_complex:
                del self.node_replacements[node], self.node_replacements_shapes[node]

    with replaced(UniformValueConstantFolder, "_add_peephole_patterns", find_whole_numbers):
        yield


WORKAROUND = Workaround(
    "pytorch#187580",
    "0 instead of NaN where NaN or infinity is multiplied by the whole number 0",
    until=(2, 14),
    tracing=_fold_whole_numbers_only,
)
