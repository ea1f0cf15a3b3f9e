"""Functions behind ``functools.lru_cache``: tensors that tracing makes must not stay in their caches."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.overrides import TorchFunctionMode


def caches_unfilled(
    functions: Sequence[types.FunctionType], report: Callable[[str], None]
) -> AbstractContextManager[Any]:
    """For the length of the context, ``report`` the name of one of ``functions`` that is about to make a tensor.

    It has been called, so its cache has no answer yet. ``report`` must raise: then there is nothing to keep, and an
    eager call can fill the cache with tensors that have values.
    """
    return _Watch({function.__code__ for function in functions}, report) if functions else contextlib.nullcontext()


class _Watch(TorchFunctionMode):
    def __init__(self, cached: set[types.CodeType], report: Callable[[str], None]) -> None:
        super().__init__()
        self._cached, self._report = cached, report

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # a look at an attribute makes nothing
            frame = sys._getframe(1)
            while frame is not None:
                if frame.f_code in self._cached:
                    self._report(frame.f_code.co_name)
                frame = frame.f_back  # type: ignore[assignment]
        return func(*args, **(kwargs or {}))
