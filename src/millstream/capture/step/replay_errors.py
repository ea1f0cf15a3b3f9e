"""What a captured graph fails with, as eager PyTorch says it and with the user's line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from millstream.capture.lines import last_place, told
from millstream.errors import CaptureError, FailingStepCaptureError


class _Eager(fx.Interpreter):
    """Runs a graph operator by operator, and keeps the user's line of one that fails."""

    where = ""

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except Exception:
            self.where = last_place(n.meta.get("stack_trace", ""))
            raise


_OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)


def find_failure(gm: fx.GraphModule, inputs: list[Tensor]) -> CaptureError | None:
    """What is wrong with a step whose graph fails, if it is the step: its operators fail as they are, too."""
    error, where = _fail_eagerly(gm, inputs)
    if error is None:
        return None
    own = FailingStepCaptureError(f"The step fails: {told(error)}", where=where, remedy="So it does without ms.step.")
    own.__cause__ = error
    return own


def as_eager(error: IndexError, gm: fx.GraphModule, inputs: list[Tensor]) -> Exception:
    """What the operator raises for which a kernel raises ``error``; nothing is written meanwhile."""
    with torch.random.fork_rng(devices=()):
        own, _ = _fail_eagerly(gm, [tensor.clone() for tensor in inputs])
    if not isinstance(own, (IndexError, RuntimeError)):
        return error
    for note in getattr(error, "__notes__", ()):
        own.add_note(note)
    return own


def _fail_eagerly(gm: fx.GraphModule, inputs: list[Tensor]) -> tuple[Exception | None, str]:
    """What the first operator raises that fails as it is, and the user's line."""
    if gm.meta.get("exchanges"):  # other processes would have to take part
        return None, ""
    eager = _Eager(gm)
    eager.extra_traceback = False  # no more text in errors
    try:
        with torch.no_grad():
            eager.run(*inputs)
    except _OF_THE_DEVICE:  # full, or dead since the graph failed, which says nothing of the step
        return None, ""
    except Exception as error:  # noqa: BLE001  it is to be told
        return error, eager.where
    return None, ""
