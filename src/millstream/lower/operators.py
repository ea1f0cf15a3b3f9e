"""Facts about operators from PyTorch: writes, randomness, kind, flops. Each private API in one function.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from millstream._torch.tensors import real_tensors
from millstream.graph import KernelKind

_LINEAR = {"linear", "_linear_pointwise", "_mkl_linear"}
_GEMMS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_int_mm", "_addmm_activation", *_LINEAR}
_POINTWISE = {"_convolution_pointwise", "_convolution_pointwise_"}  # oneDNN's, of weights that are frozen
_CONVOLUTIONS = {"convolution", "convolution_backward", *_POINTWISE}
_COPIES = {"copy_", "copy", "clone", "_to_copy"}

_SURE = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "avg_pool2d",
    "avg_pool2d_backward",
    "avg_pool3d",
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward",
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices",
    "max_pool3d_with_indices_backward",
    "native_batch_norm",
    "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
    "cumsum",
    "sort",
    "topk",
    "rand",
    "randn",
    "randint",
    "randperm",
    "empty_strided",
    "fill_",
    "zero_",
}
"""Library operators that raise for no values of their arguments."""


def kind_of(target: Any) -> KernelKind:
    """Classify a library kernel by its operator."""
    name = _packet_name(target)
    if name in _GEMMS:
        return KernelKind.GEMM
    if name in _CONVOLUTIONS:
        return KernelKind.CONV
    if name in _COPIES:
        return KernelKind.COPY
    return KernelKind.COLLECTIVE if getattr(target, "namespace", "") == "_c10d_functional" else KernelKind.LIBRARY


def count_flops(target: Any, args: Any, kwargs: Any, value: Any) -> int:
    """Floating-point operations of a library kernel, mostly by PyTorch's own formulas; 0 where they are not known."""
    if _packet_name(target) in _LINEAR and isinstance(value, torch.Tensor) and isinstance(args[0], torch.fx.Node):
        return 2 * value.numel() * args[0].meta["val"].shape[-1]  # type: ignore[no-any-return]
    if _packet_name(target) in _POINTWISE and isinstance(value, torch.Tensor):
        weight = args[[argument.name for argument in target._schema.arguments].index("W")].meta.get("val")
        return 2 * value.numel() * weight.numel() // weight.shape[0] if isinstance(weight, torch.Tensor) else 0
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = tree_map_only(torch.fx.Node, lambda node: node.meta.get("val"), (tuple(args), dict(kwargs)))
    out = kwargs.pop("out", value)
    # The formulas take their arguments by position, as the schema does; the wrapper passes some by name.
    names = [argument.name for argument in target._schema.arguments if not argument.kwarg_only]
    args = (*args, *(kwargs.pop(name) for name in names[len(args) :] if name in kwargs))
    try:
        flops: Any = formula(*args, **kwargs, out_val=out)
        return flops if isinstance(flops, torch.SymInt) else int(flops)  # type: ignore[return-value]
    except (TypeError, AssertionError, AttributeError):  # an overload whose arguments the formula does not take
        return 0


def written_arguments(target: Any, args: Any, kwargs: Any) -> list[torch.fx.Node]:
    """Nodes among the arguments of an operator that it writes, by its schema and what PyTorch knows beyond it."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.fx.Node)]
    written = []
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if argument.name in _mutable_names(target, _training(schema, args, kwargs)):
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.fx.Node)]
    return written


def may_raise(target: Any) -> bool:
    """Return whether a library operator may raise for the values that it gets, shapes and dtypes apart."""
    return kind_of(target) is KernelKind.LIBRARY and _packet_name(target) not in _SURE


_DROPPING = {
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_flash_attention_forward",
    "_efficient_attention_forward",
}
"""Operators that draw for dropout alone, and none where nothing is dropped: read in PyTorch's sources."""
_BY_CUDNN = "_scaled_dot_product_cudnn_attention"


def draws_random_numbers(target: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether a call of an operator moves the state of a random generator.

    Args:
        target: The operator.
        args: Of a node that calls it, where attention without dropout is to be told from that with it.
        kwargs: Likewise.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    name = _packet_name(target)
    if name != _BY_CUDNN and name not in _DROPPING:
        return True
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    default = target._schema.arguments[names.index("dropout_p")].default_value
    dropped = given.get("dropout_p", default)
    if not isinstance(dropped, (int, float)) or dropped != 0:
        return True
    value = getattr(given.get("query"), "meta", {}).get("val")
    return name == _BY_CUDNN and (value is None or _cudnn_draws(value.device))


@cache
def _cudnn_draws(device: torch.device) -> bool:
    """Return whether cuDNN's attention moves the generator of a GPU although it drops nothing: tried on that, once."""
    try:
        with real_tensors(), torch.no_grad(), torch.cuda.device(device):
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            before = generator.get_offset()
            query = torch.zeros(1, 1, 64, 64, dtype=torch.half, device=device)
            torch.ops.aten._scaled_dot_product_cudnn_attention(query, query, query, None, False, 0.0)
            if moved := generator.get_offset() - before:
                generator.set_offset(generator.get_offset() - moved)
            return moved != 0
    except (AttributeError, IndexError, RuntimeError, TypeError):  # another PyTorch, or a GPU that has it not
        return True


@cache
def _mutable_names(target: Any, training: bool) -> frozenset[str]:
    """Names of the arguments that an operator writes.

    ``native_batch_norm`` writes its running statistics in training although its schema denies it;
    ``torch._C._SchemaInfo`` knows.
    """
    info = torch._C._SchemaInfo(target._schema)
    info.add_argument_values(
        {"training": training} if any(a.name == "training" for a in target._schema.arguments) else {}
    )
    return frozenset(
        argument.name
        for argument in target._schema.arguments
        if (argument.alias_info is not None and argument.alias_info.is_write) or info.is_mutable(argument.name)
    )


def _training(schema: Any, args: Any, kwargs: Any) -> bool:
    for position, argument in enumerate(schema.arguments):
        if argument.name == "training":
            return bool(args[position] if position < len(args) else kwargs.get("training", True))
    return True


def _packet_name(target: Any) -> str:
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet)).split(".")[-1]


def count_elementwise(origins: Any) -> int:
    """Operations of a generated kernel, counted as one per result element of each operator fused into it."""
    total = 0
    for origin in origins:
        value = origin.meta.get("val")
        if origin.op == "call_function" and isinstance(value, torch.Tensor):
            total += value.numel()
    return total
