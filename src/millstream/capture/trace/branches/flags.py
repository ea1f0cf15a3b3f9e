"""Branches on flags that the user's state keeps, such as a buffer that tells whether a codebook has its first values.

What a step computes of such alone comes out alike for as long as nobody changes them. So a graph is recorded for one
outcome, and holds where that is the outcome again, which is asked before each replay, as eager code asks it.

**Contract**
- A flag is a tensor of one element, or few, that the graph does not write; what is asked draws nothing.
- Where the step writes one, it runs as plain Python once, since that may be the only time; after that, its branches on
  this flag are taken both ways, as all others are.
- The host waits for a device to know one only where the step cannot be captured with both ways.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DisableTorchFunction  # itself: a trace puts another in its place

from millstream._torch.tensors import call_plainly, real_tensors, storage_id
from millstream._torch.tracing import node_of
from millstream.capture.lines import here, stopped_at
from millstream.capture.state.lift import Lifted
from millstream.passes.cleanup import storages_written_by

MOST_ELEMENTS = 16
MOST_OPERATORS = 16
"""From flags to what is asked: they run before each replay, one by one."""

_NAMESPACES = frozenset({"aten", "prims"})


@dataclass(frozen=True, slots=True, eq=False)
class StateFlag:
    """A branch on what the state keeps."""

    entries: Sequence[Lifted]  # what it depends on
    ask: Callable[[Sequence[Tensor]], Any]  # given their tensors
    outcome: bool  # for which the graph holds
    where: str  # the user's line

    @property
    def name(self) -> str:
        """Of what it depends on, for people."""
        return " and ".join(entry.name for entry in self.entries)

    @property
    def waits(self) -> bool:
        """Whether asking waits for a device."""
        return any(entry.tensor.device.type != "cpu" for entry in self.entries)

    def now(self) -> bool:
        """How it comes out now."""
        return bool(call_plainly(self.ask, [entry.tensor for entry in self.entries]))

    @property
    def storages(self) -> frozenset[int]:
        """The memory of what it depends on."""
        return frozenset(storage_id(entry.tensor) for entry in self.entries)

    @property
    def key(self) -> Any:
        """What tells this branch from others, with its outcome."""
        return "flag", self.where, self.storages, self.outcome


@dataclass
class StateFlags:
    """The flags of one trace.

    Args:
        state: Tensors of the user's that live from call to call; the graph's first inputs, in this order.
        unsteady: Memory of those that the step writes.
        may_wait: Whether to use those on a device.

    Attributes:
        asked: Those for whose outcomes the trace holds.
        met: Those, and others whose branches go both ways.
    """

    state: Sequence[Lifted]
    unsteady: Set[int] = frozenset()
    may_wait: bool = False
    asked: list[StateFlag] = field(default_factory=list)
    met: list[StateFlag] = field(default_factory=list)

    def outcome(self, value: Tensor) -> bool | None:
        """The outcome with which the trace goes on; ``None`` where it does not depend on flags alone."""
        node = node_of(value)
        if node is None or stopped_at() is not None or (flag := self._flag(node)) is None:
            return None
        self.met.append(flag)
        if flag.storages & self.unsteady or (flag.waits and not self.may_wait):
            return None
        self.asked.append(flag)
        return flag.outcome

    def _flag(self, asked: fx.Node) -> StateFlag | None:
        graph = asked.graph
        inputs = graph.find_nodes(op="placeholder")
        entries = dict(zip(inputs, self.state, strict=False))
        needed, open_nodes = {asked}, [asked]
        while open_nodes and len(needed) <= MOST_OPERATORS:
            new = {*open_nodes.pop().all_input_nodes} - needed
            needed |= new
            open_nodes += new
        if open_nodes or not all(_is_followed(node, entries) for node in needed):
            return None
        found = [entries[node] for node in inputs if node in needed]
        storages = {storage_id(node.meta["val"]) for node in needed}
        if not found or not storages.isdisjoint(storages_written_by(graph.nodes)):
            return None
        ask = _truth if asked in entries else _program(asked, needed)
        flag = StateFlag(found, ask, outcome=False, where=here())
        with real_tensors(), DisableTorchFunction():
            return StateFlag(found, ask, outcome=flag.now(), where=flag.where)


def _is_followed(node: fx.Node, entries: dict[fx.Node, Lifted]) -> bool:
    """Whether a node is a flag, or what can be computed of some before each replay."""
    if not isinstance(node.meta.get("val"), Tensor):
        return False
    if node.op == "placeholder":
        tensor = entries[node].tensor if node in entries else None
        return tensor is not None and type(tensor).__module__ in _PLAIN and 0 < tensor.numel() <= MOST_ELEMENTS
    target: Any = node.target
    return (
        node.op == "call_function"
        and getattr(target, "namespace", "") in _NAMESPACES
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


_PLAIN = frozenset({"torch", "torch.nn.parameter"})
"""Modules of the classes of plain tensors, parameters and buffers."""


def _truth(tensors: Sequence[Tensor]) -> bool:
    return bool(tensors[0])


def _program(asked: fx.Node, needed: set[fx.Node]) -> Callable[[Sequence[Tensor]], Any]:
    """What computes a node of its flags."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in asked.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[asked])
    return functools.partial(_run, fx.GraphModule({}, graph).forward)


def _run(program: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    return program(*tensors)
