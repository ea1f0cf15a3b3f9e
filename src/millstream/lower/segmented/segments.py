"""Cut a graph at its collectives: compute between them is lowered as usual, and they are issued from the host.

**Contract**
- The graph is functional, as AOT autograd makes it: nothing is written but inputs, by ``copy_`` whose results nobody
  uses. Cut, it does the same.
- Collectives begin in the order in which they stand in the graph, which is that of all processes.
- Nothing of what a collective needs waits for one that comes later: while it travels, the rest is computed.
- Collectives may use the same memory, one after another. Values of a later one come to it when the segment before is
  over, as kernels of that segment may still read results of the earlier one there.

**Steps** (1 and 2: ``segment_times.py``)
1. Find after which segment each collective begins: as many as come in one go share a segment (``groups``).
2. Put what a collective needs before it, what needs a result of one last, and the rest as early as it can be. So is
   what needs results of those alone that begin at the start, as buffers do: statistics are updated where they are made.
   What comes from inputs alone moves to where it is read.
3. Write each segment's graph. What crosses are results of kernels: views are made again where they are used. Values
   that are exchanged are copied into the collective's memory by the segment that ends before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from millstream._torch.distributed.collectives import EXCHANGE, exchange_of
from millstream.errors import LoweringError
from millstream.lower.segmented.segment_times import AT_START, SegmentTimes, is_write, values_of


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
        times = SegmentTimes(gm, max_cuts)
        self._nodes, self._collectives = times.nodes, times.collectives
        self._place, self._remade = times.inputs, times.remade
        self._starts, self._segment_of, self._is_brought = times.starts, times.segment_of, times.is_brought
        self._number = {node: number for number, node in enumerate(self._collectives)}
        self._first_view: dict[fx.Node, int] = {}
        self._first_sent: dict[fx.Node, int] = {}
        self._view_of: dict[fx.Node, int] = {}  # what a collective makes of its values -> place in the list of values
        place = len(self._place)
        for node in self._collectives:
            for user in node.users:
                self._view_of[user] = place + int(user.args[1])
            self._first_view[node] = place
            self._first_sent[node] = place + len(node.meta["val"])
            place = self._first_sent[node] + len(values_of(node))
        self._num_views = place - len(self._place)
        self._num_values = place
        self._crossing: dict[fx.Node, int] = {}
        self._results: set[int] = set()
        self._after = {before: node for node, before in times.before.items()}

    def run(self) -> Segments:
        last = max(*self._starts.values(), *self._segment_of.values(), max(self._starts.values()) + 1)
        self._writers = [_Writer(self._gm, number) for number in range(last + 1)]
        computed = [node for node in self._nodes if node in self._segment_of]
        for node in (node for node in computed if not is_write(node)):
            self._need(self._writers[self._segment_of[node]], node)
        for node in self._collectives:
            if not self._is_brought(node):
                self._writers[self._starts[node]].copy_into(node, self._first_sent[node], self._need)
        self._brought = {
            node: tuple(self._place_after(value, self._starts[node]) for value in values_of(node))
            for node in self._collectives
            if self._is_brought(node)
        }
        outputs = tuple(map(self._output, self._nodes[-1].args[0]))
        for node in filter(is_write, computed):  # after all that reads the input
            self._need(self._writers[self._segment_of[node]], node)
        first = Segment(None, (), (), frozenset(), (), self._brought_after(AT_START), self._started_after(AT_START))
        segments = tuple(map(self._segment, self._writers))
        return Segments(
            keys=tuple(int(node.args[1]) for node in self._collectives),
            num_inputs=len(self._place),
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
        for user in filter(is_write, value.users):
            target = user.args[0]
            if user.args[1] is value and target in self._place and self._segment_of[user] <= segment:
                return self._place[target]  # type: ignore[index]
        return self._cross(value, self._writers[self._segment_of.get(value, segment)])

    def _new_place(self) -> int:
        self._num_values += 1
        return self._num_values - 1

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
        for index, (value, part) in enumerate(zip(values_of(collective), sent, strict=True)):
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


def _lines(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("stack_trace",) if key in node.meta}
