"""Cheap allocation and views, as Inductor's own wrapper makes them.

Private APIs, one function each; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_GUARDS: Any = torch._C._dynamo.guards  # where PyTorch keeps the quick functions that its generated code calls

#: ``reinterpret(base, size, stride, offset)``: a view whose offset counts from the start of ``base``; 0.3 µs against
#: 1.5 for as_strided.
reinterpret: Callable[[torch.Tensor, Any, Any, int], torch.Tensor] = _GUARDS._reinterpret_tensor


def allocator(device: torch.device) -> Callable[[Any, Any, torch.dtype], torch.Tensor]:
    """Return the quickest ``empty_strided(size, stride, dtype)`` for a device; on CUDA it serves the current device."""
    if device.type == "cpu":
        return _GUARDS._empty_strided_cpu
    if device.type == "cuda":
        return _GUARDS._empty_strided_cuda
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def current_stream_handle(index: int) -> int:
    """The raw handle of the calling thread's current stream on CUDA device ``index``, without making the object."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def same_addresses(tensors: list[Any], addresses: list[int | None], positions: list[int]) -> bool:
    """Whether ``tensors[i]`` lies at ``addresses[i]`` for every i in ``positions``: some 75 ns a tensor.

    Only CUDA builds of PyTorch have it.
    """
    return bool(torch._C._tensors_data_ptrs_at_indices_equal(tensors, addresses, positions))


def storage_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` without the dimensions in which it repeats its memory, so that it can be copied into."""
    size = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(size, tensor.stride(), tensor.storage_offset())
