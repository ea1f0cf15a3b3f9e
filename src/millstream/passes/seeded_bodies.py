"""Functions that operators of control flow are given, in a graph of Dynamo's: random numbers are drawn by a seed.

**Contract**
- Where such a function draws random numbers, the operator is given a seed, which the generator of the device gives once
  before. Every number follows from it: how often a function runs does not count, and where autograd runs it once more,
  it draws the same.
- What has no rule (``_torch/seeded_randoms.py``) is drawn as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from millstream._torch.seeded_randoms import DrawnFrom, new_seed
from millstream._torch.tracing import is_higher_order
from millstream.errors import InternalError
from millstream.passes.graph_pass import graph_pass
from millstream.passes.pure_bodies import FLOWS, run_on_fakes


@graph_pass("seeded-bodies", "draws the random numbers of functions of control flow by a seed that they are given")
def seed_bodies(gm: fx.GraphModule) -> None:
    """Change the operators of control flow in a graph and their functions, in place."""
    flows = [node for node in gm.graph.nodes if is_higher_order(node.target) and node.target.name() in FLOWS]
    for node in flows:
        names = [str(each.target) for each in node.args if isinstance(each, fx.Node) and each.op == "get_attr"]
        bodies = [getattr(gm, name) for name in names]
        for body in bodies:
            seed_bodies.run(body)
        draws = list(map(_num_draws, bodies))
        if any(draws):
            at, is_loop = _hand_seed_in(gm, node, sum(draws)), node.target.name() == "while_loop"
            for number, (name, body) in enumerate(zip(names, bodies, strict=True)):
                more = sum(draws) if is_loop and number else 0
                setattr(gm, name, _seeded(body, at, sum(draws[:number]), more))
    if flows:
        gm.recompile()


def _num_draws(body: fx.GraphModule) -> int:
    drawn = DrawnFrom()
    with drawn:
        run_on_fakes(body)
    return drawn.number


def _hand_seed_in(gm: fx.GraphModule, node: fx.Node, num_draws: int) -> int:
    """Give an operator one more operand; return its position among those of the functions."""
    match node.target.name(), node.args:  # type: ignore[union-attr]
        case "cond", (pred, yes, no, others):
            node.args = pred, yes, no, (*others, _new_seed(gm, node, num_draws, others or [pred]))  # type: ignore[misc]
            return len(others)  # type: ignore[arg-type]
        case "while_loop", (goes_on, turn, carried, others):
            node.args = goes_on, turn, (*carried, _new_seed(gm, node, num_draws, carried)), others  # type: ignore[misc]
            return len(carried)  # type: ignore[arg-type]
        case _, (*first, sliced, others):
            seeds = _new_seed(gm, node, num_draws, sliced, turns=sliced[0])  # type: ignore[index]
            node.args = *first, [*sliced, seeds], others  # type: ignore[misc]
            return len(sliced) + (len(first[1]) if len(first) > 1 else 0)  # type: ignore[arg-type]
    raise InternalError(f"{node.target} has other arguments than PyTorch gives it.")


def _new_seed(gm: fx.GraphModule, node: fx.Node, num_draws: int, like: Any, turns: fx.Node | None = None) -> fx.Node:
    device = next(value.device for value in map(_value, like) if isinstance(value, Tensor))
    with gm.graph.inserting_before(node):
        length = None if turns is None else gm.graph.call_method("size", (turns, 0))
        return gm.graph.call_function(new_seed, (device, num_draws, length))


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _seeded(body: fx.GraphModule, at: int, first: int, more: int) -> fx.GraphModule:
    """A function that is given a seed, too; what it draws first has this number.

    Args:
        body: What it runs.
        at: The position of the seed.
        first: The number.
        more: Where the function is a turn of a loop: added to the seed that it also returns.
    """
    graph = fx.Graph()
    given = [graph.placeholder(node.name) for node in body.graph.find_nodes(op="placeholder")]
    with graph.inserting_before(given[at]) if at < len(given) else graph.inserting_after(given[-1]):
        seed = graph.placeholder("seed")
    made = graph.call_function(_run, (graph.get_attr("body"), first, seed, given))
    results: Any = body.graph.output_node().args[0]
    if isinstance(results, Sequence):
        results = [graph.call_function(operator.getitem, (made, number)) for number in range(len(results))]
        graph.output((*results, *([graph.call_function(operator.add, (seed, more))] if more else [])))
    else:  # what tells whether a loop goes on
        graph.output(made)
    return fx.GraphModule({"body": body}, graph)


def _run(body: fx.GraphModule, first: int, seed: Tensor, given: Sequence[Any]) -> Any:
    with DrawnFrom(seed, first):
        return body(*given)
