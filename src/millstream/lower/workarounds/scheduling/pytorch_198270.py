"""A kernel that writes what it reads reads it where it writes it, also where it has been written before.

A read and a write of one buffer may become one kernel where both are at the same place. Inductor looks at reads by the
buffer's own name; those after an earlier write, as of ``index_put_``, have another one, and were not seen:
``t.index_put_(...); t.add_(t.flip(0))`` read what other threads had written. Nor does torch 2.11 see that a write, as
to a list of rows in which one is twice, may meet what another turn of its loop has read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._inductor.dependencies import MemoryDep, WeakDep
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V

from millstream._torch.workarounds import Workaround, replaced
from millstream.lower.workarounds.lowerings.pending_reads import names_of


@contextlib.contextmanager
def _read_where_written() -> Iterator[None]:
    is_fusable = Scheduler.fusable_weak_dep

    def is_fusable_in_place(self: Any, dependency: WeakDep, reader: Any, writer: Any) -> bool:
        return is_fusable(self, dependency, reader, writer) and _is_in_place(self, dependency, reader, writer)

    with replaced(Scheduler, "fusable_weak_dep", is_fusable_in_place):
        yield


def _is_in_place(scheduler: Any, dependency: WeakDep, reader: Any, writer: Any) -> bool:
    names = scheduler.mutation_real_name
    written = names[dependency.mutating_buf]
    aliases = names_of(V.graph, written)
    (write,) = (each for each in writer.read_writes.writes if each.name == dependency.mutating_buf)
    reads = [(names.get(each.name, each.name), each) for node in reader.get_nodes() for each in node.read_writes.reads]
    return set(write.var_names) <= write.index.free_symbols and all(
        isinstance(read, MemoryDep) and (name, read.index, read.size) == (written, write.index, write.size)
        for name, read in reads
        if name in aliases
    )


WORKAROUND = Workaround(
    "pytorch#198270",
    "wrong updates in place that read other places of what was written by index before",
    lowering=_read_where_written,
)
