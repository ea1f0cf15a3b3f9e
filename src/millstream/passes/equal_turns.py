"""Loops that tracing has unrolled: where in a graph the same operators come again and again.

A loop in Python leaves its turns one after another in a graph, forward, and in reverse order backward. What is found
here are operators and what they read, as plain data; ``passes/rolling.py`` puts one node in their place.

**Contract**
- All turns of a run apply the same operators to the same plain arguments, in the same order; what they read within a
  turn, they read from the same places of it.
- What a turn reads from elsewhere is there before the first turn, or an earlier turn has made it. In each turn, it lies
  in memory the same way.
- No operator of a run writes what it is given, or has sizes that are not known. Those that draw random numbers by
  the generator are found like others; they are no turns before they draw by seeds (``passes/seeded_draws.py``).

**Steps**
1. Views are no operators here: a reader names what the views begin with, and how it is viewed.
2. Number the operators so that equal ones have equal numbers; the longest stretch that repeats itself is a run, and so
   on before and after it.
3. Begin turns where the fewest values go from one to the next, and drop turns at the ends that read other things.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from millstream._torch.compiler.symbols import is_symbolic
from millstream._torch.seeded_randoms import BY_SEED, LOOKUP, may_follow_seed
from millstream._torch.tensors import real_tensors

FEWEST_TURNS = 12
"""Fewer are no loop over time, and what is lost between turns weighs more."""
LONGEST_TURN = 1024
"""Operators in a turn; longer ones are not looked for."""


class Chain(NamedTuple):
    """How a value is viewed.

    Attributes:
        root: What the views begin with.
        views: Nodes, the first applied first.
    """

    root: fx.Node
    views: tuple[fx.Node, ...]


class Earlier(NamedTuple):
    """A value that an operator of a run reads and a turn has made.

    Attributes:
        back: How many turns before the reader's; 0 is its own.
        place: Of the operator in that turn.
        views: How it is viewed there.
    """

    back: int
    place: int
    views: tuple[Any, ...]


@dataclass(frozen=True)
class Run:
    """Equal turns.

    Attributes:
        turns: The operators of each.
        reads: For each operator of a turn, for each node that it is given in order: what earlier operators have made,
            ``None`` where it is from elsewhere, in the first turns too if ``back`` says so.
    """

    turns: tuple[tuple[fx.Node, ...], ...]
    reads: tuple[tuple[Earlier | None, ...], ...]

    @property
    def period(self) -> int:
        """Operators in a turn."""
        return len(self.turns[0])

    @property
    def saved(self) -> int:
        """Operators that need not be lowered."""
        return (len(self.turns) - 1) * self.period

    @property
    def is_pointwise(self) -> bool:
        """Whether one kernel may compute a turn, and several turns as well."""
        return all(torch.Tag.pointwise in getattr(node.target, "tags", ()) for node in self.turns[0])

    @property
    def draws(self) -> list[fx.Node]:
        """Nodes that draw by the generator, or look up the seed that one of the run's draws by; none twice."""
        nodes = [node for turn in self.turns for node in turn]
        read = (each for node in nodes for each in node.all_input_nodes if each.target is LOOKUP)
        return [*dict.fromkeys([*read, *(node for node in nodes if may_follow_seed(node.target))])]

    def grouped(self, size: int) -> Run:
        """The same with so many turns as one; those that are left over at the end belong to no turn."""

        def within(made: Earlier | None, number: int) -> Earlier | None:
            if made is None:
                return None
            turn = number - made.back
            return made._replace(back=-(turn // size), place=turn % size * self.period + made.place)

        turns = [self.turns[at : at + size] for at in range(0, len(self.turns) - size + 1, size)]
        reads = [tuple(within(made, number) for made in each) for number in range(size) for each in self.reads]
        return Run(tuple(tuple(node for turn in group for node in turn) for group in turns), tuple(reads))


def find_runs(graph: fx.Graph, fewest_saved: int) -> list[Run]:
    """Find loops in a graph of aten operators whose nodes carry their values in ``meta["val"]``.

    O(operators² / ``FEWEST_TURNS``) comparisons of numbers, a vector at a time.

    Args:
        graph: Of operators.
        fewest_saved: Leave out what would save fewer operators.
    """
    with real_tensors():
        finder = _Finder(graph)
        stretches = list(_stretches(finder.numbers, 0, len(finder.numbers), fewest_saved))
    found = [finder.run_in(*stretch) for stretch in stretches]
    return [run for run in found if run is not None and run.saved >= fewest_saved]


def chain_of(node: fx.Node) -> Chain:
    """What a value is a view of, and how."""
    views: list[fx.Node] = []
    while is_view(node):
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return Chain(node, tuple(reversed(views)))


def is_view(node: fx.Node) -> bool:
    """Whether a node makes nothing but another look at what it is given first."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1 or not isinstance(node.args[0], fx.Node):
        return False
    source = node.args[0]
    if node.target is operator.getitem:
        return is_view(source)  # a part of what was split
    target = node.target
    if target is LOOKUP:
        return True  # which becomes one
    return isinstance(target, torch._ops.OpOverload) and target.is_view and _share(node, source)


def is_changing(node: fx.Node) -> bool:
    """Whether a node writes what it is given."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def described_views(views: Sequence[fx.Node]) -> tuple[Any, ...]:
    """What views do, comparable."""
    return tuple((each.target, _plain(each.args[1:]), _plain(each.kwargs)) for each in views)


def layout_of(node: fx.Node) -> tuple[Any, ...] | None:
    """How a node's value lies in memory, comparable; ``None`` where it is no tensor of known sizes."""
    return _layout(node.meta.get("val"))


def _layout(value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    if is_symbolic([*value.shape, *value.stride(), value.storage_offset()]):
        return None
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _share(node: fx.Node, source: fx.Node) -> bool:
    """Whether two values lie in the same memory."""
    value, base = node.meta.get("val"), source.meta.get("val")
    values, bases = (each if isinstance(each, list | tuple) else [each] for each in (value, base))
    if not all(isinstance(each, Tensor) and each.layout is torch.strided for each in (*values, *bases)) or not values:
        return False
    where = {each.untyped_storage()._cdata for each in (*values, *bases)}
    return len(where) == 1 and len({each.dtype for each in (*values, *bases)}) == 1


def _plain(tree: Any) -> Any:
    """Arguments as what can be compared and hashed."""
    if isinstance(tree, list | tuple):
        return tuple(map(_plain, tree))
    if isinstance(tree, dict):
        return tuple((key, _plain(each)) for key, each in sorted(tree.items()))
    if isinstance(tree, slice):
        return "slice", tree.start, tree.stop, tree.step
    return type(tree), repr(tree)  # as 1, 1.0 and True are equal, 0.0 and -0.0, but not nan and nan


class _Finder:
    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = [node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module")]
        self._nodes = [node for node in self._nodes if not is_view(node)]
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._chains: dict[fx.Node, tuple[Chain, tuple[Any, ...]]] = {}
        known: dict[Any, int] = {}
        texts = [described(node) or object() for node in self._nodes]
        self.numbers = torch.tensor([known.setdefault(text, len(known)) for text in texts], dtype=torch.int64)

    def _chain(self, node: fx.Node) -> tuple[Chain, tuple[Any, ...]]:
        if node not in self._chains:
            chain = chain_of(node)
            self._chains[node] = chain, described_views(chain.views)
        return self._chains[node]

    def run_in(self, start: int, stop: int, period: int) -> Run | None:
        """The longest run in operators that repeat themselves."""
        first = self._first(start, period)
        num_turns = (stop - first) // period
        turns = [tuple(self._nodes[at : at + period]) for at in range(first, first + num_turns * period, period)]
        reads = [[self._reads(node, first, number, period) for node in turn] for number, turn in enumerate(turns)]
        best = max(self._alike(turns, reads), key=len, default=range(0))
        if len(best) < FEWEST_TURNS:
            return None
        last = [tuple(_within(each, len(best)) for each in of_node) for of_node in reads[best[-1]]]
        return Run(tuple(turns[number] for number in best), tuple(last))

    def _first(self, start: int, period: int) -> int:
        """Where turns begin, so that the fewest values go from one to the next, and no several at once."""
        last_read: dict[int, int] = {}  # by the place of what is read in a turn: how much later
        for at in range(start + period, start + 2 * period):
            for each in self._nodes[at].all_input_nodes:
                root = self._place.get(self._chain(each)[0].root, -1)
                if 0 < at - root < period:
                    place = (root - start) % period
                    last_read[place] = max(last_read.get(place, 0), at - root)
        crossing = [0] * period
        for place, length in last_read.items():
            is_one = layout_of(self._nodes[start + place]) is not None
            for begin in range(place + 1, place + length + 1):
                crossing[begin % period] += 1 if is_one else period
        return start + min(range(period), key=crossing.__getitem__)

    def _reads(self, node: fx.Node, first: int, number: int, period: int) -> tuple[Earlier | None, ...]:
        found: list[Earlier | None] = []
        for each in node.all_input_nodes:
            chain, views = self._chain(each)
            place = self._place.get(chain.root, -1) - first
            turn, within = divmod(place, period)
            found.append(Earlier(number - turn, within, views) if place >= 0 and turn <= number else None)
        return tuple(found)

    def _alike(
        self, turns: Sequence[Sequence[fx.Node]], reads: Sequence[Sequence[tuple[Earlier | None, ...]]]
    ) -> Iterator[range]:
        """Ranges of turns that read the same."""
        begin = 0
        for number in range(1, len(turns) + 1):
            if number < len(turns) and self._continues(turns, reads, begin, number):
                continue
            yield range(begin, number)
            begin = number

    def _continues(
        self,
        turns: Sequence[Sequence[fx.Node]],
        reads: Sequence[Sequence[tuple[Earlier | None, ...]]],
        begin: int,
        number: int,
    ) -> bool:
        """Whether a turn reads what the turn before it reads, if the run begins with that number."""
        both = zip(turns[number - 1], turns[number], reads[number - 1], reads[number], strict=True)
        for place, (before, node, were, are) in enumerate(both):
            every = zip(before.all_input_nodes, node.all_input_nodes, were, are, strict=True)
            for at, (old, new, was, now) in enumerate(every):
                if layout_of(old) != layout_of(new):
                    return False
                if layout_of(new) is None and (was != now or now is None or now.back):
                    return False  # several tensors at once cross no border
                was_there = was is not None and was.back <= number - 1 - begin
                is_there = now is not None and now.back <= number - begin
                if was_there and was != now:
                    return False
                if is_there and not was_there:
                    # From outside so far: only as the first of what turns make later.
                    assert now is not None
                    if now.back == 0 or now.back != number - begin:
                        return False
                    outer = (turn[place].all_input_nodes[at] for turn in turns[begin:number])
                    if not all(_begins(each, now, turns[begin]) for each in outer):
                        return False
        return True


def _within(made: Earlier | None, num_turns: int) -> Earlier | None:
    return None if made is None or made.back >= num_turns else made


def _begins(node: fx.Node, made: Earlier, turn: Sequence[fx.Node]) -> bool:
    """Whether a value from outside is viewed as what a turn makes is, so that it can stand in its place."""
    source = before_views(node, made.views)
    return source is not None and layout_of(source) == layout_of(turn[made.place])


def before_views(node: fx.Node, views: Sequence[Any]) -> fx.Node | None:
    """What ``node`` is made of by these views; ``None`` where it is made otherwise."""
    chain = chain_of(node)
    count = len(views)
    if count > len(chain.views) or described_views(chain.views[len(chain.views) - count :]) != tuple(views):
        return None
    return (chain.root, *chain.views)[len(chain.views) - count]


def described(node: fx.Node) -> Any:
    """An operator without the nodes that it is given, comparable; ``None`` where it stands for itself."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        is_part = target is operator.getitem and isinstance(node.args[0], fx.Node)
        if not is_part or not isinstance(node.args[1], int):
            return None
    elif not _may_be_in_turn(target):
        return None
    values = node.meta.get("val")
    layouts = [_layout(each) for each in (values if isinstance(values, list | tuple) else [values])]
    if None in layouts and not isinstance(values, list | tuple):
        return None
    given = [each for each in node.all_input_nodes if not isinstance(each.meta.get("val"), list | tuple)]
    if None in map(layout_of, given):
        return None
    args, kwargs = (map_aggregate(each, _without_node) for each in (node.args, node.kwargs))
    pattern = _pattern(node)
    return target, _plain(args), _plain(kwargs), pattern, tuple(layouts)


def _may_be_in_turn(target: torch._ops.OpOverload) -> bool:
    """Whether an operator does the same for the same, but for what it draws by a seed."""
    if torch.Tag.nondeterministic_seeded in target.tags:
        return may_follow_seed(target)
    return not target._schema.is_mutable and (target.namespace == "aten" or target in _BESIDE)


_BESIDE = BY_SEED | {torch.ops.prims.convert_element_type.default, torch.ops.prims.iota.default}
"""Such operators that are none of ``aten``."""


def _without_node(value: Any) -> Any:
    return "node" if isinstance(value, fx.Node) else value


def _pattern(node: fx.Node) -> tuple[int, ...]:
    """Which of an operator's arguments are the same node."""
    places = {each: place for place, each in enumerate(node.all_input_nodes)}
    found: list[int] = []
    map_arg((node.args, node.kwargs), lambda each: found.append(places[each]))
    return tuple(found)


def _stretches(numbers: Tensor, start: int, stop: int, fewest_saved: int) -> Iterator[tuple[int, int, int]]:
    """Operators that repeat themselves, in order: begin, end, and after how many they do."""
    waiting = [(start, stop)]
    while waiting:
        start, stop = waiting.pop()
        begin, length, period = _longest(numbers[start:stop])
        if length < fewest_saved:
            continue
        end = start + begin + length + period
        yield start + begin, end, period
        waiting += [(start, start + begin), (end, stop)]


def _longest(numbers: Tensor) -> tuple[int, int, int]:
    """The longest stretch in which each number equals the one a period later: its begin, its length, the period."""
    best = (0, 0, 1)
    for period in range(1, min(len(numbers) // FEWEST_TURNS, LONGEST_TURN) + 1):
        differ = (numbers[period:] != numbers[:-period]).nonzero().flatten()
        ends = torch.cat([torch.tensor([-1]), differ, torch.tensor([len(numbers) - period])])
        lengths = ends.diff() - 1
        at = int(lengths.argmax())
        length = int(lengths[at]) // period * period
        if length > best[1] and length >= (FEWEST_TURNS - 1) * period:
            best = (int(ends[at]) + 1, int(lengths[at]), period)
    return best
