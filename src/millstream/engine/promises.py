"""Results of library kernels, compared with what the fake implementation of their operator has promised.

Kernels that read a result are compiled for the shape, strides and dtype that were known when the program was captured.

**Contract**
- What the user's operators return is compared in each call. What PyTorch's return follows from what they are given: it
  is compared in the first call of a plan, and in later ones where something was wrong.
- A result with other strides is copied into memory as it was promised. One of another shape or dtype, or on another
  device, is an error if the operator is the user's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millstream.errors import GraphError
from millstream.graph import Kernel
from millstream.program import Program, TensorLayout


@dataclass(frozen=True, slots=True)
class Promise:
    """The promise about a result, apart from its sizes and strides, which each call may have its own of."""

    layout: TensorLayout
    name: str  # of the value
    kernel: Kernel  # that returns it
    is_users: bool  # whether that calls an operator of the user's
    pending: list[str]  # whether anything is still to be compared: names, of which the first stands for the first call


def promised(program: Program, name: str) -> TensorLayout | None:
    """Return how a result is to lie; ``None`` where it is not strided, or a view of another tensor."""
    return program.tensors.get(name) if program.graph.storage(name) == name else None


def fit(tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], promise: Promise) -> Tensor:
    """Return a result, or a copy of it with the strides that were promised.

    Raises:
        GraphError: It is of another shape or dtype, or on another device.
    """
    layout = promise.layout
    is_such = tensor.shape == size and tensor.dtype is layout.dtype and tensor.device == layout.device
    if is_such and tensor.stride() == stride:
        return tensor
    if not is_such:
        if not promise.is_users:
            return tensor
        raise broken_promise(
            promise.kernel,
            promise.name,
            f"{promise.kernel.label} returns {promise.name!r}, which",
            tensor,
            size,
            layout.dtype,
        )
    if all(have == want or count == 1 for have, want, count in zip(tensor.stride(), stride, size, strict=True)):
        return tensor
    promise.pending.append(promise.name)
    made = torch.empty_strided(size, stride, dtype=layout.dtype, device=layout.device)
    return made.copy_(tensor)


def broken_promise(kernel: Kernel | None, buffer: str, what: str, tensor: Tensor, size: Any, dtype: Any) -> GraphError:
    """Return what to raise where a tensor is of another shape or dtype than it was when it was captured."""
    return GraphError(
        f"{what} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; it was captured as {dtype} {list(size)}. "
        "If an operator of yours makes it, its fake implementation must return what the real one does.",
        kernel=None if kernel is None else kernel.name,
        buffer=buffer,
    )
