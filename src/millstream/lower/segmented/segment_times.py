"""Steps 1 and 2 of cutting a graph: when collectives begin, and in which segment everything else is computed."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx

from millstream._torch.distributed.collectives import EXCHANGE, exchange_of

AT_START = -1
"""The number of the segment after which a collective of inputs alone begins."""


class SegmentTimes:
    """What happens when.

    Args:
        gm: The graph that is cut.
        max_cuts: As of ``cut``.

    Attributes:
        nodes: Of the graph.
        inputs: Of the graph, each with its position.
        collectives: In order.
        results: What collectives make of their values.
        remade: Constants, views and sizes, which are made again where they are used instead of crossing.
        before: For each collective whose memory another one has used before it, the last such.
        starts: After which segment each collective begins.
        segment_of: The segment of everything that is computed or written.
    """

    def __init__(self, gm: fx.GraphModule, max_cuts: int) -> None:
        self.nodes = list(gm.graph.nodes)
        self.inputs = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        self.collectives = [node for node in self.nodes if node.target is EXCHANGE]
        self.results = {user for node in self.collectives for user in node.users}
        self.remade = {node for node in self.nodes if node.op == "get_attr" or _is_view(node) or _is_size(node)}
        self.before = _users_of_memory_before(self.collectives)
        self._paced = {node for node in self.collectives if exchange_of(node.args[1]).is_paced}
        self._max_cuts = max_cuts
        self.starts: dict[fx.Node, int] = self._group()
        self.segment_of: dict[fx.Node, int] = {}
        self._assign()

    def is_brought(self, node: fx.Node) -> bool:
        """Whether its values are copied to a collective after a segment, instead of written there by its kernels.

        Such are inputs of the graph as they are, and what would overwrite results of an earlier collective. And what
        is to travel no earlier than needed: kernels would have its memory from the start.
        """
        return node in self.before or node in self._paced or all(value in self.inputs for value in values_of(node))

    def _depends_on(self) -> dict[fx.Node, set[fx.Node]]:
        """Collectives whose results each node needs, directly or by way of others."""
        found: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            needed: set[fx.Node] = set()
            for argument in node.all_input_nodes:
                needed |= found[argument]
                if argument.target is EXCHANGE:
                    needed.add(argument)
            found[node] = needed
        return found

    def _group(self) -> dict[fx.Node, int]:
        """After which segment each collective begins."""
        needs = self._depends_on()
        starts: dict[fx.Node, int] = {}
        at, taken = AT_START, 0
        free = [node for node in self.collectives if not self.is_brought(node)]
        sizes = {node: sum(_num_bytes(value) for value in values_of(node)) for node in free}
        share = sum(sizes.values()) / self._max_cuts if free else 0
        filled = 0.0
        for node in self.collectives:
            is_dependent = any(starts[each] == at for each in needs[node] | {*filter(None, [self.before.get(node)])})
            if node in sizes:
                if at == AT_START or is_dependent or (filled >= share * taken and taken < self._max_cuts):
                    at, taken = at + 1, taken + 1
                filled += sizes[node]
            elif is_dependent or (at == AT_START and not all(value in self.inputs for value in values_of(node))):
                at += 1
            starts[node] = at
        return starts

    def _assign(self) -> None:
        """The segment of everything that is computed or written."""
        starts, segment_of = self.starts, self.segment_of
        deadlines, needs = self._deadlines(), self._depends_on()
        last = max(starts.values()) + 1
        for node in self.nodes:
            if not self._is_computed(node):
                continue
            if node.target is operator.getitem:
                segment_of[node] = segment_of[node.args[0]]
            elif node in deadlines:
                segment_of[node] = max(deadlines[node], 0)
            elif any(starts[each] > AT_START for each in needs[node]):
                segment_of[node] = last
            else:
                there = (self._earliest(argument) for argument in node.all_input_nodes)
                segment_of[node] = max(there, default=0)
        self._put_off(deadlines)
        readers: dict[fx.Node, int] = defaultdict(int)
        for node in self.nodes:
            for root in (root for argument in node.all_input_nodes for root in self._roots(argument)):
                readers[root] = max(readers[root], self._read_at(node))
        writes: dict[Any, fx.Node] = {node.args[0]: node for node in filter(is_write, self.nodes)}
        for target, node in writes.items():
            segment_of[node] = max(self._earliest(node.args[1]), readers[target])
        self._write_after_copying(writes)

    def _write_after_copying(self, writes: dict[Any, fx.Node]) -> None:
        """Write no input before the segment in which it is copied to another one: two that are swapped, in the same."""
        waiting = list(writes.values())
        while waiting:
            copy = waiting.pop()
            for write in (writes[root] for root in self._roots(copy.args[1]) if root in writes):
                if self.segment_of[write] < self.segment_of[copy]:
                    self.segment_of[write] = self.segment_of[copy]
                    waiting.append(write)

    def _put_off(self, deadlines: dict[fx.Node, int]) -> None:
        """Move what comes from inputs of the graph alone to where it is read first: weight decay to the optimizer's.

        Before, it would cross, as a copy as large as all parameters that no kernel of the optimizer is fused with.
        """
        segment_of = self.segment_of
        from_inputs: set[fx.Node] = set()
        for node in self.nodes:
            is_there = node in self.inputs or node.op == "get_attr"
            may_move = node in self.remade or (_is_operation(node) and node not in deadlines)
            if is_there or (may_move and from_inputs.issuperset(node.all_input_nodes)):
                from_inputs.add(node)
        for node in reversed(self.nodes):
            if node in segment_of and node in from_inputs and node.target is not operator.getitem:
                segment_of[node] = max(segment_of[node], self._first_read(node))
        for node in segment_of:
            if node.target is operator.getitem:
                segment_of[node] = segment_of[node.all_input_nodes[0]]

    def _first_read(self, node: fx.Node) -> int:
        """The first segment in which ``node``, or a view or part of it, is read; 0 if a result or a write is."""
        numbers = []
        for user in node.users:
            is_part = user in self.remade or user.target is operator.getitem
            numbers.append(self._first_read(user) if is_part else self.segment_of.get(user, 0))
        return min(numbers, default=0)

    def _is_computed(self, node: fx.Node) -> bool:
        """Return whether a node stands for a kernel.

        Not for an input, a view, a collective, or the write of an input.
        """
        if node.op in ("placeholder", "get_attr", "output") or node.target is EXCHANGE:
            return False
        return not (node in self.results or node in self.remade or is_write(node))

    def _deadlines(self) -> dict[fx.Node, int]:
        """The last segment in which that may be computed which collectives need."""
        deadlines: dict[fx.Node, int] = {}
        for node in reversed(self.nodes):
            own = [self.starts[node]] if node.target is EXCHANGE else []
            known = own + [deadlines[user] for user in node.users if user in deadlines]
            if known:
                deadlines[node] = min(known)
        return deadlines

    def _earliest(self, node: Any) -> int:
        """The first segment in which a value is there."""
        if node in self.results:
            return max(self.starts[node.all_input_nodes[0]] + 1, 0)
        if node in self.remade:
            there = (self._earliest(argument) for argument in node.all_input_nodes)
            return max(there, default=0)
        return self.segment_of.get(node, 0)

    def _roots(self, node: Any) -> list[fx.Node]:
        """The inputs of the whole graph that a view of them, or they themselves, lie in."""
        if node in self.inputs:
            return [node]
        if node in self.remade:
            return [root for argument in node.all_input_nodes for root in self._roots(argument)]
        return []

    def _read_at(self, node: fx.Node) -> int:
        """The last segment in which ``node`` reads its arguments; what a write copies counts later."""
        if node.target is EXCHANGE:  # what is brought is read after that segment
            return self.starts[node] + 1 if self.is_brought(node) else max(self.starts[node], 0)
        if node.op == "output" or is_write(node):
            return 0
        if node in self.remade:
            return max((self._read_at(user) for user in node.users), default=0)
        return self.segment_of.get(node, 0)


def _users_of_memory_before(collectives: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each collective whose memory another one has used before it, the last such."""
    last: dict[int, fx.Node] = {}
    before: dict[fx.Node, fx.Node] = {}
    for node in collectives:
        memory = id(exchange_of(node.args[1]).memory)
        if memory in last:
            before[node] = last[memory]
        last[memory] = node
    return before


def values_of(collective: fx.Node) -> list[Any]:
    """Return what it exchanges."""
    return list(collective.args[0])  # type: ignore[arg-type]


def is_write(node: fx.Node) -> bool:
    """Return whether it writes an input."""
    return node.target is torch.ops.aten.copy_.default and not node.users


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and target.is_view
        and isinstance(node.meta.get("val"), Tensor)
    )


def _is_operation(node: fx.Node) -> bool:
    """Return whether it gives the same whenever it is called, or is a part of what does: it draws no numbers."""
    target = node.target
    if target is operator.getitem:
        return True
    is_known = isinstance(target, torch._ops.OpOverload) and target is not EXCHANGE
    return is_known and torch.Tag.nondeterministic_seeded not in target.tags  # type: ignore[union-attr]


def _is_size(node: fx.Node) -> bool:
    kinds = torch.SymInt, torch.SymFloat, torch.SymBool
    return node.op == "call_function" and isinstance(node.meta.get("val"), kinds)


def _num_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel()) * value.element_size()
