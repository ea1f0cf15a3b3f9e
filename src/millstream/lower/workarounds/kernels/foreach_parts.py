"""Items of a list that one kernel computes at once depend on each other.

On GPUs an operator of lists becomes one kernel with a part for each item, and Inductor fuses what comes before or after
an item into its part. It looks at pairs: that another part reads the same values too is not asked.
``torch._foreach_copy_([a, b], [b - c, (b - c) * 2])`` computes ``b - c`` in the part of one, and the other part finds
it, or does not, as it happens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from typing import Any

from torch._inductor.scheduler import ForeachKernelSchedulerNode

from millstream._torch.workarounds import Workaround, replaced

_Part = Sequence[Any]
"""Nodes of the scheduler."""


@contextlib.contextmanager
def _fuse_what_stays_apart() -> Iterator[None]:
    can_fuse = ForeachKernelSchedulerNode.can_fuse

    def can_fuse_apart(producer: Any, consumer: Any) -> bool:
        return can_fuse(producer, consumer) and _are_apart(_parts(producer, consumer))

    with replaced(ForeachKernelSchedulerNode, "can_fuse", staticmethod(can_fuse_apart)):
        yield


def _parts(producer: Any, consumer: Any) -> list[_Part]:
    """Return those that the kernel of both would have."""
    if producer.is_foreach() and consumer.is_foreach():
        return [*zip(producer.snodes, consumer.snodes, strict=True)]
    if consumer.is_foreach():
        joined, added, kernel = consumer.get_consumer_subnode_for(producer), producer, consumer
    else:
        joined, added, kernel = producer.get_producer_subnode_for(consumer), consumer, producer
    return [(node, added) if node is joined else (node,) for node in kernel.snodes]


def _are_apart(parts: Iterable[_Part]) -> bool:
    """Return whether no part reads what another one makes, or memory that another one writes."""
    made_and_read = []
    for part in parts:
        made, read = set[str](), set[str]()
        for node in part:
            real_name = node.scheduler.mutation_real_name
            made.update(node.get_buffer_names())
            made.update(name for output in node.get_outputs() for name in output.get_mutations())
            read.update(
                name for dep in node.read_writes.reads for name in (dep.name, real_name.get(dep.name, dep.name))
            )
        made_and_read.append((made, read))
    return all(made.isdisjoint(read) for (made, _), (_, read) in permutations(made_and_read, 2))


WORKAROUND = Workaround(
    "foreach-parts",
    "wrong items of lists that are made from one value, on GPUs",
    lowering=_fuse_what_stays_apart,
)
