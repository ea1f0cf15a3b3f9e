"""Numbers that a graph is given anew in each call: hyperparameters, counts, averages, numbers among the arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from millstream.capture.state.location import Location


@dataclass(frozen=True, slots=True, eq=False)
class NumberInput:
    """A number that a graph reads at run time."""

    location: Location  # where it is kept; of one among the arguments, where the traced call's is
    label: str  # how the graph's input is called, such as ``lr[0]``
    device: torch.device  # of that input
    optimizer: Optimizer | None = None  # that keeps it, if one does
    is_argument: bool = False  # whether each call brings it

    @property
    def is_users(self) -> bool:
        """Whether it is none of an optimizer's."""
        return self.optimizer is None


def argument_input(name: str, device: torch.device, value: float) -> NumberInput:
    """A number among the arguments, in a place of its own, where a stand-in can be put while the step is traced."""
    return NumberInput(Location([value], 0, name), name, device, is_argument=True)
