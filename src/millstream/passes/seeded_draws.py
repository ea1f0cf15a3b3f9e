"""Random numbers in turns of a loop that tracing has unrolled: each turn is given seeds, as it is given its inputs.

Afterwards turns apply the same operators to other seeds, and are equal (``passes/equal_turns.py``).

**Contract**
- What is drawn is as random as before, from the same generator; other numbers with the same seed.
- What can't be drawn by a seed stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from millstream._torch.seeded_randoms import LOOKUP, SEEDS, DrawnFrom
from millstream.passes.equal_turns import described, layout_of

_SELECT = torch.ops.aten.select.int


def seed_draws(graph: fx.Graph, draws: Sequence[fx.Node], mode: FakeTensorMode) -> None:
    """Let nodes draw by seeds that are parts of one tensor, in place.

    Args:
        graph: Of aten operators, with values.
        draws: Nodes of it that draw by the generator, or look a seed up.
        mode: Of the values.
    """
    rows = _Rows(graph, mode)
    known: dict[Any, fx.Graph] = {}
    for node in draws:
        with graph.inserting_before(node):
            if node.target is LOOKUP:
                new = rows.row(*node.args)  # type: ignore[arg-type]
            else:
                key = described(node), *map(layout_of, node.all_input_nodes)
                if key not in known:
                    known[key] = _traced(node, mode)
                new = _inlined(graph, known[key], node, rows.new(node))
        if isinstance(new, fx.Node):
            node.replace_all_uses_with(new)
        else:
            for each in [*node.users]:
                each.replace_all_uses_with(new[each.args[1]])
                graph.erase_node(each)
        graph.erase_node(node)
    rows.finish()


class _Rows:
    """Seeds, each a part of the tensor of its device."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self._graph, self._mode = graph, mode
        self._first = next(node for node in graph.nodes if node.op != "placeholder")
        self._seeds: dict[torch.device, fx.Node] = {}
        self._counts: dict[torch.device, int] = {}
        self._rows: list[fx.Node] = []

    def new(self, node: fx.Node) -> fx.Node:
        """A seed of its own for a node."""
        device = _device(node)
        if device not in self._seeds:
            with self._graph.inserting_before(self._first):
                self._seeds[device] = self._graph.call_function(SEEDS, (0, device))
        number = self._counts[device] = self._counts.get(device, -1) + 1
        return self.row(self._seeds[device], number)

    def row(self, seeds: fx.Node, number: int) -> fx.Node:
        self._rows.append(row := self._graph.call_function(_SELECT, (seeds, 0, number)))
        return row

    def finish(self) -> None:
        """Make the tensors as long as they have to be."""
        for device, seeds in self._seeds.items():
            seeds.args = self._counts[device] + 1, device
        with self._mode:
            for node in (*self._seeds.values(), *self._rows):
                args = map_arg(node.args, lambda each: each.meta["val"])
                node.meta["val"] = node.target(*args)  # type: ignore[operator]


def _device(node: fx.Node) -> torch.device:
    value = node.meta["val"]
    return (value if isinstance(value, Tensor) else value[0]).device


def _traced(node: fx.Node, mode: FakeTensorMode) -> fx.Graph:
    """What a node is, given a seed and what it is given."""
    given = [each.meta["val"] for each in node.all_input_nodes]
    device = _device(node)

    def run(seed: Tensor, *tensors: Tensor) -> Any:
        values = dict(zip(node.all_input_nodes, tensors, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        with DrawnFrom(seed):
            return target(*args, **kwargs)

    with mode, torch.no_grad():
        seed = torch.empty((), dtype=torch.int64, device=device)
        return make_fx(run)(seed, *given).graph


def _inlined(graph: fx.Graph, part: fx.Graph, node: fx.Node, seed: fx.Node) -> Any:
    """Copy a graph to before a node that it takes the place of; return its results."""
    made = dict(zip(part.find_nodes(op="placeholder"), [seed, *node.all_input_nodes], strict=True))
    for each in part.nodes:
        if each.op == "call_function":
            made[each] = new = graph.node_copy(each, made.__getitem__)
            new.meta = {**node.meta, "val": each.meta["val"]}
    return map_arg(part.output_node().args[0], made.__getitem__)
