"""Optimizer state for a step that is captured before it has ever run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from millstream.errors import CaptureError


@contextmanager
def pretended_state(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Let optimizers that have none have state inside the ``with`` block, as a first step with gradients makes it.

    Parameters, gradients and settings are what they were before, hooks are not called, and learning-rate schedulers
    count nothing.

    Raises:
        CaptureError: An optimizer cannot step by itself, as one that takes a closure.
    """
    try:
        for optimizer in optimizers:
            _make_state(optimizer)
        yield
    finally:
        for optimizer in optimizers:
            optimizer.state.clear()


@torch.no_grad()
def _make_state(optimizer: Optimizer) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    before = [(each, each.detach().clone(), each.grad) for each in parameters]
    settings = [dict(group) for group in optimizer.param_groups]
    plain: Any = type(optimizer).step
    plain = getattr(plain, "__wrapped__", plain)  # without hooks
    try:
        for each in parameters:
            each.grad = torch.zeros_like(each)
        plain(optimizer)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise CaptureError(
            f"{type(optimizer).__name__} cannot make its state ahead of the first call ({what}).",
            remedy="Call the step once.",
        ) from error
    finally:
        for each, value, gradient in before:
            each.copy_(value)
            each.grad = gradient
        for group, known in zip(optimizer.param_groups, settings, strict=True):
            group.clear()
            group.update(known)
