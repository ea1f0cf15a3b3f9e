"""PyTorch's functions with scalars of a graph among their arguments, in the forms that take tensors for numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from millstream.capture.state.executed import function_asking
from millstream.capture.trace.numbers.scalars import GraphScalar, is_scalar, is_tensor, is_whole, plain_of

_TAKE_TENSORS = frozenset(
    """
    add radd sub subtract rsub mul multiply rmul div divide true_divide rdiv rtruediv pow rpow float_power remainder
    fmod floor_divide rfloordiv eq ne lt le gt ge clamp clamp_min clamp_max fill where copysign atan2 hypot
    broadcast_tensors gumbel_softmax
    """.split()
)
"""Functions that compute with a 0-d tensor given for a number. Most others take one as well, but read its value."""


def run_with_scalars(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a PyTorch function, some of whose arguments are graph scalars, in a form that takes tensors for them."""
    if any(is_scalar(value) and value.is_asked_by_others for value in (*args, *kwargs.values())):
        return function(*map(plain_of, args), **{key: plain_of(value) for key, value in kwargs.items()})
    args, kwargs = _readable(args), {key: _readable(value) for key, value in kwargs.items()}
    name = getattr(function, "__name__", "")
    if name.startswith("_foreach_"):
        return _run_foreach(name.removeprefix("_foreach_"), function, args, kwargs)
    plain = name.rstrip("_")
    if plain in ("add", "sub", "subtract") and is_scalar(kwargs.get("alpha")):
        alpha = kwargs["alpha"]
        rest = {key: value for key, value in kwargs.items() if key != "alpha"}
        return function(args[0], _times(args[1], alpha), *args[2:], **rest)
    if plain in ("addcmul", "addcdiv") and (scalar := _scalar_at(args, kwargs, 3, "value")) is not None:
        return function(args[0], _times(args[1], scalar), args[2])
    if plain == "lerp" and (scalar := _scalar_at(args, kwargs, 2, "weight")) is not None:
        moved = args[0] + (args[1] - args[0]) * scalar.as_tensor_for(args[0])
        return args[0].copy_(moved) if name.endswith("_") else moved
    if plain in _FILL:
        return _fill(plain, function, args, kwargs)
    like = next((arg for arg in args if is_tensor(arg)), None)

    def as_tensor(value: Any) -> Any:
        return value.as_tensor_for(like) if is_scalar(value) else value

    if plain.strip("_") in _TAKE_TENSORS:
        try:
            return function(*map(as_tensor, args), **{key: as_tensor(value) for key, value in kwargs.items()})
        except TypeError:  # not in this combination
            pass
    if function in (torch.tensor, torch.as_tensor) and args and _are_at(kwargs.get("device"), tree_leaves(args[0])):
        return _new_tensor(*args, **kwargs)
    # Takes numbers only: the graph then belongs to this value, which is written down.
    return function(*map(plain_of, args), **{key: plain_of(value) for key, value in kwargs.items()})


def _readable(value: Any) -> Any:
    """The value with plain numbers for those that no tensor of whole numbers can hold."""
    if isinstance(value, list | tuple) and any(map(is_scalar, value)):
        return type(value)(map(_readable, value))
    return value.plain() if is_scalar(value) and value.is_known and not value.is_readable else value


_FILL = {"masked_fill": 2, "index_fill": 3, "__setitem": 2, "full": 1, "full_like": 1, "new_full": 2}
"""By function, which of its arguments the elements of a tensor become."""


