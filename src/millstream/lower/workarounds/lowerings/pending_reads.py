"""Find what reads memory that is written, among Inductor's expressions that are not computed yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from typing import Any
from weakref import WeakKeyDictionary

from torch._inductor import ir
from torch._inductor.dependencies import Dep, extract_read_writes
from torch._inductor.graph import GraphLowering


def read_before(value: Any, written: Set[str], destination: ir.TensorBox | None = None) -> Any:
    """An operator's argument, computed by now where it reads what the operator writes.

    Args:
        value: The argument; anything but a tensor is returned as it is.
        written: Names of the buffers that the operator writes.
        destination: What it writes ``value`` to. What reads that at the same place may stay an expression.
    """

    def reads_written() -> bool:
        own = _reads(destination) if destination is not None else set()
        return any(dep.name in written for dep in _reads(value) - own)

    if not isinstance(value, ir.TensorBox):
        return value
    # Quickly asked: what an expression reads; of what is computed already, what that took to compute, and its own name.
    if written.isdisjoint({*value.get_read_names(), value.maybe_get_name()}):
        return value
    if reads_written():
        value.realize()
        if reads_written():  # it is one of them, or a view of one
            value = ir.Pointwise.create(
                device=value.get_device(),
                dtype=value.get_dtype(),
                inner_fn=value.make_loader(),
                ranges=list(value.get_size()),
            )
            value.realize()
    return value


def _reads(box: ir.TensorBox) -> set[Dep]:
    with ir.patch.object(ir.FlexibleLayout, "allow_indexing", True):
        return set(extract_read_writes(box.make_loader(), box.get_size()).reads)


class _Aliases:
    """Names of buffers of a graph that share memory with another one, by that one's name."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.of: dict[str, list[str]] = defaultdict(list)


_aliases: WeakKeyDictionary[GraphLowering, _Aliases] = WeakKeyDictionary()


def names_of(graph: GraphLowering, name: str) -> set[str]:
    """All names by which the memory of a buffer is read, its own among them; views have none."""
    known = _aliases.setdefault(graph, _Aliases())
    for buffer in graph.buffers[known.num_seen :]:
        for source in buffer.get_inputs_that_alias_output():
            known.of[source].append(buffer.get_name())
    known.num_seen = len(graph.buffers)
    names, new = {name}, [name]
    while new:
        new = [alias for each in new for alias in known.of.get(each, ()) if alias not in names]
        names.update(new)
    return names
