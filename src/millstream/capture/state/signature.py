"""The key that calls share if one graph serves them: their form, their tensors', and values that are the same.

Arguments are taken apart by ``millstream.tree``; what is told of tensors and plain values is here.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from millstream._torch.modes.active_modes import ambient
from millstream._torch.modes.switches import SwitchSettings
from millstream.tree.spec import SCALARS

TensorSpec: TypeAlias = tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...], object, bool]
"""Shape, dtype, device, strides, whether a gradient is required (no, yes by a leaf, yes by a computed tensor), and
whether it is a lazy view.
"""


def is_other(number: Any, before: Any) -> bool:
    """Return whether two numbers differ, be it by the sign of a zero; a NaN is the same as another."""
    if number != before:
        return bool(number == number or before == before or f"{number}" != f"{before}")
    return not number and f"{number}" != f"{before}"


def is_same(now: Any, value: Any) -> bool:
    """Return whether two plain values are equal, or methods are one of one object.

    Others are the same by identity only.
    """
    if now is value:
        return True
    if type(now) is type(value) is float:  # asked in each call with a number that changes
        return not is_other(now, value)
    if type(now) is not type(value) or issubclass(type(now), (torch.SymFloat, torch.SymInt)):  # not to be asked
        return False
    if isinstance(value, tuple):  # item by item: tensors in it would compare their values
        return are_same(now, value)
    if isinstance(value, types.MethodType):  # made anew wherever it is asked for
        return now.__self__ is value.__self__ and now.__func__ is value.__func__
    return isinstance(value, SCALARS) and not is_other(now, value)


def are_same(items: Any, others: Any) -> bool:
    """Return whether two collections hold the same values in the same order."""
    return len(items) == len(others) and (all(map(is_, items, others)) or all(map(is_same, items, others)))


RESOLVE_REMEDY = "Pass x.resolve_conj().resolve_neg()."
"""Kernels read memory as it lies."""


def is_lazy_view(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` holds its values with another sign, as that of ``z.conj()`` does."""
    return tensor.is_neg() or tensor.is_conj()


def spec_of(tensor: Tensor) -> TensorSpec:
    """Everything about ``tensor`` that a captured graph depends on, apart from its values."""
    gradient = tensor.requires_grad and ("leaf" if tensor.is_leaf else "computed")
    try:
        return (tensor.shape, tensor.dtype, tensor.device, tensor.stride(), gradient, is_lazy_view(tensor))
    except RuntimeError:  # sparse or nested: it has no strides, and will be refused
        return (tensor.shape, tensor.dtype, tensor.device, (), gradient, False)


def form_of(value: Any) -> Any:
    """Return what a graph depends on of a tensor that is passed to it."""
    return type(value), spec_of(value) if isinstance(value, Tensor) else None


def kind_of(value: Any) -> Any:
    """Return what is told of a tensor without asking it for more than where it is."""
    return type(value), value.device if isinstance(value, Tensor) else None


def whole_form_of(value: Any) -> Any:
    """Everything that Python may read of a tensor, but its values; another value itself."""
    if not isinstance(value, Tensor):
        return type(value), None
    gradient = value.grad if value.is_leaf else None
    return type(value), spec_of(value), value.storage_offset(), None if gradient is None else spec_of(gradient)


def key_of_tensors(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """The key of a call with tensors only, no two the same, whose number is its form; ``None`` for other calls."""
    if {*map(type, values)} - {Tensor} or (len(values) > 1 and has_same(values)):
        return None
    return key_of(len(values), values)


def key_of(form: Any, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return what calls have in common that one graph may fit.

    Their form, the modes they run under, and their tensors'.
    """
    specs = [*map(spec_of, tensors)]
    return (form, ambient(), *specs)


def settings_of(key: tuple[Any, ...]) -> SwitchSettings:
    """PyTorch's switches in the key of a call."""
    _, (settings, *_), *_ = key
    return settings  # type: ignore[no-any-return]


def has_same(values: Sequence[Any]) -> bool:
    """Return whether one of them occurs twice."""
    return len({*map(id, values)}) != len(values)
