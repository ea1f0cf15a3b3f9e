"""What the shared training loop knows of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from millstream.errors import ArgumentError

Batch = tuple[Tensor, Tensor]
Carry = tuple[Tensor, ...]


@dataclass(frozen=True)
class Job:
    """A model, its data and one training step.

    Attributes:
        name: Name on the command line.
        title: What it is, in one line.
        identity: What a checkpoint must agree on to be of this job: sizes and data, as plain values.
        device: Where the model is.
        unit: What ``units_per_step`` counts.
        units_per_step: Progress of one step, for speeds.
        steps: Length of a run unless the user says otherwise.
        model: What is trained.
        optimizer: What trains it.
        step: One training step: ``(inputs, targets, carry) -> (loss, carry)``.
        carry: What the first step of a fresh run is given as ``carry``.
        batches: All batches from a step number on, without end; the same number always gives the same batch, so that
            the number is all that a checkpoint must hold of the data's position.
        show: Say in words what the model has learned.
    """

    name: str
    title: str
    identity: Mapping[str, int | str]
    device: torch.device
    unit: str
    units_per_step: int
    steps: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor, Tensor, Carry], tuple[Tensor, Carry]]
    carry: Carry
    batches: Callable[[int], Iterator[Batch]]
    show: Callable[[], str]


def find_device(name: str | None) -> torch.device:
    """Return the device of this name, or the default one.

    Raises:
        ArgumentError: No such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArgumentError(f"--device {name!r} is no device; say cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"--device {name!r} is not supported; say cpu, cuda or cuda:N")
    if device.type == "cpu" and device.index:
        raise ArgumentError(f"--device {name!r} is not there; there is one CPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(f"--device {name!r} is not there; PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return device


def count_parameters(model: nn.Module) -> int:
    """Return how many numbers the model learns."""
    return sum(parameter.numel() for parameter in model.parameters())