def _fill(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give elements of a tensor a number."""
    at = _FILL[name]
    number = args[at] if len(args) > at else next(kwargs.pop(key) for key in ("value", "fill_value") if key in kwargs)
    args, kwargs = plain_of(args[:at]), {key: plain_of(value) for key, value in kwargs.items()}
    if not is_scalar(number):
        return function(*args, number, **kwargs)
    if "full" in name:
        made = function(*args, 0 if number.has_integer else 0.0, **kwargs)
        with torch.no_grad():  # it may be a leaf that requires a gradient
            return made.fill_(_element(number, made))
    return function(*args, _element(number, args[0]), **kwargs)


def _element(number: GraphScalar, of: Tensor) -> Any:
    """A number as an element of a tensor; its plain value where PyTorch checks whether there is room for it."""
    takes_all = of.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128)
    if number.device == of.device and (takes_all or (of.dtype == torch.int64 and number.has_integer)):
        return number.in_dtype(of.dtype)
    return number.plain()


def _are_at(device: Any, parts: Sequence[Any]) -> bool:
    """Return whether these are numbers that the graph has on a device; ``None``: that of new tensors.

    Those of an optimizer are where its parameters are. To bring them to the host a graph would have to wait.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    return all(each.device == device if is_scalar(each) else type(each) in (int, float) for each in parts)


def _new_tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **how: Any) -> Tensor:
    """``torch.tensor`` of numbers, in lists or not, some of which change."""
    if dtype is None:
        dtype = torch.int64 if all(map(is_whole, tree_leaves(data))) else torch.get_default_dtype()

    def made(part: Any) -> Tensor:
        if isinstance(part, list | tuple):
            return torch.stack([*map(made, part)])
        if is_scalar(part):
            return part.in_dtype(dtype).clone()
        return torch.tensor(part, dtype=dtype, device=device)

    return made(data).requires_grad_(how.get("requires_grad", False))


def _times(value: Any, scalar: GraphScalar) -> Any:
    return value * scalar.as_tensor_for(value) if is_tensor(value) else value * scalar


def _tensor_of(value: Any, like: Tensor) -> Tensor:
    if is_scalar(value):
        return value.as_tensor_for(like)
    return value if is_tensor(value) else torch.full((), value, dtype=like.dtype, device=like.device)


def _scalar_at(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> GraphScalar | None:
    value = kwargs.get(name, args[position] if len(args) > position else None)
    return value if is_scalar(value) else None


def _run_foreach(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forms with lists of tensors stay one foreach operator, which compilers fuse over the whole list."""
    plain = name.rstrip("_")
    if is_scalar(args[0]):  # number ** tensors
        return [getattr(torch, plain)(args[0].as_tensor_for(tensor), tensor) for tensor in args[1]]
    tensors = list(args[0])

    def spread(scalar: GraphScalar) -> list[Tensor]:
        return [scalar.as_tensor_for(tensor) for tensor in tensors]

    def replaced(value: Any) -> Any:
        if is_scalar(value):
            return spread(value)
        if isinstance(value, list | tuple) and any(is_scalar(item) for item in value):
            return [_tensor_of(item, like) for item, like in zip(value, tensors, strict=True)]
        return value

    if plain in ("add", "sub") and is_scalar(kwargs.get("alpha")):
        return function(tensors, torch._foreach_mul(args[1], spread(kwargs["alpha"])))
    if plain in ("addcmul", "addcdiv"):
        factor = kwargs.get("value", kwargs.get("scalars", args[3] if len(args) > 3 else 1))
        return function(tensors, torch._foreach_mul(args[1], replaced(factor)), args[2])
    if plain == "lerp" and (scalar := _scalar_at(args, kwargs, 2, "weight")) is not None:
        moves = torch._foreach_mul(torch._foreach_sub(args[1], tensors), spread(scalar))
        return (torch._foreach_add_ if name.endswith("_") else torch._foreach_add)(tensors, moves)

    return function(*map(replaced, args), **{key: replaced(value) for key, value in kwargs.items()})


def _run(_cls: Any, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """A function of PyTorch's that takes a scalar in a tensor's place, where no mode sees it."""
    return run_with_scalars(function_asking(func, sys._getframe(1)), args, kwargs or {})


setattr(GraphScalar, "__torch_function__", classmethod(_run))  # noqa: B010
