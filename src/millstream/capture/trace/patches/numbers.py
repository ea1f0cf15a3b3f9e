"""Python's ``math`` and ``json`` take numbers of a graph."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from millstream._torch.tracing import attributes_here
from millstream.capture.trace.scalars import is_scalar
from millstream.capture.trace.sizes import is_traced_size

_OF_MATH = ("sqrt", "exp", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tanh", "pow")


def math_takes_scalars() -> contextlib.AbstractContextManager[None]:
    """For the length of the context, functions of ``math`` give a graph scalar for one, and for a size of a call."""

    def taking(name: str) -> Callable[..., Any]:
        function, of_tensor = getattr(math, name), getattr(torch, name)

        def compute(*args: Any) -> Any:
            args = tuple(arg.scalar() if is_traced_size(arg) else arg for arg in args)
            if not any(is_scalar(arg) for arg in args):
                return function(*args)
            return args[0] ** args[1] if name == "pow" else args[0].apply(function, of_tensor)

        return compute

    return attributes_here(math, **{name: taking(name) for name in _OF_MATH})


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
