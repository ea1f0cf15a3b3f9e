"""Python's ``math`` and ``json``, and NumPy, take numbers of a graph."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from millstream._torch.one_thread import attributes_here
from millstream.capture.trace.numbers.arithmetic import compute, of_answers, of_floats
from millstream.capture.trace.numbers.numpy_arrays import LaterArray
from millstream.capture.trace.numbers.scalars import GraphScalar, is_scalar, plain_of
from millstream.capture.trace.numbers.sizes import is_traced_size

_OF_MATH = {
    **{
        name: getattr(torch, name)
        for name in """
        acos acosh asin asinh atan atan2 atanh copysign cos cosh erf erfc exp exp2 expm1 fmod hypot lgamma log10 log1p
        log2 pow sin sinh sqrt tan tanh
        """.split()
    },
    "log": lambda number, base=None: torch.log(number) if base is None else torch.log(number) / math.log(base),
    "fabs": torch.abs,
    "degrees": torch.rad2deg,
    "radians": torch.deg2rad,
}
"""Functions of ``math`` that give floats, and what computes them in a graph."""

_OF_HOST = "cbrt comb factorial frexp gamma gcd isqrt lcm ldexp modf nextafter perm remainder ulp"
"""Others, which the host computes; ``floor`` and its like ask the number itself."""


_ANSWERS = {name: of_answers(getattr(torch, name)) for name in ("isfinite", "isinf", "isnan")}
"""Functions of ``math`` and of NumPy that give ``True`` or ``False``."""


def math_takes_scalars() -> contextlib.AbstractContextManager[None]:
    """For the length of the context, functions of ``math`` give a graph scalar for one, and for a size of a call."""

    def taking(name: str) -> Callable[..., Any]:
        function, of_tensor = getattr(math, name), _OF_MATH.get(name)
        form = _ANSWERS.get(name) if of_tensor is None else of_floats(of_tensor)

        def take(*args: Any) -> Any:
            args = tuple(arg.scalar() if is_traced_size(arg) else arg for arg in args)
            if not any(map(is_scalar, args)):
                return function(*args)
            return compute(function, *args, form=form)

        return take

    return attributes_here(math, **{name: taking(name) for name in (*_OF_MATH, *_ANSWERS, *_OF_HOST.split())})


@contextlib.contextmanager
def json_takes_scalars() -> Iterator[None]:
    """For the length of the context, ``json`` writes a scalar as the number that it is."""
    original = json.JSONEncoder.default

    def default(encoder: json.JSONEncoder, value: Any) -> Any:
        return value.plain() if is_scalar(value) else original(encoder, value)

    json.JSONEncoder.default = default  # type: ignore[method-assign]  # for other threads, too, which may find one
    try:
        yield
    finally:
        json.JSONEncoder.default = original  # type: ignore[method-assign]


# --- NumPy ------------------------------------------------------------------------------------------------------------

_OF_NUMPY = frozenset(
    getattr(np, name)
    for name in """
    around clip digitize fix interp isclose nan_to_num percentile polyval quantile round searchsorted sinc where
    """.split()
)
"""Functions of NumPy that give a number and look at nothing but their arguments; others are of its ``ufunc`` kind."""


def _take_ufunc(_: GraphScalar, ufunc: np.ufunc, method: str, *inputs: Any, **how: Any) -> Any:
    if any(issubclass(type(each), LaterArray) for each in inputs):
        return NotImplemented  # so that an array is asked that is known later
    if method == "__call__" and not how and getattr(np, ufunc.__name__, None) is ufunc:
        return _computed_by_numpy(ufunc, *inputs)
    return getattr(ufunc, method)(*map(plain_of, inputs), **how)


def _take_function(_: GraphScalar, function: Any, __: Any, args: tuple[Any, ...], how: dict[str, Any]) -> Any:
    if function in _OF_NUMPY:
        names = tuple(how)
        return _computed_by_numpy(_with_names(function, names), *args, *(how[name] for name in names))
    return function(*map(plain_of, args), **{name: plain_of(value) for name, value in how.items()})


def _computed_by_numpy(function: Callable[..., Any], *args: Any) -> Any:
    """Return what NumPy computes of numbers, and of lists and arrays of numbers that the host has."""
    form = _ANSWERS.get(getattr(function, "__name__", ""))
    if form is not None and is_scalar(args[0]):
        return compute(function, *args, form=form)
    is_known = all(each.is_known for each in args if is_scalar(each))
    if is_known and all(is_scalar(each) or isinstance(each, _OPERANDS) for each in args):
        return compute(function, *args)
    return function(*map(plain_of, args))


_OPERANDS = (int, float, np.number, np.ndarray, list, tuple, str, type(None))


@functools.cache
def _with_names(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """A function whose last arguments have these names: one object for each, so that what was computed is found."""
    if not names:
        return function

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        first = len(args) - len(names)
        return function(*args[:first], **dict(zip(names, args[first:], strict=True)))

    return call


setattr(GraphScalar, "__array_ufunc__", _take_ufunc)  # noqa: B010
setattr(GraphScalar, "__array_function__", _take_function)  # noqa: B010
