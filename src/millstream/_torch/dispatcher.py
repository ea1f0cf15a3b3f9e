"""Facts about operators from PyTorch's dispatcher, and modes that see every operator. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._decomp import global_decomposition_table
from torch._functorch import predispatch
from torch._library.simple_registry import singleton
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

#: While an object of it lives, modes and subclasses of this thread see no operators.
hide_operators: Any = torch._C._DisableTorchDispatch

num_modes: Any = torch._C._len_torch_dispatch_stack
"""How many modes see this thread's operators."""

is_wrapper = is_traceable_wrapper_subclass
"""Whether a tensor of a subclass is made of others, and has no memory of its own."""


_PYTORCHS = frozenset(
    """
    aten prims prim inductor inductor_prims c10d c10d_functional _c10d_functional _c10d_functional_autograd symm_mem
    _dtensor fsdp mkl mkldnn mkldnn_prepacked prepacked onednn quantized _quantized quantized_decomposed quantization
    sparse rngprims profiler streams export higher_order cuda _native millstream
    """.split()
)
"""Namespaces of operators whose code is known: PyTorch's and ours."""


def is_users(target: Any) -> bool:
    """Return whether an operator is the user's, or a library's: neither PyTorch's nor ours."""
    return isinstance(target, torch._ops.OpOverload) and not is_known(target)


def is_known(operator: Any) -> bool:
    """Return whether an operator, or all overloads of one, are PyTorch's or ours."""
    return str(operator).partition(".")[0] in _PYTORCHS


def names_of_overloads(name: str) -> list[str]:
    """The overloads of one of PyTorch's own operators; none where there is no such operator."""
    packet = getattr(torch.ops.aten, name, None)
    return list(packet.overloads()) if isinstance(packet, torch._ops.OpOverloadPacket) else []


def is_composite(operator: Any) -> bool:
    """Return whether an operator is made of others; then its schema need not tell what it writes."""
    name = operator.name()
    if not torch._C._dispatch_has_kernel(name):  # of TorchScript's alone
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def is_expanded_later(operator: Any) -> bool:
    """Whether Python of the user's takes the place of an operator when it meets AOT autograd, as of ``triton_op``."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace in ("aten", "prims"):
        return False
    entry = singleton._data.get(f"{operator.namespace}::{operator._opname}")  # ``find`` would make one
    return entry is not None and bool(entry.torch_dispatch_rules._data)


def replaced_by_others() -> list[str]:
    """Operators of PyTorch's in whose place tracing or lowering comes to Python code of others."""
    late = getattr(predispatch.VMAP_DECOMPOSITIONS_LIB, "_op_impls", ())  # PyTorch's own, since ``vmap`` first ran
    found = {
        each
        for each in torch.library._impls
        if each.startswith(_OWN) and not each.endswith(_OF_DEVICES) and each not in late
    }
    tables = [*global_decomposition_table.values()]
    for module, name in (("decomposition", "decompositions"), ("lowering", "lowerings")):
        if (loaded := sys.modules.get(f"torch._inductor.{module}")) is not None:  # or nobody has put anything there
            tables.append(getattr(loaded, name))
    for table in tables:
        for operator, function in table.items():
            root = str(getattr(function, "__module__", "")).partition(".")[0]
            if root not in _KNOWN:
                found.add(str(operator))
    return sorted(found)


_KNOWN = frozenset("torch functools millstream operator _operator math builtins".split())
"""Where functions in those tables come from; in torch 2.11 the lowering of ``operator.add`` passes as Python's."""
_OWN = ("aten/", "prim/")
_OF_DEVICES = tuple(f"/{key}" for key in "Meta CPU CUDA MPS XPU HPU MTIA PrivateUse1".split())
"""Kernels by which eager computes: a trace has none of them in it."""


def find_modes() -> list[Any]:
    """The modes that see this thread's operators, the one that sees them first in front."""
    return [torch._C._get_dispatch_stack_at(i) for i in reversed(range(torch._C._len_torch_dispatch_stack()))]


def push_mode(mode: TorchDispatchMode) -> None:
    """Let a mode see this thread's operators, before all others.

    Not by entering it: PyTorch's compiler declines functions while it believes a mode of a user's to be active.
    """
    torch._C._push_on_torch_dispatch_stack(mode)


def remove_mode(mode: TorchDispatchMode) -> bool:
    """Take a mode away, also from below others; return whether it was there."""
    above: list[Any] = []
    try:
        while torch._C._len_torch_dispatch_stack():
            top = torch._C._pop_torch_dispatch_stack(None)
            if top is mode:
                return True
            above.append(top)
        return False
    finally:
        for other in reversed(above):
            torch._C._push_on_torch_dispatch_stack(other)


def is_being_traced() -> bool:
    """Return whether operators of this thread are recorded into a graph rather than run."""
    if torch.compiler.is_compiling():
        return True
    if not num_modes():
        return False
    return any(
        torch._C._get_dispatch_mode(key) is not None
        for key in (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
    )


def is_transformed() -> bool:
    """Return whether operators are being transformed, as by ``torch.func.grad``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


#: The innermost transform of what this thread calls, ``None`` where there is none; without a call of Python's.
innermost_transform: Any = torch._C._functorch.peek_interpreter_stack

#: Where the level of forward-mode differentiation is, ``_current_level``; below 0 outside of any.
FORWARD_AD: Any = forward_ad


def is_differentiated_outside() -> bool:
    """Return whether what this thread calls is being transformed, or a level of forward-mode differentiation is open.

    Asked in every call. Tried on 2.11 and 2.13.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
