"""What is known to be impossible to capture, refused before anything is tried."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS

from millstream.capture.discover import Found
from millstream.capture.torch_private import has_backward_hooks, has_tensor_hooks
from millstream.errors import CaptureError


def check_supported(found: Found) -> None:
    """Refuse optimizers that read values, and whatever autograd would run in eager mode and a trace would not see.

    Raises:
        CaptureError: Something in ``found`` is of that kind.
    """
    for name, optimizer in found.optimizers:
        if isinstance(optimizer, LBFGS):
            raise CaptureError(
                f"{name} is LBFGS, which evaluates its closure as often as the values demand.",
                remedy="Run this step without ms.step.",
            )
    for name, root in found.modules:
        if isinstance(root, torch.nn.parallel.DistributedDataParallel):
            raise CaptureError(f"{name} is DistributedDataParallel.", remedy="Use the plain module.")
        for path, module in root.named_modules():
            if has_backward_hooks(module):
                raise CaptureError(
                    f"{name}.{path} has a backward hook, which would not run in a graph.", remedy="Remove the hook."
                )
        for path, parameter in root.named_parameters():
            if not is_lazy(parameter) and has_tensor_hooks(parameter):
                _refuse_hook(f"{name}.{path}")
    for name, tensor in found.tensors:
        if has_tensor_hooks(tensor):
            _refuse_hook(name)
    for name, optimizer in found.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            if any(has_tensor_hooks(parameter) for parameter in group["params"] if not is_lazy(parameter)):
                _refuse_hook(f"A parameter in {name}.param_groups[{number}]")


def _refuse_hook(name: str) -> None:
    raise CaptureError(
        f"{name} has a hook on its gradient, which would not run in a graph.",
        remedy="Remove the hook and change the gradient in the step, after backward.",
    )
