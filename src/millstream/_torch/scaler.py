"""``GradScaler`` inside of a graph: the skipped step becomes a choice between old and new values.

``scale``, ``unscale_`` and ``update`` compute with tensors and trace as they are. ``step`` asks whether a gradient was
infinite before it calls the optimizer; here the optimizer always runs, and ``torch.where`` keeps the old parameters and
state when it should not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from millstream._torch.one_thread import patched


@contextlib.contextmanager
def steps_are_masked() -> Iterator[None]:
    """For the length of the context, let every ``GradScaler`` step under a mask.

    Private: ``GradScaler._maybe_opt_step``. Tried on torch 2.11 and 2.13.
    """

    def maybe_step(
        _: GradScaler, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        found = list(optimizer_state["found_inf_per_device"].values())
        is_skipped = torch.stack([value.to(found[0].device) for value in found]).sum() != 0
        written = list(_written_by(optimizer))
        with torch.no_grad():
            old = [tensor.clone() for tensor in written]
        result = optimizer.step(*args, **kwargs)
        with torch.no_grad():
            for tensor, value in zip(written, old, strict=True):
                tensor.copy_(torch.where(is_skipped.to(tensor.device), value, tensor))
        return result

    with patched(GradScaler, "_maybe_opt_step", maybe_step):
        yield


def _written_by(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter
                yield from (value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor))


def is_idle(scaler: GradScaler) -> bool:
    """Return whether nothing was unscaled or stepped since the last ``update``."""
    return all(state["stage"] is OptState.READY for state in scaler._per_optimizer_states.values())
