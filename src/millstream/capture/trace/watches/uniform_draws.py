"""Branches on random numbers that go one way only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from millstream.passes.cleanup import IS_DECIDED

aten = torch.ops.aten

_BELOW = {aten.lt.Scalar: True, aten.le.Scalar: True, aten.gt.Scalar: False, aten.ge.Scalar: False}
"""Comparisons of a number drawn from [0, 1), and their outcome where it is below the other, whatever it is."""


class UniformDraws:
    """Follows tensors of ``torch.rand`` to where they are compared with a number, and to branches that go one way only.

    BART and its like draw a number for each layer in training, and leave the layer out if it is below the probability,
    which may be zero.
    """

    def __init__(self) -> None:
        self._draws = WeakIdKeyDictionary()  # the node of each
        self._outcomes = WeakIdKeyDictionary()  # of comparisons: what is drawn, and how each comes out

    def see(self, operator: Any, args: tuple[Any, ...], result: Any, graph: fx.Graph) -> None:
        """Note an operator that has run; its node is the graph's last."""
        if operator is aten.rand.default:
            self._draws[result] = next(iter(reversed(graph.nodes)))
        elif operator in _BELOW and isinstance(args[1], int | float) and args[0] in self._draws:
            below = _BELOW[operator]
            if args[1] >= 1:
                self._outcomes[result] = self._draws[args[0]], below
            elif args[1] < 0 or (args[1] == 0 and operator in (aten.lt.Scalar, aten.ge.Scalar)):
                self._outcomes[result] = self._draws[args[0]], not below

    def outcome(self, tensor: Tensor) -> bool | None:
        """Return how a comparison comes out; ``None`` where that depends on what is drawn."""
        node, outcome = self._outcomes.get(tensor, (None, None))
        if node is not None:
            node.meta[IS_DECIDED] = True
        return outcome
