"""A stand-in for the guard of CUDA devices that PyTorch's fake tensors ask for where there is none.

A build for CUDA on a machine without a device gives every thread that enters a mode of fake tensors a guard of its own,
and notes the latest for the whole process. When its thread is gone, so is the guard: the next trace, or backward pass,
ends the process (since pytorch#160532; seen on torch 2.11, later builds for CUDA were not tried). The first guard is
therefore made in a thread that stays. ``MILLSTREAM_WITHOUT=pytorch#160532`` leaves that out.
"""

from __future__ import annotations

import functools
import threading

import torch

from millstream._torch.workarounds import Workaround

WORKAROUND = Workaround(
    "pytorch#160532", "the process ends, with builds for CUDA where no device is, after a trace in a thread that ended"
)


@functools.cache
def keep_device_guard() -> None:
    """Let the guard outlive the calling thread; once in a process. Tried on 2.11 and 2.13."""
    make = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if not WORKAROUND.applies or make is None or torch.version.cuda is None or torch.cuda.device_count() > 0:
        return
    if threading.current_thread() is threading.main_thread():
        make()
        return
    is_made = threading.Event()

    def stay() -> None:
        make()
        is_made.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="millstream guard", daemon=True).start()
    is_made.wait()
