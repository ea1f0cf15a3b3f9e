"""PyTorch's state per thread that an operator's result depends on: gradients, inference mode, autocast.

A source that is asked in another thread than its loop shall compute as it would in the loop's, so the loop's modes are
read there and put in place here. Private APIs; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import Any

import torch

_AUTOCAST = ("cuda", "cpu")

# By names of their own: they are called for every batch.
_has_autocast, _has_inference, _has_gradients = (
    torch._C._is_any_autocast_enabled,
    torch.is_inference_mode_enabled,
    torch.is_grad_enabled,
)

Modes = tuple[bool, bool, tuple[tuple[bool, torch.dtype], ...] | None]
"""Whether gradients are recorded, whether inference mode is on, and of autocast, if there is any, what is on."""

NEW_THREAD: Modes = (True, False, None)


def read_modes() -> Modes:
    """The calling thread's modes; the very object ``NEW_THREAD`` where they are those of a new one."""
    gradients, inference = _has_gradients(), _has_inference()
    if gradients and not inference and not _has_autocast():
        return NEW_THREAD  # nearly always
    autocast = None
    if _has_autocast():
        autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST)
    return gradients, inference, autocast


class ThreadModes:
    """Puts another thread's modes in place in this one.

    They stay until others come: a generator that leaves a mode on where it yields finds it again when it goes on.
    """

    def __init__(self) -> None:
        self.present = NEW_THREAD  # what was put in place last
        self._inference: Any = None  # the guard of inference mode, which lasts as long as this object does

    def put(self, modes: Modes, *, anew: bool = False) -> None:
        """Put ``modes`` in place, if they are others than last time, or ``anew`` in any case."""
        if modes == self.present and not anew:
            return
        self.present = modes
        gradients, inference, autocast = modes
        self._inference = None
        if inference:
            self._inference = torch._C._InferenceMode(True)
        torch._C._set_grad_enabled(gradients)
        for kind, (enabled, dtype) in zip(_AUTOCAST, autocast or ((False, None),) * len(_AUTOCAST), strict=True):
            torch.set_autocast_enabled(kind, enabled)
            if dtype is not None:
                torch.set_autocast_dtype(kind, dtype)
        # Weights that were cast once are cast again each time: no region ends here, at which they would be forgotten.
        torch.set_autocast_cache_enabled(autocast is None)
        torch.clear_autocast_cache()
