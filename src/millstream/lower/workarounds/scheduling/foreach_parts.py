"""Items of a list that one kernel computes at once depend on each other.

On GPUs an operator of lists becomes one kernel with a part for each item, and Inductor fuses what comes before or after
an item into its part. It looks at pairs: that another part reads the same values too is not asked.
``torch._foreach_copy_([a, b], [b - c, (b - c) * 2])`` computes ``b - c`` in the part of one, and the other part finds
it, or does not, as it happens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch._inductor.scheduler import ForeachKernelSchedulerNode

from millstream._torch.workarounds import Workaround, replaced

_Names = tuple[set[str], set[str]]
"""Of what a node makes, or writes to, and of what it reads."""


@contextlib.contextmanager
def _fuse_what_stays_apart() -> Iterator[None]:
    can_fuse = ForeachKernelSchedulerNode.can_fuse
    known = _Known()

    def can_fuse_apart(producer: Any, consumer: Any) -> bool:
        return can_fuse(producer, consumer) and known.stay_apart(producer, consumer)

    with replaced(ForeachKernelSchedulerNode, "can_fuse", staticmethod(can_fuse_apart)):
        yield


class _Known:
    """What the nodes of the scheduler make and read, by node: a kernel of hundreds of parts grows by one at a time."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Any, tuple[Any, _Names]] = WeakKeyDictionary()
        self._uses: WeakKeyDictionary[Any, _Uses] = WeakKeyDictionary()
        self._grown: dict[
            int, tuple[Any, Any, list[Any], _Uses]
        ] = {}  # by the names that a kernel hands on when it grows

    def stay_apart(self, producer: Any, consumer: Any) -> bool:
        """Return whether the parts of the kernel that both become do not depend on each other."""
        if producer.is_foreach() and consumer.is_foreach():
            pairs = zip(producer.snodes, consumer.snodes, strict=True)
            return _Uses([[self._names_of(node) for node in pair] for pair in pairs]).are_apart
        if consumer.is_foreach():
            joined, added, kernel = consumer.get_consumer_subnode_for(producer), producer, consumer
        else:
            joined, added, kernel = producer.get_producer_subnode_for(consumer), consumer, producer
        if kernel not in self._uses:
            self._uses[kernel] = self._find_uses(kernel)
        place = next(place for place, node in enumerate(kernel.snodes) if node is joined)
        return self._uses[kernel].are_apart_with(self._names_of(added), place)

    def _find_uses(self, kernel: Any) -> _Uses:
        names = kernel.name_to_node
        _, smaller, parts, uses = self._grown.get(id(names), (None, None, [], None))
        new = [place for place, (old, now) in enumerate(zip(parts, kernel.snodes, strict=False)) if old is not now]
        if uses is not None and len(parts) == len(kernel.snodes) and len(new) == 1:
            self._uses.pop(smaller, None)  # which it is no longer of
            had = {*parts[new[0]].get_nodes()}
            for node in kernel.snodes[new[0]].get_nodes():
                if node not in had:
                    uses.add(self._names_of(node), new[0])
        else:
            uses = _Uses([[self._names_of(node)] for node in kernel.snodes])
        self._grown[id(names)] = names, kernel, [*kernel.snodes], uses
        return uses

    def _names_of(self, node: Any) -> _Names:
        dependencies, names = self._names.get(node, (None, None))
        if names is None or dependencies is not node.read_writes:  # they are others once its loops are
            names = _find_names(node)
            self._names[node] = node.read_writes, names
        return names


class _Uses:
    """Which parts of a kernel make a value, or memory, and which read it.

    Args:
        parts: Of the nodes of each part, what they make and read.

    Attributes:
        are_apart: Whether no part reads what another one makes, or memory that another one writes.
    """

    def __init__(self, parts: Sequence[Sequence[_Names]]) -> None:
        self._makers: dict[str, set[int]] = {}
        self._readers: dict[str, set[int]] = {}
        for place, part in enumerate(parts):
            for made, read in part:
                for names, places in ((made, self._makers), (read, self._readers)):
                    for name in names:
                        places.setdefault(name, set()).add(place)
        both = self._makers.keys() & self._readers.keys()
        self.are_apart = not any(
            _has_another(self._makers, name, place) for name in both for place in self._readers[name]
        )

    def add(self, added: _Names, place: int) -> None:
        """Let a part have another node."""
        self.are_apart = self.are_apart_with(added, place)
        for names, places in zip(added, (self._makers, self._readers), strict=True):
            for name in names:
                places.setdefault(name, set()).add(place)

    def are_apart_with(self, added: _Names, place: int) -> bool:
        """Return whether they are still where a part has another node, too."""
        made, read = added
        return self.are_apart and not (
            any(_has_another(self._readers, name, place) for name in made)
            or any(_has_another(self._makers, name, place) for name in read)
        )


def _has_another(places: Mapping[str, set[int]], name: str, place: int) -> bool:
    return bool(places.get(name, set()) - {place})


def _find_names(node: Any) -> _Names:
    real_name = node.scheduler.mutation_real_name
    made = {*node.get_buffer_names(), *(name for output in node.get_outputs() for name in output.get_mutations())}
    return made, {name for dep in node.read_writes.reads for name in (dep.name, real_name.get(dep.name, dep.name))}


WORKAROUND = Workaround(
    "foreach-parts",
    "wrong items of lists that are made from one value, on GPUs",
    lowering=_fuse_what_stays_apart,
)
