"""The core's data: kernel graphs and plans."""

from millstream.graph.kernel_graph import Buffer, Kernel, KernelGraph, KernelKind, Role
from millstream.graph.plan import Allocate, Copy, Free, Launch, Plan, Record, Step, Wait

__all__ = [
    "Allocate",
    "Buffer",
    "Copy",
    "Free",
    "Kernel",
    "KernelGraph",
    "KernelKind",
    "Launch",
    "Plan",
    "Record",
    "Role",
    "Step",
    "Wait",
]
