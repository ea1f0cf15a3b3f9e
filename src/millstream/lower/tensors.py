"""Cheap allocation and views, as Inductor's own wrapper makes them. Private APIs, one function each; tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from millstream.lower.program import Layout

#: ``reinterpret(base, size, stride, offset)``: a view whose offset counts from the start of ``base``; 0.3 µs against 1.5 for as_strided.
reinterpret: Callable[[torch.Tensor, Any, Any, int], torch.Tensor] = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]


def allocate(layout: Layout) -> torch.Tensor:
    """Allocate an uninitialised tensor on the current stream of its device."""
    return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)


def allocator(device: torch.device) -> Callable[[Any, Any, torch.dtype], torch.Tensor]:
    """Return the quickest ``empty_strided(size, stride, dtype)`` for a device; on CUDA it serves the current device."""
    guards = torch._C._dynamo.guards
    if device.type == "cpu":
        return guards._empty_strided_cpu  # type: ignore[attr-defined, no-any-return]
    if device.type == "cuda":
        return guards._empty_strided_cuda  # type: ignore[attr-defined, no-any-return]
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def same_addresses(tensors: list[Any], addresses: list[int | None], positions: list[int]) -> bool:
    """Whether ``tensors[i]`` lies at ``addresses[i]`` for every i in ``positions``: 10 ns a tensor (CUDA builds of PyTorch only)."""
    return bool(torch._C._tensors_data_ptrs_at_indices_equal(tensors, addresses, positions))  # type: ignore[attr-defined]


def storage_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` without the dimensions in which it repeats the same memory, so that it can be copied into."""
    size = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(size, tensor.stride(), tensor.storage_offset())
