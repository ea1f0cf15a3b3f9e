"""Millstream keeps accelerators busy: a model or a whole training step as one graph of fused kernels.

>>> import millstream as ms
>>> model = ms.compile(model)
>>> @ms.step
... def train_step(x, y): ...
>>> for x, y in ms.feed(loader, "cuda"): ...
>>> print(ms.explain(train_step))
"""

from millstream.api import compile, explain, feed, step
from millstream.errors import (
    ArgumentError,
    CaptureError,
    DeviceError,
    FallbackWarning,
    FeedError,
    GraphError,
    InternalError,
    LoweringError,
    MillstreamError,
    PlanError,
)
from millstream.report import Explanation

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CaptureError",
    "DeviceError",
    "Explanation",
    "FallbackWarning",
    "FeedError",
    "GraphError",
    "InternalError",
    "LoweringError",
    "MillstreamError",
    "PlanError",
    "compile",
    "explain",
    "feed",
    "step",
]
