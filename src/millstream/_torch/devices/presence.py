"""Find out whether there is a GPU without touching CUDA. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import torch


def has_gpu() -> bool:
    """Return whether there is a GPU, as far as NVML tells. CUDA is left uninitialized.

    ``torch.cuda.is_available()`` initializes the driver. After that, ``CUDA_VISIBLE_DEVICES`` has no effect any more,
    and forked processes cannot use the GPU. ``device_count`` does so only where NVML is missing.
    """
    return torch.cuda.device_count() > 0
