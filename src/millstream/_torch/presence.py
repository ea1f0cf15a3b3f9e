"""Whether there is a GPU, asked without touching CUDA. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import os

import torch

_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch.cuda.is_available() reads it at each call


def has_gpu() -> bool:
    """Whether there is a GPU. CUDA is left uninitialized.

    ``torch.cuda.is_available()`` initializes the driver. After that, ``CUDA_VISIBLE_DEVICES`` has no effect any more,
    and forked processes cannot use the GPU. Where NVML is missing, that is what is asked all the same.
    """
    before = os.environ.get(_BY_NVML)
    os.environ[_BY_NVML] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ[_BY_NVML]
        else:
            os.environ[_BY_NVML] = before
