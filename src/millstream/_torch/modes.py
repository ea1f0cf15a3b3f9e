"""Modes of a thread that change what operators do; asked in every call. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._device import DeviceContext

from millstream._torch.dynamo import compiles_elsewhere


def is_any_autocast_enabled() -> bool:
    """Whether this thread computes in other types on any device; asked in every call. Tried on 2.11 and 2.13."""
    return bool(torch._C._is_any_autocast_enabled())


#: ``is_any_autocast_enabled`` without a call of Python's.
any_autocast: Any = torch._C._is_any_autocast_enabled


def modes_of_caller() -> tuple[Any, ...]:
    """What of this thread sees or changes each operator: devices as such, the rest as names; asked in every call.

    Tried on 2.11 and 2.13.
    """
    functions, dispatches = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
    looking = torch.is_anomaly_enabled() and not compiles_elsewhere()  # AOT autograd sets it, for all threads
    if not (functions or dispatches or saving or looking):
        return ()
    modes: list[Any] = [torch._C._get_function_stack_at(i) for i in range(functions)]
    modes += [torch._C._get_dispatch_stack_at(i) for i in range(dispatches)]
    names = [mode.device if isinstance(mode, DeviceContext) else type(mode).__name__ for mode in modes]
    return (*names, *(["saved_tensors_hooks"] if saving else []), *(["anomaly mode"] if looking else []))
