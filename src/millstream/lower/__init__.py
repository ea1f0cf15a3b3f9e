"""FX graph of torch operators → fused kernels with known reads and writes."""

from typing import TYPE_CHECKING, Any

from millstream.lower.inductor.probe import ask_early
from millstream.program import KernelCall, Program, TensorLayout, Value, View

if TYPE_CHECKING:
    from millstream.lower.compile import Cutting, Lowered, LoweredForSizes, Phase, check_options, compile_graph
    from millstream.lower.failures import describe_failure
    from millstream.lower.segmented.segments import Segments

__all__ = [
    "Cutting",
    "KernelCall",
    "Lowered",
    "LoweredForSizes",
    "Phase",
    "Program",
    "Segments",
    "TensorLayout",
    "Value",
    "View",
    "ask_early",
    "check_options",
    "compile_graph",
    "describe_failure",
]


def __getattr__(name: str) -> Any:
    """What needs Inductor, which takes seconds to import, is imported where it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from millstream.lower import compile as compiling
    from millstream.lower import failures

    return getattr(failures if hasattr(failures, name) else compiling, name)
