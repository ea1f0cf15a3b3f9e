"""Arrays as tensors, and which of them can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millstream.errors import FeedError


def as_tensor(leaf: Any, name: Callable[[], str] = lambda: "An array in the batch") -> Any:
    """See an array as a tensor, over the same memory where that is possible; other leaves are returned as they are.

    Raises:
        FeedError: There are no tensors of the array's type; the message names it.
    """
    if isinstance(leaf, Tensor) or not hasattr(leaf, "__array__"):
        return leaf
    array = np.asarray(leaf)
    if (dtype := _find_dtype(array.dtype)) is not None:
        return as_tensor(array.view(f"u{array.itemsize}")).view(dtype)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(step < 0 or step % array.itemsize for step in array.strides):
        array = array.copy()  # a tensor can always be written to, and goes forward from element to element
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise FeedError(
            f"{name()} is of {array.dtype}, of which there are no tensors; let the source yield another type."
        ) from None


def has_numbers(node: Any) -> bool:
    """Return whether an array, or what can be seen as one, can be a tensor."""
    dtype = getattr(node, "dtype", None)
    if not isinstance(dtype, np.dtype):
        dtype = np.asarray(node).dtype
    return dtype.kind in "biufc" or _find_dtype(dtype) is not None


def hides_tensors(node: Any) -> bool:
    """Return whether an array of objects has tensors among these."""
    return isinstance(node, np.ndarray) and node.dtype == object and any(isinstance(each, Tensor) for each in node.flat)


def _find_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """PyTorch's type for one that NumPy knows from elsewhere only: bfloat16, and floats of eight bits."""
    found = getattr(torch, dtype.name, None) if dtype.isbuiltin == 2 else None
    return found if isinstance(found, torch.dtype) and found.is_floating_point else None
