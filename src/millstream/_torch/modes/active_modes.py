"""Modes of a thread that change what operators do; asked in every call. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._device import DeviceContext

from millstream._torch.compiler.dynamo import compiles_elsewhere
from millstream._torch.modes import switches

#: Whether this thread computes in other types on any device. Tried on 2.11 and 2.13.
any_autocast: Any = torch._C._is_any_autocast_enabled

_cuda: Any = torch.cuda


def ambient() -> tuple[Any, ...]:
    """Switches and modes of this thread under which a step runs and which its graph depends on; asked in every call."""
    settings = switches._known.get(switches._read()) or switches.present()  # as a rule without a call more
    modes: tuple[Any, ...] = (settings, torch.is_grad_enabled(), *modes_of_caller())
    if torch._C._is_any_autocast_enabled():
        dtypes = (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda"))
        on = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.is_autocast_cache_enabled()
        modes = (*modes, *on, *dtypes)
    if len(_cuda.default_generators) > 1 and _cuda.is_initialized():  # there are several devices
        return (*modes, torch._C._cuda_getDevice())
    return modes


def modes_of_caller() -> tuple[Any, ...]:
    """Return what of this thread sees or changes each operator.

    Devices as such, the rest as names; asked in every call.

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
