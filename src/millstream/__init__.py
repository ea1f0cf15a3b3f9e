"""Millstream keeps accelerators busy: a model or a whole training step as one graph of fused kernels.

>>> import millstream as ms
>>> model = ms.compile(model)
>>> @ms.step
... def train_step(x, y): ...
>>> for x, y in ms.feed(loader, "cuda"):
...     ...
>>> print(ms.explain(train_step))
"""

from typing import TYPE_CHECKING, Any

from millstream.data import feed
from millstream.device import context as device_context
from millstream.device import guard as device_guard
from millstream.errors import (
    ArgumentError,
    CaptureError,
    DataParallelError,
    DeviceError,
    FallbackWarning,
    FeedError,
    GraphError,
    InternalError,
    LoweringError,
    MillstreamError,
    PlanError,
)
from millstream.manual import Parallel, aux_streams, dual_stream_backward, parallel, streams
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
    "DataParallelError",
    "DeviceError",
    "Explanation",
    "FallbackWarning",
    "FeedError",
    "GraphError",
    "InternalError",
    "LoweringError",
    "MillstreamError",
    "Parallel",
    "PlanError",
    "aux_streams",
    "callback",
    "compile",
    "device_context",
    "device_guard",
    "dual_stream_backward",
    "eager_region",
    "explain",
    "feed",
    "fetch",
    "full_state_dict",
    "load_programs",
    "parallel",
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


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch's compiler when it is first asked for: that takes seconds."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from millstream import api

    for late in _LATE:
        globals()[late] = getattr(api, late)
    return globals()[name]


def __dir__() -> list[str]:
    """Name what is public, also what is imported late: ``ms.<TAB>`` shows all there is, and nothing else."""
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
