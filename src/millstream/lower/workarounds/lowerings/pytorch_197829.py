"""An update in place reads other places than it writes before it writes any.

``x[1:] = x[:-1].clone()`` loses its clone, which changes nothing while the graph is functional, and then becomes a copy
from ``x`` to ``x`` that reads what it has just written. So does CutMix, ``x[:, :, a:b] = x.flip(0)[:, :, a:b]``. What
is written by an index can be anywhere: neither the values nor the index may be read meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

from millstream._torch.workarounds import Workaround, replaced
from millstream.lower.workarounds.lowerings.pending_reads import names_of, read_before


@contextlib.contextmanager
def _read_before_writing() -> Iterator[None]:
    mutate, put = lowering.mutate_to, lowering.index_put_impl_

    def read_then_mutate(changed: Any, val: Any, unsafe_alias: bool = False) -> Any:
        if not unsafe_alias:  # as operators of lists do: see ``foreach_reads``
            val = read_before(val, _written(changed, [val]), changed)
        return mutate(changed, val, unsafe_alias)

    def read_then_put(
        self: Any, indices: Sequence[Any], values: Any, accumulate: bool, check: bool, may_realize: bool = False
    ) -> Any:
        if may_realize:  # and is not a copy already
            written = _written(self, [*indices, values])
            indices = [read_before(index, written) for index in indices]
            values = read_before(values, written)
        return put(self, indices, values, accumulate, check, may_realize)

    with replaced(lowering, "mutate_to", read_then_mutate), replaced(lowering, "index_put_impl_", read_then_put):
        yield


def _written(changed: ir.TensorBox, read: Sequence[Any]) -> set[str]:
    """Names of the buffer that is written, if there is one yet; there is if what is read is of the same memory."""
    if any(_memory_of(each) is _memory_of(changed) for each in read):
        changed.realize()
    name = changed.maybe_get_name()
    return set() if name is None else names_of(V.graph, name)


def _memory_of(value: Any) -> Any:
    while isinstance(value, (ir.TensorBox, ir.BaseView)):
        value = value.data
    return value


WORKAROUND = Workaround(
    "pytorch#197829",
    "wrong updates in place that read other places of what they write, as `x[1:] = x[:-1].clone()`",
    lowering=_read_before_writing,
)
