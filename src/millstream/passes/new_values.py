"""Operators that write what the graph has made itself give new values instead, as a loop's turns write nothing.

AOT autograd does so anyway. Done before, loops are found before it (``passes/rolling.py``), and it sees one turn of
each. A cell of a GRU, for example, writes its gates in place.

**Contract**
- The graph computes what it did, and writes its inputs as it did. Its results lie in memory as they did.
- Each node's value in ``meta["val"]`` lies as what the node gives, and shares memory with what it shares that with.

**Steps**
1. What is written has been made by an operator, and whoever reads that memory afterwards reads it by this value.
2. The operator's functional form takes its place, for all who read the value later. Where the new value lies otherwise,
   so may what is computed from it.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx.node import map_arg

from millstream.passes.equal_turns import FEWEST_TURNS, is_changing, is_view
from millstream.passes.graph_pass import graph_pass

_APART = frozenset(
    {
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
        torch.ops.aten.unsafe_chunk.default,
    }
)
"""Operators whose results are parts of what they are given, which nobody reads any more once they are written."""


@graph_pass(
    "new-values",
    "has operators give new values instead of writing old ones, where a loop may have many",
    otherwise=lambda *_: False,
)
def give_new_values(gm: fx.GraphModule) -> bool:
    """Change a graph of aten operators whose nodes carry their values in ``meta["val"]``, in place.

    Returns:
        Whether it is another one now.
    """
    if sum(is_changing(node) and _functional(node.target) is not None for node in gm.graph.nodes) < FEWEST_TURNS:
        return False
    changed = _Writes(copy.deepcopy(gm.graph))
    if not changed.run():
        return False
    gm.graph = changed.graph
    gm.graph.lint()
    gm.recompile()
    return True


class _Writes:
    """Takes writes from a graph.

    Attributes:
        graph: It.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
        self._sharing: dict[int, set[fx.Node]] = defaultdict(set)  # by memory
        for node in graph.nodes:
            self._remember(node)
        self._before: dict[fx.Node, Any] = {}  # how values lay that lie otherwise, or elsewhere

    def run(self) -> bool:
        """Whether something has changed, and the graph can be used."""
        num_changed = 0
        for node in list(self.graph.nodes):
            if is_changing(node) and self._replace(node):
                num_changed += 1
            elif not self._before.keys().isdisjoint(node.all_input_nodes) and not self._follow(node):
                return False
        return num_changed > 0

    def _remember(self, node: fx.Node) -> None:
        for memory in _memory_of(node):
            self._sharing[memory].add(node)

    def _forget(self, node: fx.Node) -> None:
        for memory in _memory_of(node):
            self._sharing[memory].discard(node)

    def _replace(self, node: fx.Node) -> bool:
        """Let a node give a new value, if that changes nothing else; whether it does."""
        written, functional = node.args[0], _functional(node.target)
        if functional is None or not isinstance(written, fx.Node) or not self._is_alone(written, node):
            return False
        value, before = self._value(functional, node), _layouts(node.meta.get("val"))
        if _layouts(value) != before and any(reader.op == "output" for reader in _readers(node)):
            return False
        with self.graph.inserting_before(node):
            new = self.graph.call_function(functional, node.args, node.kwargs)
        new.meta = {**node.meta, "val": value}
        self._order[new] = self._order[node]
        later = [user for user in written.users if self._order[user] > self._order[node]]
        node.replace_all_uses_with(new)
        for user in later:
            user.replace_input_with(written, new)
        self._forget(node)
        self.graph.erase_node(node)
        self._remember(new)
        self._before[new] = before
        self._follow_views(new, _memory_of(node))
        return True

    def _follow_views(self, node: fx.Node, memory: set[int]) -> None:
        """Have later names of a new value share its memory, not that which was written."""
        for user in node.users:
            if not memory.isdisjoint(_memory_of(user)) and self._follow(user):
                self._follow_views(user, memory)

    def _follow(self, node: fx.Node) -> bool:
        """Compute a value anew of which an input lies otherwise; whether that may be."""
        if node.op != "call_function" or node.target in _READ_MEMORY:
            given = [each for each in node.all_input_nodes if each in self._before]
            if any(_layouts(each.meta["val"]) != self._before[each] for each in given):
                return False
        if node.op != "call_function":
            return True
        value, before = self._value(node.target, node), _layouts(node.meta.get("val"))
        given = set().union(*map(_memory_of, node.all_input_nodes))
        if not given.isdisjoint(_memory(value)) or _layouts(value) != before:
            self._forget(node)
            node.meta["val"] = value
            self._remember(node)
            self._before.setdefault(node, before)
        return True

    def _value(self, function: Any, node: fx.Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        assert self._mode is not None
        with self._mode, torch.no_grad():
            return function(*args, **kwargs)

    def _is_alone(self, written: fx.Node, node: fx.Node) -> bool:
        """Whether who reads what ``node`` writes, from then on, reads it by ``written`` or by ``node``."""
        if written.op != "call_function" or is_view(written) or is_changing(written):
            return False
        begins = {_begin_of(each) for memory in _memory_of(written) for each in self._sharing[memory]}
        if not all(begin is written or _are_apart(begin, written) for begin in begins):
            return False
        when = self._order[node]
        others = [user for user in written.users if _is_same(user, written) and self._order[user] < when]
        return not any(self._order[reader] > when for other in others for reader in _readers(other))


_READ_MEMORY = frozenset({torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default})
"""Operators that read memory by how it lies, whatever the tensor is."""


_OTHER_TAGS = frozenset({torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view})


@functools.cache
def _functional(target: Any) -> torch._ops.OpOverload | None:
    """The operator that gives what this one writes to its first argument and returns; ``None`` if there is none."""
    if target.namespace != "aten" or not {*target.tags}.isdisjoint(_OTHER_TAGS):
        return None
    writes = [bool(each.alias_info and each.alias_info.is_write) for each in target._schema.arguments]
    name = target._schema.name.removeprefix("aten::")
    if len(target._schema.returns) != 1 or not writes[0] or any(writes[1:]) or not name.endswith("_"):
        return None
    found = getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), target._overloadname, None)
    if found is None or any(each.alias_info for each in (*found._schema.arguments, *found._schema.returns)):
        return None
    names = [[each.name for each in every._schema.arguments] for every in (found, target)]
    return found if names[0] == names[1] else None  # type: ignore[no-any-return]


