"""Loops that tracing has unrolled: one turn of them is lowered, and its kernels are bound as often as there are turns.

A node of ``millstream::turns`` stands for turns of a run (``passes/equal_turns.py``), as many as have few results. It
goes through AOT autograd and Inductor as an operator of a library; ``lower/turns.py`` puts the kernels of each turn in
its place afterwards, so that turns overlap and share memory as those of an unrolled loop do.

**Contract**
- The graph computes what it did. A node writes none of what it is given, and what it returns is new.
- Turns read the same tensors of the graph's inputs: layers of a network, each with its own weights, stay as they are.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from millstream._torch.seeded_randoms import draws_by_generator
from millstream._torch.tensors import ALIGNMENT_BYTES
from millstream.errors import InternalError
from millstream.passes.equal_turns import (
    Run,
    before_views,
    chain_of,
    described_views,
    find_runs,
    is_changing,
    is_view,
    layout_of,
)
from millstream.passes.graph_pass import graph_pass
from millstream.passes.seeded_draws import seed_draws

FEWEST_SAVED = 500
"""Operators that a loop must save: some ten seconds of lowering. Kernels of fewer are better fused between turns."""


MOST_FUSED = 64
"""Operators that Inductor puts into one kernel, where all of them are pointwise."""
MOST_RESULTS = 128
"""Of one node: PyTorch looks at all results of an operator for each that is used."""


@dataclass(eq=False)
class TurnBody:
    """A turn.

    Attributes:
        graph: Of what it is given. AOT autograd's takes its place once it is known.
        name: A digest of what it computes.
        made: Its results: sizes, strides, dtype and device.
        num_operators: It has.
    """

    graph: fx.GraphModule = field(repr=False)
    name: str
    made: tuple[tuple[Any, ...], ...]
    num_operators: int


@dataclass(frozen=True, eq=False)
class Turns:
    """Turns of a loop, one after another.

    Attributes:
        name: By which graphs refer to it: a digest of all that it does.
        body: Each of them.
        sources: For each turn, for each input of the body: a position among the tensors that the operator is given; or
            ``~position`` among what all turns have made, those of each turn one after another.
        results: Positions there of what the operator returns.
    """

    name: str
    body: TurnBody
    sources: tuple[tuple[int, ...], ...] = field(repr=False)
    results: tuple[int, ...] = field(repr=False)

    def __str__(self) -> str:
        return f"a loop of {len(self.sources)} turns, {self.body.num_operators} operators each"


_turns: WeakValueDictionary[str, Turns] = WeakValueDictionary()

_library = torch.library.Library("millstream", "FRAGMENT")
_library.define("turns(Tensor[] tensors, str name) -> Tensor[]", tags=(torch.Tag.needs_exact_strides,))

TURNS = torch.ops.millstream.turns.default
"""``turns(tensors, name)``: what is wanted of what the turns of this name make."""


def turns_of(name: str) -> Turns:
    """The loop of a name, which somebody holds."""
    return _turns[name]


@torch.library.impl(_library, "turns", "CompositeExplicitAutograd")
def _run(tensors: Sequence[Tensor], name: str) -> list[Tensor]:
    turns = _turns[name]
    made: list[Tensor] = []
    for sources in turns.sources:
        results = turns.body.graph(*(tensors[each] if each >= 0 else made[~each] for each in sources))
        made += [_empty(layout).copy_(value) for layout, value in zip(turns.body.made, results, strict=True)]
    return [made[position] for position in turns.results]


@torch.library.register_fake("millstream::turns", lib=_library)
def _describe(tensors: Sequence[Tensor], name: str) -> list[Tensor]:  # noqa: ARG001  as above
    turns = _turns[name]
    return [_empty(turns.body.made[position % len(turns.body.made)]) for position in turns.results]


@graph_pass("loops", "lowers one iteration of a loop that tracing has unrolled", otherwise=lambda *_: [])
def roll_loops(gm: fx.GraphModule, options: Mapping[str, Any] | None = None) -> list[Turns]:
    """Find loops in a graph of aten operators, and put nodes in their places.

    Args:
        gm: Its nodes carry their values in ``meta["val"]``; changed in place.
        options: Of TorchInductor, the user's.

    Returns:
        What the nodes refer to, to be held as long as the graph is used.
    """
    runs = _runs_in(gm.graph)
    draws = [node for run in runs for node in run.draws]
    if draws and not draws_by_generator(options or {}):
        mode = detect_fake_mode([node.meta.get("val") for node in draws])
        assert mode is not None
        seed_draws(gm.graph, draws, mode)
        runs = _runs_in(gm.graph)
    rolled = [turns for run in runs if not run.draws for turns in _Roller(gm, _with_fusion(run)).roll()]
    if rolled:
        gm.graph.lint()
        gm.recompile()
    return rolled


def _runs_in(graph: fx.Graph) -> list[Run]:
    inputs = _users_inputs(graph)
    runs = find_runs(graph, FEWEST_SAVED)
    return [run for run in runs if not _are_layers(run, inputs) and not _reads_changed(run)]


def _reads_changed(run: Run) -> bool:
    """Whether turns read what an operator has changed in place, which lies otherwise once nothing is.

    Such turns are looked for again before Inductor.
    """
    read = {each for turn in run.turns for node in turn for each in node.all_input_nodes}
    return any(is_changing(chain_of(each).root) for each in read)


def _with_fusion(run: Run) -> Run:
    """A run of which one kernel can compute several turns, with so many turns as one."""
    size = min(MOST_FUSED // run.period, len(run.turns) // 4)
    return run.grouped(size) if size > 1 and run.is_pointwise else run


def _are_layers(run: Run, inputs: Container[fx.Node]) -> bool:
    """Whether turns read different inputs of the user's, as layers do their weights."""
    for place, reads in enumerate(run.reads):
        for number, made in enumerate(reads):
            if made is None:
                roots = {chain_of(turn[place].all_input_nodes[number]).root for turn in run.turns}
                if sum(root in inputs for root in roots) > 1:
                    return True
    return False


