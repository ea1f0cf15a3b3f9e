"""``ms.precompile``: a step's programs and plan, before its first call."""

from __future__ import annotations

from typing import Any

from millstream.capture.step.step import Step
from millstream.errors import ArgumentError


def precompile(step: Any, *args: Any, **kwargs: Any) -> None:
    """Compile what ``ms.step`` returned for arguments like these, without taking a step.

    The graph is captured, lowered and run on the true state, to choose a plan; then parameters, optimizer state,
    buffers and random generators are put back, and nothing that the step does on the host happens. What was compiled is
    kept on disk, where this process and later ones find it; and where the optimizer has state already, as after loading
    a checkpoint, the next call replays.

    Args:
        step: What ``ms.step`` returned.
        args: As for a call of it: tensors of the shapes, strides and dtypes to come. It computes with their values,
            which may be any.
        kwargs: Likewise.

    Raises:
        ArgumentError: ``step`` is not what ``ms.step`` returns.
        CaptureError: It cannot be captured, or not before it has run once; the message says why.
    """
    if not isinstance(step, Step):
        raise ArgumentError(f"precompile() takes what ms.step returned, not {type(step).__name__}.")
    step.precompile(*args, **kwargs)
