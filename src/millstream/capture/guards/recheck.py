"""Capturing again what is captured already, to see whether it would still be the same.

Guards notice what they know how to look at. Where that is in doubt, ``ms.step(check=N)`` traces every Nth call once
more and compares: a value that changed unseen stands in the new graph as another constant, or another operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from millstream._torch.distributed.collectives import EXCHANGE, exchange_of
from millstream.capture.effects.expressions import text_of
from millstream.capture.effects.host_effects import Output
from millstream.capture.lines import last_place
from millstream.capture.trace.request import Request, Traced
from millstream.errors import CaptureError
from millstream.tree.spec import SCALARS, Container, PlainValue, Reference, Structure


@dataclass(frozen=True, slots=True)
class OperatorLine:
    """One operator of a graph, or one part of a step's result."""

    text: str  # it and its arguments, constants included
    where: str  # the user's line


def listing_of(request: Request, traced: Traced) -> list[OperatorLine]:
    """All that a trace says of what a call does."""
    names = _names_of_inputs(request, traced)
    lines = [
        OperatorLine(_text_of(node, traced.gm, names), last_place(node.meta.get("stack_trace", "")))
        for node in traced.gm.graph.nodes
    ]
    lines += (OperatorLine(f"{write.location} = {_output(write.output)}", "") for write in traced.effects.writes)
    for call in traced.effects.calls:
        lines.append(OperatorLine(f"a call of {_name(call.function)}", call.where))
    return [*lines, OperatorLine(f"the result {_shown(traced.structure)}", "")]


def compare(before: list[OperatorLine], now: list[OperatorLine], name: str) -> None:
    """Compare two listings.

    Args:
        before: Of the graph that is replayed.
        now: Of the step as it would be captured now.
        name: Of the step.

    Raises:
        CaptureError: They differ; it names the first value or operator that does, and its line.
    """
    for old, new in zip(before, now, strict=False):
        if old.text != new.text:
            raise _outdated(name, old.text, new.text, new.where or old.where)
    if len(before) != len(now):
        longer = before if len(before) > len(now) else now
        line = longer[min(len(before), len(now))]
        raise _outdated(name, *(("nothing", line.text) if longer is now else (line.text, "nothing")), line.where)


def _outdated(name: str, old: str, new: str, where: str) -> CaptureError:
    return CaptureError(
        f"The graph of {name} is out of date: it has {old}, where the step has {new} by now.",
        where=where,
        remedy="Pass what has changed as an argument of the step.",
    )


def _name(function: Callable[..., Any]) -> str:
    """A function's name, and nothing of what it is bound to, which may show numbers that change rightly."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _names_of_inputs(request: Request, traced: Traced) -> dict[fx.Node, str]:
    """Return what each input is: its number changes as soon as there is more that the graph does not use."""
    labels = traced.questions.names([number.label for number in request.numbers])
    known = [
        *(request.state[index].name for index in traced.state),
        *(f"{request.gradients[index].name}.grad" for index in traced.gradients),
        *(text_of(traced.questions.inputs[index].of, labels) for index in traced.numbers),
        *(f"argument {index}" for index, _ in traced.arguments),
        *(request.state[index].name for index, _ in traced.replaced),
    ]
    inputs = [node for node in traced.gm.graph.nodes if node.op == "placeholder"]
    return dict(zip(inputs, [*known, *(f"size {index}" for index in range(len(inputs) - len(known)))], strict=True))


def _text_of(node: fx.Node, gm: fx.GraphModule, names: dict[fx.Node, str]) -> str:
    if node in names:
        return f"the input {names[node]}"
    if node.op == "get_attr":
        value = getattr(gm, str(node.target), None)
        return f"{node.name} = {value.tolist() if isinstance(value, Tensor) else value}"
    if node.target is EXCHANGE:  # the number of a collective says nothing
        values, key = node.args
        return f"{node.name} = {exchange_of(key).label} of {values}"
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: names.get(each, each.name))
    arguments = ", ".join([*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())])
    return f"{node.name} = {node.target}({arguments})"


def _output(output: Output) -> str:
    return f"{output.kind} {output.value if isinstance(output.value, SCALARS) else output.index}"


def _shown(structure: Structure) -> str:
    if isinstance(structure, Container):
        names = (*map(str, structure.keys), *(structure.attributes or ()))
        return f"{structure.type.__name__}({', '.join([*names, *map(_shown, structure.children)])})"
    if isinstance(structure, PlainValue):
        return repr(structure.value)
    return f"a {type(structure.target).__name__}" if isinstance(structure, Reference) else "a tensor"
