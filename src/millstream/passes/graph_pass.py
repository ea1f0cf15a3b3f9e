"""The definition of a pass over a graph: a named function that can be switched off and tells what it changes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from millstream._torch.workarounds import is_off

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("millstream.passes")


@dataclass(frozen=True)
class Pass(Generic[P, R]):
    """A function that changes the graph that is its first argument, called as it is.

    At the level ``DEBUG``, the logger ``millstream.passes`` has a record of each that changes something: how many
    nodes there are before and after, and which lines differ.

    Attributes:
        name: By which ``MILLSTREAM_WITHOUT`` switches it off.
        effect: What it does, in a few words.
        run: It.
        otherwise: Called in its place where it is switched off.
    """

    name: str
    effect: str
    run: Callable[P, R]
    otherwise: Callable[..., Any] = lambda *_, **__: None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_off(self.name):
            return self.otherwise(*args, **kwargs)  # type: ignore[no-any-return]
        if not _log.isEnabledFor(logging.DEBUG):
            return self.run(*args, **kwargs)
        before = _lines(args[0])
        result = self.run(*args, **kwargs)
        after = _lines(result if isinstance(result, torch.fx.GraphModule) else args[0])
        gone, new = Counter(before) - Counter(after), Counter(after) - Counter(before)
        if gone or new:
            changes = "".join(f"\n  {sign} {line}" for sign, lines in (("-", gone), ("+", new)) for line in lines)
            _log.debug("%s: %d nodes, now %d%s", self.name, len(before), len(after), changes)
        return result


def graph_pass(
    name: str, effect: str, otherwise: Callable[..., Any] = lambda *_, **__: None
) -> Callable[[Callable[P, R]], Pass[P, R]]:
    """Make a pass of a function; the arguments are those of ``Pass``."""
    return lambda run: Pass(name, effect, run, otherwise)


def _lines(graph: Any) -> list[str]:
    nodes = graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else graph.nodes
    return [str(node.format_node()) for node in nodes]
