"""The use that a step makes of what processes have reduced, in a form in which they can compare it.

**Contract**
- The same code gives the same in every process, whatever sizes its batches have and wherever its tensors lie.
- Left out is what depends on a process's own batch: that may rightly be other code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from millstream._torch.distributed.collectives import EXCHANGE, exchange_of

MOST_ITEMS = 16
"""Of a constant tensor whose values count, and of numbers that are told."""


class _Derivation(NamedTuple):
    """The derivation of a value: its text's digest, the numbers in it, and what it depends on."""

    digest: str
    numbers: frozenset[str]
    is_reduced: bool  # something that was exchanged
    is_own: bool  # something that each call brings


def updates_of(gm: fx.GraphModule, names: Sequence[str], num_given: int) -> tuple[str, ...]:
    """How each tensor of the step's state is written from what was exchanged, a line for each, gradients left out.

    Args:
        gm: Functional but for ``copy_`` into its inputs.
        names: Of its last inputs, but for those that each call brings.
        num_given: How many those are.

    Returns:
        Nothing where processes are to write other parts, as each its share of a divided optimizer.
    """
    nodes = list(gm.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    first_given = len(inputs) - num_given
    name_of = dict(zip(inputs[first_given - len(names) : first_given], names, strict=True))
    own = set(inputs[first_given:])
    ways: dict[fx.Node, _Derivation] = {}
    lines = []
    for node in nodes:
        if node.target is EXCHANGE:
            exchange = exchange_of(node.args[1])
            if exchange.is_divided:
                return ()
            ways[node] = _Derivation(_digest(exchange.label), frozenset(), True, False)
        elif node.op in ("placeholder", "get_attr"):
            value = getattr(gm, str(node.target), None) if node.op == "get_attr" else node.meta.get("val")
            ways[node] = _Derivation(_digest(f"{name_of.get(node)} {_looks(value)}"), frozenset(), False, node in own)
        elif node.op == "call_function":
            ways[node] = _way_of(node, ways)
        if node.target is torch.ops.aten.copy_.default and node.args[0] in name_of:
            name, way = name_of[node.args[0]], ways[node.args[1]]
            if way.is_reduced and not way.is_own and not name.endswith(".grad"):
                numbers = ", ".join(sorted(way.numbers)[:MOST_ITEMS])
                lines.append(f"an update of {name} = operators {way.digest[:8]} with the numbers {numbers}")
    return tuple(lines)


def _way_of(node: fx.Node, ways: dict[fx.Node, _Derivation]) -> _Derivation:
    numbers: set[str] = set()

    def text(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return ways[argument].digest
        if isinstance(argument, list | tuple):
            return f"[{', '.join(map(text, argument))}]"
        if isinstance(argument, float):
            numbers.add(repr(argument))
        return argument.type if isinstance(argument, torch.device) else repr(argument)  # each has another device

    parts = [str(node.target), *map(text, node.args), *(f"{key}={text(each)}" for key, each in node.kwargs.items())]
    before = [ways[each] for each in node.all_input_nodes]
    return _Derivation(
        _digest(" ".join(parts)),
        frozenset(numbers).union(*(each.numbers for each in before)),
        any(each.is_reduced for each in before),
        any(each.is_own for each in before),
    )


def _looks(value: Any) -> str:
    """An input or a constant."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    is_known = type(value) is Tensor and value.is_cpu and value.numel() <= MOST_ITEMS
    return f"{value.dtype} {list(value.shape)}" + (f" {value.tolist()}" if is_known else "")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
