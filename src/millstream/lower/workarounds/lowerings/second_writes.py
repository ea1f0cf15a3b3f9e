"""A second write in place goes where the first has written.

In ``y = x.clone(); y[rows] = 1; y[mask] = 0`` Inductor has the box of ``y`` hold a new buffer, that of the second
write, instead of writing to the one that is there. The first write, whose target is the box, then goes to the new
buffer, too, and after it: the rows hide what the mask has written, or all of the first write is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

from millstream._torch.workarounds import Workaround, replaced


@contextlib.contextmanager
def _write_where_the_first_has() -> Iterator[None]:
    mutate = lowering.mutate_to

    def mutate_to(changed: Any, val: Any, unsafe_alias: bool = False) -> Any:
        box = changed.data if isinstance(changed, ir.TensorBox) else changed
        is_written = isinstance(box, ir.StorageBox) and ir.try_get_name(box) in V.graph.mutated_buffers
        if not is_written or box.is_input_buffer():
            return mutate(changed, val, unsafe_alias)
        if isinstance(val, ir.TensorBox) and not isinstance(val.data, ir.StorageBox):  # a view
            val = lowering.clone(val)
        ir.MutationLayoutSHOULDREMOVE.realize_into(val, box, unsafe_alias=unsafe_alias)
        return changed

    with replaced(lowering, "mutate_to", mutate_to):
        yield


WORKAROUND = Workaround(
    "second-writes",
    "wrong numbers of what is written in place twice, by index and then by mask",
    lowering=_write_where_the_first_has,
)
