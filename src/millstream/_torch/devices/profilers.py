"""Notice where PyTorch's profiler begins and ends, whoever uses it. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import torch

_BEGINS = ("__enter__", "_prepare_trace")
BEGINS: tuple[tuple[type, str], ...] = tuple(
    (torch.autograd.profiler.profile, name) for name in _BEGINS if name in vars(torch.autograd.profiler.profile)
)
"""A profiler with a schedule prepares itself for its warm-up, some steps before it records. A second one that is
started meanwhile takes the first one's place, and reading the results of the first one then ends the process."""
END: tuple[type, str] = (torch.autograd.profiler.profile, "__exit__")
