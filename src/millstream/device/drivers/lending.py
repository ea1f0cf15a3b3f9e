"""Tensors over memory that somebody else owns, and the bytes under a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from millstream import _native
from millstream._torch.tensors import place_of_implementation


class _LentArray(np.ndarray[Any, np.dtype[np.uint8]]):
    token: object


def lend(memory: Tensor, token: object) -> Tensor | None:
    """Do what ``Driver.lend`` does, in compiled code; ``None`` without. From Python it takes several times as long."""
    tensors, place = _native.load("tensors"), place_of_implementation()
    if tensors is None or place is None:
        return None
    # The token is dropped first: a tuple drops its last item first.
    return tensors.lend_tensor(place, memory, (memory, token))  # type: ignore[no-any-return]


def lend_host(memory: Tensor, token: object) -> Tensor:
    """Do what ``Driver.lend`` does, for host memory; without compiled code by an array that a tensor keeps alive."""
    if (lent := lend(memory, token)) is not None:
        return lent
    array = whole_storage(memory).numpy().view(_LentArray)
    array.token = token
    return see_alike(torch.from_numpy(array), memory)


def whole_storage(tensor: Tensor) -> Tensor:
    """The bytes of the storage under ``tensor``, as a uint8 tensor."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def see_alike(whole: Tensor, example: Tensor) -> Tensor:
    """See the bytes of a storage as ``example`` sees those of its own."""
    empty = torch.empty(0, dtype=example.dtype, device=whole.device)
    return empty.set_(whole.untyped_storage(), int(example.storage_offset()), example.size(), example.stride())
