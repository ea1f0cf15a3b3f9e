"""``ms.manual.parallel`` and ``ms.manual.Parallel``: branches and layers side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from millstream.errors import ArgumentError
from millstream.manual.scope import Device, streams


def parallel(
    branches: Iterable[Callable[..., Any]],
    *args: Any,
    num_streams: int | None = None,
    device: Device = None,
    **kwargs: Any,
) -> list[Any]:
    """Call several functions or modules with the same arguments, each on a stream; return their results in order.

    >>> image, text = ms.manual.parallel([vision_tower, text_tower], batch)

    The streams start from the current one and are joined to it before this returns.

    Args:
        branches: What to call.
        args: For each of them.
        num_streams: How many streams; branches beyond begin again at the first. By default one for each, 8 at most.
        device: Where; by default where the first tensor among the arguments is.
        kwargs: For each of them.

    Raises:
        ArgumentError: A branch cannot be called, or ``num_streams`` is no number of streams.
    """
    calls = list(branches)
    for position, branch in enumerate(calls):
        if not callable(branch):
            raise ArgumentError(f"Branch {position} is {branch!r}, which cannot be called.")
    if device is None:
        device = next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        device = device if device is None or device.type in ("cpu", "cuda") else torch.device("cpu")
    if not calls:
        return []
    with streams(min(len(calls), 8) if num_streams is None else num_streams, device) as scope:
        return scope.run([functools.partial(branch, *args, **kwargs) for branch in calls])


class Parallel(nn.Module):
    """Modules side by side: called with the same arguments, each on a stream; gives the list of their results.

    Args:
        branches: The modules, as an ``nn.ModuleList`` or another iterable of modules.
        num_streams: As for ``parallel``.

    Raises:
        ArgumentError: A branch is no module.
    """

    def __init__(self, branches: Iterable[nn.Module], num_streams: int | None = None) -> None:
        super().__init__()
        found = list(branches)
        for position, branch in enumerate(found):
            if not isinstance(branch, nn.Module):
                kind = type(branch).__name__
                raise ArgumentError(f"Branch {position} is {kind}, not a module; use ms.manual.parallel.")
        self.branches = nn.ModuleList(found)
        self.num_streams = num_streams

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call all branches."""
        return parallel(self.branches, *args, num_streams=self.num_streams, **kwargs)
