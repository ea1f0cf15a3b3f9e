"""A kernel that updates several parameters at once keeps the order of its loops, instead of failing an assertion.

Inductor tries whether two kernels can be fused when the loops of one are reordered, and takes for granted that a kernel
consists of single operations. One of several parameters consists of kernels in turn. Without, the whole step is lowered
again without reordering, which costs a third of the time to compile it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode

from millstream._torch.workarounds import Workaround, replaced


@contextlib.contextmanager
def _reorder_single_operations_only() -> Iterator[None]:
    original = FusedSchedulerNode.reorder_loops_by_dep_pair

    def reorder(self: Any, own: Any, other: Any) -> bool:
        return all(isinstance(part, SchedulerNode) for part in self.snodes) and original(self, own, other)

    with replaced(FusedSchedulerNode, "reorder_loops_by_dep_pair", reorder):
        yield


WORKAROUND = Workaround(
    "pytorch#176591",
    "an error on foreach optimizers in one graph with a backward pass, on GPUs",
    until=(2, 12),
    lowering=_reorder_single_operations_only,
)
