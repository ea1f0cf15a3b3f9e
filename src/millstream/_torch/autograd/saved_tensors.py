"""Tensors that autograd saves in a forward pass, in another form. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_hooks = torch._C._autograd


class SavedTensors:
    """From now on until ``end`` this thread's autograd saves some tensors packed; others as it did before.

    Hooks of PyTorch's are a stack of which the topmost alone is asked. Those below (of a checkpointed region, say) are
    asked here for what is not packed.

    Args:
        pack: Gives what is saved in a tensor's place; ``None`` for nothing else.
        unpack: Gives the tensor of that.
    """

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        below = _hooks._top_saved_tensors_default_hooks(False)
        self._pack: Callable[[Tensor], Any] | None = pack  # until the end: nodes may hold on to ``packing``

        def packing(tensor: Tensor) -> tuple[bool, Any]:
            packed = None if self._pack is None else self._pack(tensor)
            if packed is not None:
                return True, packed
            return False, tensor if below is None else below[0](tensor)

        def unpacking(saved: tuple[bool, Any]) -> Tensor:
            is_ours, packed = saved
            if is_ours:
                return unpack(packed)
            return packed if below is None else below[1](packed)  # type: ignore[no-any-return]

        _hooks._push_saved_tensors_default_hooks(packing, unpacking)

    def end(self) -> None:
        """Let autograd save what it did before."""
        if self._pack is not None:
            self._pack = None
            _hooks._pop_saved_tensors_default_hooks()