def _tensors_of(value: Any) -> list[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, Tensor)]


def _layouts(value: Any) -> list[Any]:
    return [(each.shape, each.stride(), each.dtype, each.device) for each in _tensors_of(value)]


def _memory_of(node: fx.Node) -> set[int]:
    return _memory(node.meta.get("val"))


def _memory(value: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in _tensors_of(value) if each.layout is torch.strided}


def _begin_of(node: fx.Node) -> fx.Node:
    """What a value was before it was viewed and written."""
    while is_view(node) or (is_changing(node) and isinstance(node.args[0], fx.Node)):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _are_apart(one: fx.Node, part: fx.Node) -> bool:
    """Whether ``part`` is one of those that another value was split into, and ``one`` another one, or that value."""
    if part.target is not operator.getitem or not isinstance(split := part.args[0], fx.Node):
        return False
    if split.target not in _APART:
        return False
    whole = split.args[0]
    is_other_part = one.target is operator.getitem and one.args[0] is split and one is not part
    return is_other_part or one is split or (isinstance(whole, fx.Node) and one is _begin_of(whole))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a value, by whatever name."""
    for user in node.users:
        if not is_view(user):
            yield user
        if _is_same(user, node):
            yield from _readers(user)


def _is_same(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node gives what it is given, viewed or written."""
    return is_view(node) or (is_changing(node) and node.args[0] is source)
