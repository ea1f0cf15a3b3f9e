"""Python's ``math`` and ``json`` take numbers of a graph."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from millstream._torch.tracing import attributes_here
from millstream.capture.trace.arithmetic import compute, of_floats
from millstream.capture.trace.scalars import is_scalar
from millstream.capture.trace.sizes import is_traced_size

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

_OF_HOST = "cbrt comb factorial frexp gamma gcd isfinite isinf isnan isqrt lcm ldexp modf nextafter perm remainder ulp"
"""Others, which the host computes; ``floor`` and its like ask the number itself."""


def math_takes_scalars() -> contextlib.AbstractContextManager[None]:
    """For the length of the context, functions of ``math`` give a graph scalar for one, and for a size of a call."""

    def taking(name: str) -> Callable[..., Any]:
        function, of_tensor = getattr(math, name), _OF_MATH.get(name)

        def take(*args: Any) -> Any:
            args = tuple(arg.scalar() if is_traced_size(arg) else arg for arg in args)
            if not any(map(is_scalar, args)):
                return function(*args)
            return compute(function, *args, form=None if of_tensor is None else of_floats(of_tensor))

        return take

    return attributes_here(math, **{name: taking(name) for name in (*_OF_MATH, *_OF_HOST.split())})


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
