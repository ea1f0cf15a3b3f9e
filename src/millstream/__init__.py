"""Millstream keeps accelerators busy: a model or a whole training step as one graph of fused kernels.

>>> import millstream as ms
>>> model = ms.compile(model)
>>> @ms.step
... def train_step(x, y): ...
>>> for x, y in ms.feed(loader, "cuda"):
...     ...
>>> print(ms.explain(train_step))
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from millstream import data as data
from millstream import device as device
from millstream import errors as errors
from millstream import manual as manual
from millstream import results as results
from millstream.data import feed
from millstream.errors import ArgumentError, CaptureError, FallbackWarning, MillstreamError
from millstream.manual import streams
from millstream.report import Explanation
from millstream.results import fetch

if TYPE_CHECKING:
    from millstream.api import (
        callback,
        compile,
        eager_region,
        explain,
        full_state_dict,
        load_programs,
        precompile,
        profile,
        save_programs,
        step,
        trace_syncs,
        version_report,
    )

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CaptureError",
    "Explanation",
    "FallbackWarning",
    "MillstreamError",
    "callback",
    "compile",
    "eager_region",
    "explain",
    "feed",
    "fetch",
    "full_state_dict",
    "load_programs",
    "precompile",
    "profile",
    "save_programs",
    "step",
    "streams",
    "trace_syncs",
    "version_report",
]

_LATE = frozenset(
    (
        "callback",
        "compile",
        "eager_region",
        "explain",
        "full_state_dict",
        "load_programs",
        "precompile",
        "profile",
        "save_programs",
        "step",
        "trace_syncs",
        "version_report",
    )
)


_MOVED = {
    **dict.fromkeys(("Parallel", "aux_streams", "dual_stream_backward", "parallel"), "manual"),
    **dict.fromkeys(
        ("DataParallelError", "DeviceError", "FeedError", "GraphError", "InternalError", "LoweringError", "PlanError"),
        "errors",
    ),
    "device_context": "device",
    "device_guard": "device",
}
"""The modules that names have moved to; here each works, with a warning, until 0.2."""


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch's compiler when it is first asked for: that takes seconds. Names that moved warn."""
    if name in _MOVED:
        module, new = import_module(f"{__name__}.{_MOVED[name]}"), name.removeprefix("device_")
        text = f"ms.{name} is ms.{_MOVED[name]}.{new} now; the old name goes in 0.2."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        globals()[name] = getattr(module, new)
        return globals()[name]
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from millstream import api

    for late in _LATE:
        globals()[late] = getattr(api, late)
    return globals()[name]


def __dir__() -> list[str]:
    """Name what is public, also what is imported late: ``ms.<TAB>`` shows all there is, and nothing else."""
    modules = ("data", "device", "errors", "manual", "results")
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *modules})
