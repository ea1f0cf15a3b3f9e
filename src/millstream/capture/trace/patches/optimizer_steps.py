"""Steps of optimizers while a training step is traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from millstream._torch.autograd.hooks import optimizer_steps_seen
from millstream.capture.lines import (
    here,
)
from millstream.capture.record.recorder import Recorder
from millstream.capture.state.discover import Found
from millstream.capture.trace.patches.optimizers import (
    SparedGradients,
    narrow_counts,
    widen_counts,
)
from millstream.capture.trace.request import (
    FoundLate,
)
from millstream.errors import CaptureError


@contextlib.contextmanager
def optimizers_watched(
    found: Found,
    record: Recorder,
    stepped: list[Optimizer],
    spared: list[Tensor],
    report: Callable[[Exception], NoReturn],
) -> Iterator[Callable[[Optimizer], None]]:
    """Note which optimizers step, with counts in double precision; stop at one that the request does not have.

    Args:
        found: What the request has.
        record: Of what the step reads.
        stepped: Gets those that step.
        spared: Parameters whose gradients they leave as they are.
        report: Ends the trace by an error.

    Yields:
        What stops at an optimizer, as one that a scheduler has.
    """
    known = {id(optimizer) for _, optimizer in found.optimizers}
    ending: dict[int, list[Callable[[], object]]] = {}

    def meet(optimizer: Optimizer) -> None:
        if id(optimizer) not in known and Optimizer.__init__.__code__ in record.codes:
            report(
                CaptureError(
                    f"The step makes an optimizer, {type(optimizer).__name__}, in each call.",
                    where=here(),
                    remedy="Make it once, outside of the step.",
                )
            )
        if id(optimizer) not in known:
            report(FoundLate(type(optimizer).__name__, optimizer, ""))

    def on_step(optimizer: Optimizer) -> None:
        meet(optimizer)
        if optimizer not in stepped:
            stepped.append(optimizer)
        with torch.no_grad():
            counts = widen_counts(optimizer)
        ending[id(optimizer)] = [functools.partial(narrow_counts, counts)]

    @torch.no_grad()
    def on_update(optimizer: Optimizer) -> None:
        own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        gradients = SparedGradients(each for each in spared if id(each) in own)
        ending.setdefault(id(optimizer), []).append(gradients.put_back)

    @torch.no_grad()
    def on_done(optimizer: Optimizer) -> None:
        for end in ending.pop(id(optimizer), ()):
            end()

    with optimizer_steps_seen(on_step, on_update, on_done):
        yield meet
