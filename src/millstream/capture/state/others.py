"""Show other threads, while one traces, what was there before the step put a tensor without values in its place.

The user's own tensors are not touched. What the step makes and stores is in its place until all is put back.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from millstream._torch.tensors import FakeTensor, asks_device
from millstream.capture.lines import here
from millstream.capture.state.executed import function_asking
from millstream.errors import CaptureError
from millstream.locks import TRACING


@functools.lru_cache(maxsize=64)  # what is kept by the type of a tensor is found again in the next trace
def stand_in_for(thread: int) -> type[FakeTensor]:
    """The class of tensors that one thread traces; what others do with such a one they do with what was there before.

    Where nothing was there that is an error. It comes here before PyTorch's C++ code has looked into the tensor.
    """

    class TracedTensor(FakeTensor):
        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            func = function_asking(func, sys._getframe(1))
            if threading.get_ident() == thread:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            args, kwargs = _with_values((args, kwargs or {}))
            return func(*args, **kwargs)

        @classmethod
        def __torch_dispatch__(
            cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if threading.get_ident() == thread:
                return super().__torch_dispatch__(func, types, args, kwargs or {})  # type: ignore[arg-type]
            if func is asks_device:
                return args[0].fake_device
            args, kwargs = _with_values((args, kwargs or {}))
            return func(*args, **kwargs)

        @property
        def device(self) -> torch.device:  # type: ignore[override]
            if threading.get_ident() == thread:
                return FakeTensor.device.fget(self)  # type: ignore[attr-defined]
            return _with_values(self).device

    TracedTensor.__name__ = TracedTensor.__qualname__ = "Tensor"  # which programs ask for, and errors say
    return TracedTensor


_STANDS_FOR = "_millstream_stands_for"


def stand_for(fake: Any, real: Any) -> None:
    """Where another thread has come by a fake tensor, let it have what was there before, or is again."""
    if isinstance(fake, FakeTensor) and isinstance(real, Tensor):
        vars(fake)[_STANDS_FOR] = weakref.ref(real)


def _with_values(given: Any) -> Any:
    return tree_map_only(FakeTensor, _what_it_stands_for, given)


def _what_it_stands_for(fake: FakeTensor) -> Tensor:
    real = vars(fake).get(_STANDS_FOR, lambda: TRACING.before(fake))()
    if isinstance(real, Tensor) and not isinstance(real, FakeTensor):
        return real
    raise CaptureError(
        "This tensor was made by a step that another thread has captured, and has no values.",
        where=here(),
        remedy="Take it anew from where you have it.",
    )
