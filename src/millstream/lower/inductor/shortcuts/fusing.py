"""Whether nodes of the scheduler are fused is asked with less work.

Private APIs of Inductor's scheduler; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch._inductor.codegen.wrapper import buffer_reuse_key
from torch._inductor.loop_body import LoopBody
from torch._inductor.scheduler import BaseSchedulerNode, ForeachKernelSchedulerNode, FusedSchedulerNode, Scheduler
from torch.utils._ordered_set import OrderedSet

from millstream._torch.workarounds import replaced


@contextlib.contextmanager
def quick_fusing() -> Iterator[None]:
    """Let the scheduler make loops over other axes once, and ask of memory what a node reads that reads little."""
    with contextlib.ExitStack() as stack:
        if hasattr(LoopBody, "reindex_iter_loops"):  # from torch 2.12 on
            stack.enter_context(replaced(LoopBody, "reindex_iter_loops", _reindex_once(LoopBody.reindex_iter_loops)))
        increases = Scheduler.can_fusion_increase_peak_memory

        def increases_peak(self: Any, node1: Any, node2: Any) -> bool:
            return not _shares_enough(self, node1, node2) and increases(self, node1, node2)

        stack.enter_context(replaced(Scheduler, "can_fusion_increase_peak_memory", increases_peak))
        names_anew: Any = BaseSchedulerNode.get_operation_names

        def names_of_parts(self: Any) -> Any:
            if type(self) not in (FusedSchedulerNode, ForeachKernelSchedulerNode):
                return names_anew(self)
            known = self.__dict__.get("_names_of_parts")  # a kernel that grows has all but one from smaller ones
            if known is None:
                known = self._names_of_parts = OrderedSet()
                for part in self.snodes:
                    known |= part.get_operation_names()
            return known

        stack.enter_context(replaced(BaseSchedulerNode, "get_operation_names", names_of_parts))
        yield


def _reindex_once(reindex: Any) -> Any:
    known: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def reindex_once(self: Any, sizes: Sequence[Any]) -> Any:
        bodies = known.setdefault(self, {})
        key = tuple(sizes)
        if key not in bodies:
            bodies[key] = reindex(self, sizes)
        return bodies[key]

    return reindex_once


def _shares_enough(scheduler: Any, node1: Any, node2: Any) -> bool:
    """Return whether nodes share more than the memory that would be used again if they were not fused."""
    fewer = min(node1, node2, key=lambda node: len(node.read_writes.reads))
    keys = set()
    for read in fewer.read_writes.reads:
        buffer = scheduler.name_to_buf.get(read.name)
        if buffer and len(buffer.users) == 1 and buffer.node.has_tensor_output():
            keys.add(buffer_reuse_key(buffer.node))
    sizes = [key[2] for key in keys]
    if not all(size.isdecimal() for size in sizes):
        return False
    return not sizes or sum(map(int, sizes)) <= 32 * scheduler.score_fusion_memory(node1, node2)