def _users_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Inputs of a graph that the user gives, or that it has: not what a forward pass has saved for this backward pass.

    By the names that AOT autograd gives them, in torch 2.11 and 2.13.
    """
    inputs = graph.find_nodes(op="placeholder")
    if any(node.name.startswith("tangents") for node in inputs):
        inputs = [node for node in inputs if node.name.startswith("primals")]
    return {*inputs, *graph.find_nodes(op="get_attr")}


class _Roller:
    """Puts nodes in the place of a run."""

    def __init__(self, gm: fx.GraphModule, run: Run) -> None:
        self._gm, self._run = gm, run
        self._nodes = {node: place for turn in run.turns for place, node in enumerate(turn)}
        self._first_like: dict[Any, fx.Node] = {}
        carried = {made.place for reads in run.reads for made in reads if made is not None and made.back}
        outside = {place for node, place in self._nodes.items() if self._is_wanted(node, self._nodes)}
        self._results = sorted({*carried, *outside})
        self._inputs: dict[tuple[fx.Node, ...], fx.Node] = {}  # of the body, by what they are in each turn
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}  # of the last turn -> in the body
        self._viewed: dict[Any, fx.Node] = {}
        self._now: dict[fx.Node, fx.Node] = {}  # of the run -> a result of a node in its place

    def roll(self) -> list[Turns]:
        body = self._as_body()
        loops = [self._replace(body, chunk) for chunk in self._chunks()]
        self._erase()
        return loops

    def _chunks(self) -> Iterator[range]:
        """As many turns at a time as have few results."""
        begin = num_results = 0
        for number, turn in enumerate(self._run.turns):
            wanted = sum(self._is_wanted(turn[place], self._nodes) for place in self._results)
            if num_results + wanted > MOST_RESULTS and number > begin:
                yield range(begin, number)
                begin, num_results = number, 0
            num_results += wanted
        yield range(begin, len(self._run.turns))

    @staticmethod
    def _is_wanted(node: fx.Node, inside: Container[fx.Node]) -> bool:
        return any(reader not in inside for reader in _readers(node))

    def _as_body(self) -> TurnBody:
        last = self._run.turns[-1]
        for place, node in enumerate(last):
            given = {each: self._argument(place, number) for number, each in enumerate(node.all_input_nodes)}
            self._made[node] = copy = self._graph.node_copy(node, given.__getitem__)
            copy.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
        self._graph.output(tuple(self._made[last[place]] for place in self._results))
        mode = detect_fake_mode([node.meta.get("val") for node in last])
        assert mode is not None
        inputs = [(each.meta.pop("like"), each.meta.pop("begin")) for each in self._inputs.values()]
        describe(self._graph, inputs, mode)
        made = tuple(map(layout_of, (self._made[last[place]] for place in self._results)))
        if made != tuple(layout_of(last[place]) for place in self._results):
            raise InternalError("What a turn of a loop makes lies otherwise than in the loop.")
        text = "\n".join(f"{node.format_node()} {layout_of(node)} {begin_of(node)}" for node in self._graph.nodes)
        return TurnBody(fx.GraphModule({}, self._graph), _digest(text), made, self._run.period)  # type: ignore[arg-type]

    def _argument(self, place: int, number: int) -> fx.Node:
        """The node of the body that stands for what an operator reads."""
        made = self._run.reads[place][number]
        turns = self._run.turns
        nodes = [turn[place].all_input_nodes[number] for turn in turns]
        if made is None:
            return self._input(nodes)
        root = self._made.get(turns[-1][made.place])
        if made.back:
            outer = [before_views(node, made.views) for node in nodes[: made.back]]
            root = self._input([*outer, *(turn[made.place] for turn in turns[: -made.back])])  # type: ignore[list-item]
        assert root is not None
        views = chain_of(nodes[-1]).views
        for count, node in enumerate(views[len(views) - len(made.views) :], 1):
            key = root, made.views[:count]
            if key not in self._viewed:
                self._viewed[key] = copy = self._graph.node_copy(node, lambda _, base=root: base)
                copy.meta = {}
            root = self._viewed[key]
        return root

    def _input(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """An input of the body."""
        key = tuple(map(self._canonical, nodes))
        if key not in self._inputs:
            with self._graph.inserting_after(next(reversed(self._inputs.values()), self._graph._root)):
                node = self._graph.placeholder(f"given_{len(self._inputs)}")
            node.meta = {"like": layout_of(nodes[-1]), "begin": int(not all(map(_is_aligned, key)))}
            self._inputs[key] = node
        return self._inputs[key]

    def _canonical(self, node: fx.Node) -> fx.Node:
        """The same node for equal views."""
        chain = chain_of(node)
        return self._first_like.setdefault((chain.root, described_views(chain.views)), node)

    def _replace(self, body: TurnBody, chunk: range) -> Turns:
        """Put one node in the place of some turns, whose operators stay as long as later turns read them."""
        turns = [self._run.turns[number] for number in chunk]
        own = [turn[place] for turn in turns for place in self._results]
        made = {node: position for position, node in enumerate(own)}
        given: dict[fx.Node, int] = {}
        sources = tuple(
            tuple(
                ~made[key[number]] if key[number] in made else given.setdefault(key[number], len(given))
                for key in self._inputs
            )
            for number in chunk
        )
        inside = {node for turn in turns for node in turn}
        wanted = [node for node in own if self._is_wanted(node, inside)]
        results = tuple(made[node] for node in wanted)
        loop = Turns(_digest(f"{body.name} {sources} {results}"), body, sources, results)
        loop = _turns.setdefault(loop.name, loop)  # the same, if there is one
        graph = self._gm.graph
        with graph.inserting_after(turns[-1][-1]):
            new = graph.call_function(TURNS, ([self._now.get(node, node) for node in given], loop.name))
        new.meta = {key: value for key, value in own[0].meta.items() if key in ("stack_trace", "nn_module_stack")}
        new.meta["val"] = [node.meta["val"] for node in wanted]
        cursor, elements = new, set()
        for position, node in enumerate(wanted):
            with graph.inserting_after(cursor):
                self._now[node] = cursor = graph.call_function(operator.getitem, (new, position))
            cursor.meta = dict(node.meta)
            elements.add(cursor)
            node.replace_all_uses_with(cursor, lambda user: user not in self._nodes)
        for node in list(_between(turns[0][0], turns[-1][-1])):
            if node not in inside and chain_of(node).root in elements:
                cursor.append(node)
                cursor = node
        return loop

    def _erase(self) -> None:
        for node in reversed(self._gm.graph.nodes):
            if node in self._nodes or (not node.users and is_view(node)):
                self._gm.graph.erase_node(node)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a value, views apart."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first
    while node is not last:
        yield node
        node = node.next
    yield last


def describe(graph: fx.Graph, inputs: Sequence[tuple[Any, int]], mode: FakeTensorMode) -> None:
    """Give each node of a turn its value.

    Args:
        graph: Of functions.
        inputs: How its inputs lie in memory, and at which element of it they begin.
        mode: Of the values.
    """
    given = iter(inputs)
    with mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                layout, begin = next(given)
                node.meta["val"] = _empty(layout, begin=begin)
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)


def _empty(layout: Any, *, begin: int = 0) -> Tensor:
    size, stride, dtype, device = layout
    if not begin:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
    span = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if 0 not in size else 0
    return torch.empty(begin + span, dtype=dtype, device=device).as_strided(size, stride, begin)


def begin_of(node: fx.Node) -> int:
    """At which element of its memory a value begins."""
    value = node.meta.get("val")
    return int(value.storage_offset()) if isinstance(value, Tensor) else 0


def _is_aligned(node: fx.Node) -> bool:
    """Whether a value begins where its memory does, or a kernel may take it to be so."""
    value, base = node.meta["val"], chain_of(node).root.meta["val"]
    begins = base.storage_offset() if isinstance(base, Tensor) else 0
    return bool((value.storage_offset() - begins) * value.dtype.itemsize % ALIGNMENT_BYTES == 0)
