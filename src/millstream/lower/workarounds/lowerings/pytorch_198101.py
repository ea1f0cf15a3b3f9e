"""Read memory by another name before it is written.

A view as a dtype of another size, and of complex numbers as real ones, is a buffer of its own, which shares its input's
memory. Inductor computes what reads a buffer before it is written, but looks for that by the buffer's own name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._inductor.graph import GraphLowering

from millstream._torch.workarounds import Workaround, replaced
from millstream.lower.workarounds.lowerings.pending_reads import names_of


@contextlib.contextmanager
def _compute_readers() -> Iterator[None]:
    mark = GraphLowering.mark_buffer_mutated

    def mark_by_all_names(self: GraphLowering, name: str) -> None:
        mark(self, name)
        for other in names_of(self, name) - {name}:
            for user in self.name_to_users.get(other, ()):
                user.realize()

    with replaced(GraphLowering, "mark_buffer_mutated", mark_by_all_names):
        yield


WORKAROUND = Workaround(
    "pytorch#198101",
    "wrong reads of state as another dtype, or of complex numbers as real ones, where it is written later",
    lowering=_compute_readers,
)
