"""Averaged weights: ``AveragedModel.update_parameters`` asks on the host whether there is an average yet."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from millstream._torch.one_thread import patched
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder


class _Started:
    """Stands for the number of models averaged so far, as if there were some."""

    def __init__(self, count: Tensor, given: Any) -> None:
        self._count, self._given = count, given

    def __eq__(self, _: object) -> bool:
        return False

    def __gt__(self, _: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __iadd__(self, more: int) -> _Started:
        self._count.add_(more)
        return self

    def to(self, device: torch.device) -> Any:
        """Return what the function that averages is given."""
        return self._count.to(device) if self._given is None else self._given


def averages_take_first(recorder: EffectRecorder) -> AbstractContextManager[None]:
    """For the length of the context, let the graph choose between a copy of the model and the average with it."""
    original = vars(AveragedModel)["update_parameters"]
    names = ("module", "parameters", "use_buffers", "avg_fn", "multi_avg_fn")

    def tensors_of(module: nn.Module, *, with_buffers: bool) -> list[Tensor]:
        return [each.detach() for each in chain(module.parameters(), module.buffers() if with_buffers else ())]

    def update(averaged: AveragedModel, model: nn.Module) -> None:
        count, function = averaged.n_averaged, averaged.multi_avg_fn or averaged.avg_fn
        is_first = count == 0
        # PyTorch's own take the count for a number, which users' need not.
        is_own = function is None or function.__module__ == swa_utils.__name__
        started = _Started(count, recorder.item(count) if is_own else None)
        original(SimpleNamespace(**{name: getattr(averaged, name) for name in names}, n_averaged=started), model)
        pairs = (tensors_of(each, with_buffers=averaged.use_buffers) for each in (averaged.module, model))
        for average, new in zip(*pairs, strict=False):
            average.copy_(torch.where(is_first.to(average.device), new.to(average.device), average))

    return patched(AveragedModel, "update_parameters", update)
