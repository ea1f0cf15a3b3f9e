"""Cut a graph at its collectives: compute between them is lowered as usual, and they are issued from the host.

**Contract**
- The graph is functional, as AOT autograd makes it: nothing is written but inputs, by ``copy_`` whose results nobody
  uses. Cut, it does the same.
- Collectives begin in the order in which they stand in the graph, which is that of all processes.
- Nothing of what a collective needs waits for one that comes later: while it travels, the rest is computed.
- Collectives may use the same memory, one after another. Values of a later one come to it when the segment before is
  over, as kernels of that segment may still read results of the earlier one there.

**Steps**
1. Find after which segment each collective begins: as many as come in one go share a segment (``groups``).
2. Put what a collective needs before it, what needs a result of one last, and the rest as early as it can be. So is
   what needs results of those alone that begin at the start, as buffers do: statistics are updated where they are made.
   What comes from inputs alone moves to where it is read.
3. Write each segment's graph. What crosses are results of kernels: views are made again where they are used. Values
   that are exchanged are copied into the collective's memory by the segment that ends before it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from millstream._torch.distributed.collectives import EXCHANGE, exchange_of
from millstream.errors import LoweringError

AT_START = -1
"""The number of the segment after which a collective of inputs alone begins."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The computation between collectives.

    Attributes:
        graph: Of kernels alone; ``None`` where there is nothing to compute.
        inputs: Where each input comes from, a position in ``Segments``' list of values.
        outputs: Where each output goes, likewise.
        results: Positions among ``outputs`` of those that are results of the whole graph.
        waits: Collectives, counted from 0, whose results it reads.
        brings: Collectives that begin after it and whose values are copied to them after it, and from where.
        starts: Collectives that begin after it.
    """

    graph: fx.GraphModule | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    results: frozenset[int]
    waits: tuple[int, ...]
    brings: tuple[tuple[int, tuple[int, ...]], ...]
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segments:
    """A graph that is cut.

    While it runs there is a list of values: the inputs of the whole graph, then of each collective in turn the parts of
    its memory where its results are and those where its values go, then what crosses from segment to segment.

    Attributes:
        keys: Of the collectives, in the order in which they begin.
        num_inputs: Of the whole graph.
        num_views: Parts of memory of all collectives together.
        num_values: Length of the list of values.
        segments: In the order in which they run.
        outputs: Results of the whole graph: whether it is a position in the list of values, and that or a plain value.
        updates: What is done with what was exchanged; see ``updates_of``.
    """

    keys: tuple[int, ...]
    num_inputs: int
    num_views: int
    num_values: int
    segments: tuple[Segment, ...]
    outputs: tuple[tuple[bool, Any], ...]
    updates: tuple[str, ...] = ()


def has_collectives(graph: fx.Graph) -> bool:
    """Return whether there is anything to cut at."""
    return bool(graph.find_nodes(op="call_function", target=EXCHANGE))


def cut(gm: fx.GraphModule, max_cuts: int) -> Segments:
    """Cut a graph.

    Args:
        gm: Functional but for ``copy_`` into its inputs.
        max_cuts: Collectives begin after at most so many segments, beside those that depend on earlier ones.

    Raises:
        LoweringError: What would have to cross is no tensor.
    """
    _drop_copies_of_same_layout(gm)
    return _Cutter(gm, max_cuts).run()


class _Cutter:
    def __init__(self, gm: fx.GraphModule, max_cuts: int) -> None:
        self._gm = gm
        self._nodes = list(gm.graph.nodes)
        self._placeholders = [node for node in self._nodes if node.op == "placeholder"]
        self._collectives = [node for node in self._nodes if node.target is EXCHANGE]
        self._number = {node: number for number, node in enumerate(self._collectives)}
        self._first_view: dict[fx.Node, int] = {}
        self._first_sent: dict[fx.Node, int] = {}
        self._view_of: dict[fx.Node, int] = {}  # what a collective makes of its values -> place in the list of values
        self._place = {node: place for place, node in enumerate(self._placeholders)}
        place = len(self._placeholders)
        for node in self._collectives:
            for user in node.users:
                self._view_of[user] = place + int(user.args[1])
            self._first_view[node] = place
            self._first_sent[node] = place + len(node.meta["val"])
            place = self._first_sent[node] + len(_values(node))
        self._num_views = place - len(self._placeholders)
        self._num_values = place
        # Constants, views and sizes are made again where they are used instead of crossing.
        self._remade = {node for node in self._nodes if node.op == "get_attr" or _is_view(node) or _is_size(node)}
        self._crossing: dict[fx.Node, int] = {}
        self._results: set[int] = set()
        self._max_cuts = max_cuts
        self._paced = {node for node in self._collectives if exchange_of(node.args[1]).is_paced}
        self._before = _users_of_memory_before(self._collectives)
        self._after = {before: node for node, before in self._before.items()}

    def run(self) -> Segments:
        self._starts = self._group()
        self._segment_of = self._assign(self._starts)
        last = max(*self._starts.values(), *self._segment_of.values(), max(self._starts.values()) + 1)
        self._writers = [_Writer(self._gm, number) for number in range(last + 1)]
        computed = [node for node in self._nodes if node in self._segment_of]
        for node in (node for node in computed if not _is_write(node)):
            self._need(self._writers[self._segment_of[node]], node)
        for node in self._collectives:
            if not self._is_brought(node):
                self._writers[self._starts[node]].copy_into(node, self._first_sent[node], self._need)
        self._brought = {
            node: tuple(self._place_after(value, self._starts[node]) for value in _values(node))
            for node in self._collectives
            if self._is_brought(node)
        }
        outputs = tuple(map(self._output, self._nodes[-1].args[0]))
        for node in filter(_is_write, computed):  # after all that reads the input
            self._need(self._writers[self._segment_of[node]], node)
        first = Segment(None, (), (), frozenset(), (), self._brought_after(AT_START), self._started_after(AT_START))
        segments = tuple(map(self._segment, self._writers))
        return Segments(
            keys=tuple(int(node.args[1]) for node in self._collectives),
            num_inputs=len(self._placeholders),
            num_views=self._num_views,
            num_values=self._num_values,
            segments=(first, *segments) if first.starts else segments,
            outputs=outputs,
        )

    def _need(self, writer: _Writer, node: fx.Node) -> fx.Node:
        """The node in a segment that stands for ``node``: computed there, made again, or an input of the segment."""
        known = writer.made.get(node)
        if known is not None:
            return known
        end = self._end_of_result(node)
        if end is not None and end < writer.number:
            return writer.add_input(node, self._cross(node, self._writers[end]))
        place = self._place.get(node, self._view_of.get(node))
        if place is not None:
            return writer.add_input(node, place)
        if node in self._remade or self._segment_of[node] == writer.number:
            return writer.copy(node, lambda argument: self._need(writer, argument))
        return writer.add_input(node, self._cross(node, self._writers[self._segment_of[node]]))

    def _cross(self, node: fx.Node, maker: _Writer) -> int:
        """The place of a value that comes out of a segment, for others to read."""
        if not isinstance(node.meta.get("val"), Tensor):
            raise LoweringError(f"{node} would have to cross a collective.", construct=str(node.target))
        if node not in self._crossing:
            self._crossing[node] = self._new_place()
            made = self._need(maker, node)
            base = node
            while base in self._remade and base.all_input_nodes:
                base = base.all_input_nodes[0]
            if base in self._view_of or base in self._place:  # memory that may be written before others read it
                made = maker.clone(node, made)
            maker.outputs.append((self._crossing[node], made))
        return self._crossing[node]

    def _end_of_result(self, node: fx.Node) -> int | None:
        """The last segment that finds a result in the memory of its collective; ``None``: all do."""
        if node not in self._view_of:
            return None
        later = self._after.get(node.all_input_nodes[0])
        return None if later is None else self._starts[later]

    def _place_after(self, value: fx.Node, segment: int) -> int:
        """Return where a value is when that segment is over: in an input that has been given it, or what comes out."""
        if value in self._place:
            return self._place[value]
        for user in filter(_is_write, value.users):
            target = user.args[0]
            if user.args[1] is value and target in self._place and self._segment_of[user] <= segment:
                return self._place[target]  # type: ignore[index]
        return self._cross(value, self._writers[self._segment_of.get(value, segment)])

    def _new_place(self) -> int:
        self._num_values += 1
        return self._num_values - 1

    def _is_brought(self, node: fx.Node) -> bool:
        """Whether its values are copied to a collective after a segment, instead of written there by its kernels.

        Such are inputs of the graph as they are, and what would overwrite results of an earlier collective. And what
        is to travel no earlier than needed: kernels would have its memory from the start.
        """
        return node in self._before or node in self._paced or all(value in self._place for value in _values(node))

    def _depends_on(self) -> dict[fx.Node, set[fx.Node]]:
        """Collectives whose results each node needs, directly or by way of others."""
        found: dict[fx.Node, set[fx.Node]] = {}
        for node in self._nodes:
            needed: set[fx.Node] = set()
            for argument in node.all_input_nodes:
                needed |= found[argument]
                if argument in self._number:
                    needed.add(argument)
            found[node] = needed
        return found

    def _group(self) -> dict[fx.Node, int]:
        """After which segment each collective begins."""
        needs = self._depends_on()
        starts: dict[fx.Node, int] = {}
        at, taken = AT_START, 0
        free = [node for node in self._collectives if not self._is_brought(node)]
        sizes = {node: sum(_num_bytes(value) for value in _values(node)) for node in free}
        share = sum(sizes.values()) / self._max_cuts if free else 0
        filled = 0.0
        for node in self._collectives:
            is_dependent = any(starts[each] == at for each in needs[node] | {*filter(None, [self._before.get(node)])})
            if node in sizes:
                if at == AT_START or is_dependent or (filled >= share * taken and taken < self._max_cuts):
                    at, taken = at + 1, taken + 1
                filled += sizes[node]
            elif is_dependent or (at == AT_START and not all(value in self._place for value in _values(node))):
                at += 1
            starts[node] = at
        return starts

    def _assign(self, starts: dict[fx.Node, int]) -> dict[fx.Node, int]:
        """The segment of everything that is computed or written."""
        deadlines, needs = self._deadlines(starts), self._depends_on()
        last = max(starts.values()) + 1
        segment_of: dict[fx.Node, int] = {}
        for node in self._nodes:
            if not self._is_computed(node):
                continue
            if node.target is operator.getitem:
                segment_of[node] = segment_of[node.args[0]]
            elif node in deadlines:
                segment_of[node] = max(deadlines[node], 0)
            elif any(starts[each] > AT_START for each in needs[node]):
                segment_of[node] = last
            else:
                there = (self._earliest(argument, segment_of, starts) for argument in node.all_input_nodes)
                segment_of[node] = max(there, default=0)
        self._put_off(segment_of, deadlines)
        readers: dict[fx.Node, int] = defaultdict(int)
        for node in self._nodes:
            for root in (root for argument in node.all_input_nodes for root in self._roots(argument)):
                readers[root] = max(readers[root], self._read_at(node, segment_of, starts))
        writes: dict[Any, fx.Node] = {node.args[0]: node for node in filter(_is_write, self._nodes)}
        for target, node in writes.items():
            segment_of[node] = max(self._earliest(node.args[1], segment_of, starts), readers[target])
        self._write_after_copying(writes, segment_of)
        return segment_of

    def _write_after_copying(self, writes: dict[Any, fx.Node], segment_of: dict[fx.Node, int]) -> None:
        """Write no input before the segment in which it is copied to another one: two that are swapped, in the same."""
        waiting = list(writes.values())
        while waiting:
            copy = waiting.pop()
            for write in (writes[root] for root in self._roots(copy.args[1]) if root in writes):
                if segment_of[write] < segment_of[copy]:
                    segment_of[write] = segment_of[copy]
                    waiting.append(write)

    def _put_off(self, segment_of: dict[fx.Node, int], deadlines: dict[fx.Node, int]) -> None:
        """Move what comes from inputs of the graph alone to where it is read first: weight decay to the optimizer's.

        Before, it would cross, as a copy as large as all parameters that no kernel of the optimizer is fused with.
        """
        from_inputs: set[fx.Node] = set()
        for node in self._nodes:
            is_there = node in self._place or node.op == "get_attr"
            may_move = node in self._remade or (_is_operation(node) and node not in deadlines)
            if is_there or (may_move and from_inputs.issuperset(node.all_input_nodes)):
                from_inputs.add(node)
        for node in reversed(self._nodes):
            if node in segment_of and node in from_inputs and node.target is not operator.getitem:
                segment_of[node] = max(segment_of[node], self._first_read(node, segment_of))
        for node in segment_of:
            if node.target is operator.getitem:
                segment_of[node] = segment_of[node.all_input_nodes[0]]

    def _first_read(self, node: fx.Node, segment_of: dict[fx.Node, int]) -> int:
        """The first segment in which ``node``, or a view or part of it, is read; 0 if a result or a write is."""
        numbers = []
        for user in node.users:
            is_part = user in self._remade or user.target is operator.getitem
            numbers.append(self._first_read(user, segment_of) if is_part else segment_of.get(user, 0))
        return min(numbers, default=0)

    def _is_computed(self, node: fx.Node) -> bool:
        """Return whether a node stands for a kernel.

        Not for an input, a view, a collective, or the write of an input.
        """
        if node.op in ("placeholder", "get_attr", "output") or node.target is EXCHANGE:
            return False
        return not (node in self._view_of or node in self._remade or _is_write(node))

    def _deadlines(self, starts: dict[fx.Node, int]) -> dict[fx.Node, int]:
        """The last segment in which that may be computed which collectives need."""
        deadlines: dict[fx.Node, int] = {}
        for node in reversed(self._nodes):
            own = [starts[node]] if node.target is EXCHANGE else []
            known = own + [deadlines[user] for user in node.users if user in deadlines]
            if known:
                deadlines[node] = min(known)
        return deadlines

    def _earliest(self, node: Any, segment_of: dict[fx.Node, int], starts: dict[fx.Node, int]) -> int:
        """The first segment in which a value is there."""
        if node in self._view_of:
            return max(starts[node.all_input_nodes[0]] + 1, 0)
        if node in self._remade:
            there = (self._earliest(argument, segment_of, starts) for argument in node.all_input_nodes)
            return max(there, default=0)
        return segment_of.get(node, 0)

    def _roots(self, node: Any) -> list[fx.Node]:
        """The inputs of the whole graph that a view of them, or they themselves, lie in."""
        if node in self._place:
            return [node]
        if node in self._remade:
            return [root for argument in node.all_input_nodes for root in self._roots(argument)]
        return []

    def _read_at(self, node: fx.Node, segment_of: dict[fx.Node, int], starts: dict[fx.Node, int]) -> int:
        """The last segment in which ``node`` reads its arguments; what a write copies counts later."""
        if node.target is EXCHANGE:  # what is brought is read after that segment
            return starts[node] + 1 if self._is_brought(node) else max(starts[node], 0)
        if node.op == "output" or _is_write(node):
            return 0
        if node in self._remade:
            return max((self._read_at(user, segment_of, starts) for user in node.users), default=0)
        return segment_of.get(node, 0)

    def _output(self, value: Any) -> tuple[bool, Any]:
        """Return where a result of the whole graph comes from."""
        if not isinstance(value, fx.Node):
            return False, value
        if value in self._place:
            return True, self._place[value]
        base = value
        while base in self._remade and base.all_input_nodes:
            base = base.all_input_nodes[0]
        writer = self._writers[self._segment_of.get(base, len(self._writers) - 1)]
        place = self._crossing.get(value)
        if place is None:
            place, made = self._new_place(), self._need(writer, value)
            if base in self._view_of:  # the collective's memory, which the next call uses again
                made = writer.clone(value, made)
            writer.outputs.append((place, made))
        self._results.add(place)
        return True, place

    def _started_after(self, segment: int) -> tuple[int, ...]:
        return tuple(self._number[node] for node in self._collectives if self._starts[node] == segment)

    def _brought_after(self, segment: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return tuple(
            (self._number[node], places) for node, places in self._brought.items() if self._starts[node] == segment
        )

    def _segment(self, writer: _Writer) -> Segment:
        owner = {
            self._first_view[node] + index: self._number[node]
            for node in self._collectives
            for index in range(len(node.meta["val"]))
        }
        places = tuple(place for place, _ in writer.outputs)
        return Segment(
            graph=writer.finish(),
            inputs=tuple(writer.inputs),
            outputs=places,
            results=frozenset(index for index, place in enumerate(places) if place in self._results),
            waits=tuple(sorted({owner[place] for place in writer.inputs if place in owner})),
            brings=self._brought_after(writer.number),
            starts=self._started_after(writer.number),
        )


class _Writer:
    """Writes the graph of one segment."""

    def __init__(self, gm: fx.GraphModule, number: int) -> None:
        self._gm, self.number = gm, number
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.inputs: list[int] = []
        self.outputs: list[tuple[int, fx.Node]] = []
        self._end_of_inputs: fx.Node = self.graph._root

    def add_input(self, node: fx.Node, place: int) -> fx.Node:
        with self.graph.inserting_after(self._end_of_inputs):
            made = self.graph.placeholder(node.name)
        made.meta = dict(node.meta)
        self._end_of_inputs = self.made[node] = made
        self.inputs.append(place)
        return made

    def copy(self, node: fx.Node, get: Any) -> fx.Node:
        for argument in node.all_input_nodes:
            get(argument)
        made = self.made[node] = self.graph.node_copy(node, get)
        return made

    def clone(self, node: fx.Node, made: fx.Node) -> fx.Node:
        made = self.graph.call_function(torch.ops.aten.clone.default, (made,))
        made.meta = {**node.meta, "val": torch.empty_like(node.meta["val"])}
        return made

    def copy_into(self, collective: fx.Node, first_sent: int, need: Any) -> None:
        """Copy what is exchanged into the memory of the collective."""
        results = {user.args[1]: user for user in collective.users}
        sent = exchange_of(collective.args[1]).sent
        for index, (value, part) in enumerate(zip(_values(collective), sent, strict=True)):
            source = need(self, value)
            with self.graph.inserting_after(self._end_of_inputs):
                target = self.graph.placeholder(f"exchanged_{first_sent + index}")
            like = value.meta["val"].new_empty_strided(part.shape, part.stride(), dtype=part.dtype)
            target.meta = {"val": like}
            self._end_of_inputs = target
            self.inputs.append(first_sent + index)
            copy = self.graph.call_function(torch.ops.aten.copy_.default, (target, source))
            copy.meta = {"val": like, **_lines(results.get(index, collective))}

    def finish(self) -> fx.GraphModule | None:
        if all(node.op in ("placeholder", "get_attr") for node in self.graph.nodes) and not self.outputs:
            return None
        output = self.graph.output(tuple(node for _, node in self.outputs))
        output.meta["user_visible_output_idxs"] = list(range(len(self.outputs)))
        output.meta["original_output_strides"] = [node.meta["val"].stride() for _, node in self.outputs]
        self.graph.lint()
        return fx.GraphModule(self._gm, self.graph)


def _drop_copies_of_same_layout(gm: fx.GraphModule) -> None:
    """Take what is copied instead of a copy that lies in memory the same way.

    To copy in place has become ``copy(of, source)``, of which ``of`` says nothing but how the result lies in memory.
    Where strides are equal it is gone already. Where they differ for dimensions of one element alone, as between a
    pointwise convolution's weight and its gradient, the gradient would cross the cut for nothing.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default):
        source = node.args[1]
        given = source.meta.get("val") if isinstance(source, fx.Node) else None
        if isinstance(given, Tensor) and _form(given) == _form(node.meta["val"]):
            node.replace_all_uses_with(source, lambda user: user.op != "output")
            if not node.users:
                gm.graph.erase_node(node)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Return what kernels can tell of a tensor beside its values.

    Strides of dimensions with one element they cannot.
    """
    strides = [stride for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length != 1]
    return tensor.dtype, tensor.device, tuple(tensor.shape), strides


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


def _values(collective: fx.Node) -> list[Any]:
    """Return what it exchanges."""
    return list(collective.args[0])  # type: ignore[arg-type]


def _lines(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("stack_trace",) if key in node.meta}


def _is_write(node: fx.Node) -> bool:
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
